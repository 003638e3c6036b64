"""Words of gradient compression, and the plans that they refuse."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.compression import Compression, Compressor, compression_of, read_compression
from perfmodel.parallel.plan_file import read_plan, write_plan

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=16, global_batch=64, seq_len=2048, profile="torch-fsdp2")


@pytest.mark.parametrize(
    "text, method, rank",
    [("none", "none", 1), ("FP16", "fp16", 1), ("bf16", "bf16", 1), ("powersgd", "powersgd", 1), (" powersgd:32 ", "powersgd", 32)],
)
def test_words_are_read_and_written(text, method, rank):
    compression = compression_of(text)
    assert compression == Compression(method=Compressor(method), rank=rank)
    assert compression_of(str(compression)) == compression == compression_of(read_compression(text))


@pytest.mark.parametrize(
    "given, says",
    [
        (
            {"gradient_compression": "power-sgd"},
            r"=power-sgd: is not known; use none, fp16, bf16, powersgd or powersgd:RANK",
        ),
        ({"gradient_compression": "fp16:2"}, "only powersgd has a rank, of at least 1; write powersgd:4"),
        ({"gradient_compression": "powersgd:0"}, "only powersgd has a rank, of at least 1"),
        ({"gradient_compression": "fp16", "zero": 3}, "and zero=3 reduce-scatters them to shards; use zero=0, or the setting"),
        ({"gradient_compression": "powersgd", "zero": 1}, "and zero=1 reduce-scatters them to shards"),
        ({"gradient_compression": "powersgd", "model": "mixtral-8x7b"}, "not priced for models with experts"),
        ({"settings": "gradient_compression=int8"}, "gradient_compression=int8: is not known"),
    ],
)
def test_other_words_and_sharded_gradients_are_refused(given, says):
    with pytest.raises(InputError, match=says):
        perfmodel.predict(**{**JOB, **given})


def test_a_plan_file_keeps_the_compression(tmp_path):
    plan = perfmodel.predict(**JOB, gradient_compression="powersgd:4").plan
    assert plan.framework.settings == {"gradient_compression": "powersgd:4"}
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert perfmodel.predict(tmp_path / "plan.yaml").plan.compression == Compression(method=Compressor.POWERSGD, rank=4)
    assert perfmodel.predict(tmp_path / "plan.yaml", gradient_compression="none") == perfmodel.predict(**JOB)


def test_a_prediction_names_the_iteration_from_which_it_holds():
    low, cast = (perfmodel.predict(**JOB, gradient_compression=word) for word in ("powersgd", "fp16"))
    assert any("from iteration 1,000" in warning for warning in low.warnings)
    assert not any("iteration" in warning for warning in cast.warnings)


def test_a_framework_without_hooks_does_not_run_it():
    megatron = perfmodel.predict(**{**JOB, "profile": "megatron"}, gradient_compression="fp16")
    assert megatron.not_runnable == "gradient_compression=fp16: megatron compresses none"
    deepspeed = {**JOB, "profile": "deepspeed"}
    assert perfmodel.predict(**deepspeed, gradient_compression="fp16").not_runnable == ""
    with pytest.raises(InputError, match="deepspeed compresses them by fp16 and bf16 only; leave it out, name another --framework"):
        perfmodel.find_plans(**deepspeed, gradient_compression="powersgd:2")
    assert perfmodel.find_plans(**deepspeed, gradient_compression="powersgd:2", any_framework=True, top=1).plans[0].not_runnable
