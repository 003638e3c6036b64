"""Rules of a replica's layout: one list for predictions, which refuse or mark a plan, and for searches, which leave it out."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.frameworks.engine_layouts import check_layout, layout_faults
from perfmodel.hardware.reader import load_cluster
from perfmodel.planner.serving.space import ServingSpace, layouts
from perfmodel.workload.models import load_model

ONE = dict(tp=1, pp=1, attention_dp=1, ep=1)


@pytest.mark.parametrize(
    ("model", "engine", "degrees", "words"),
    [
        ("deepseek-v3", "tensorrt-llm", dict(tp=2, attention_dp=4), "attention_dp=4: tensorrt-llm has attention dp with tp 1 only"),
        ("deepseek-v3", "vllm", dict(tp=8, ep=2), "ep=2: vllm has ep 1 or 8, all chips of a stage, only"),
        ("mixtral-8x7b", "vllm-2024", dict(tp=4, attention_dp=2, ep=8), "attention_dp=2: vllm-2024 has no attention dp; ep=8: "),
        ("gpt3-175b", "vllm", dict(tp=3), ""),
        ("llama-3-70b", "vllm", dict(tp=16), ""),
        ("qwen2.5-14b", "vllm", dict(tp=5), "tp=5: and the 8 key-value heads of qwen2.5-14b do not divide each other, which vllm requires"),
    ],
)
def test_the_reason_names_what_an_engine_does_not_run(model, engine, degrees, words):
    reason = check_layout(load_model(model), load_engine(engine), **ONE | degrees)
    assert reason.startswith(words) if words else reason == ""


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (dict(tp=3), "tp=3: must divide the 64 attention heads"),
        (dict(pp=81), "pp=81: must be at most the 80 layers"),
        (dict(ep=2), "no experts"),
    ],
)
def test_what_dims_rule_out_is_refused(degrees, words):
    with pytest.raises(InputError, match=words):
        check_layout(load_model("llama-3-70b"), load_engine("vllm"), **ONE | degrees)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_search_has_only_layouts_without_faults(engine):
    model, engine = load_model("mixtral-8x7b"), load_engine(engine)
    space = layouts(model, load_cluster("dgx-h100", num_chips=16), engine, ServingSpace())
    assert len(space.columns)
    assert space.left_out
    for row in range(len(space.columns)):
        assert not list(layout_faults(model, engine, **space.columns.layout(row).degrees))


def test_such_a_plan_is_predicted_with_a_note_and_without_a_command():
    job = dict(model="deepseek-v3", cluster="hgx-h200", chips=8, input_len=1000, output_len=100, concurrency=8)
    runs, does_not = (perfmodel.serve(engine="tensorrt-llm", tp=tp, attention_dp=8 // tp, **job) for tp in (1, 2))
    assert runs.not_runnable == ""
    assert does_not.fits
    assert does_not.not_runnable
    assert f"not a plan for this engine: {does_not.not_runnable}" in does_not.notes
