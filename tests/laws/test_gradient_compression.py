"""Laws of gradient compression: none changes nothing, bytes follow the stated ratio, more rank never sends less."""

import random

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.compression import kept_bytes, messages
from perfmodel.cost.counts import EXECUTOR_PROFILE, executor_profile, predicted_counts
from perfmodel.parallel.compression import compression_of
from perfmodel.parallel.plan import place_of
from perfmodel.workload.job import Precision
from tests.cost.jobs import estimator_of
from tests.execute.jobs import tiny, tiny_plan

JOB = dict(model="llama-3-8b", cluster="dgx-a100", global_batch=64, seq_len=2048)
WORDS = ("fp16", "bf16", "powersgd:1", "powersgd:8")


def drawn(seed):
    """A plan's words, drawn: degrees with data ranks left."""
    random_ = random.Random(seed)
    tp, pp = random_.choice((1, 2, 4)), random_.choice((1, 2))
    return dict(
        chips=tp * pp * random_.choice((2, 4)),
        tp=tp,
        pp=pp,
        micro_batch=random_.choice((1, 2)),
        precision=random_.choice(("bf16-mixed", "fp32")),
        profile=random_.choice(("torch-fsdp2", "generic", "deepspeed", "megatron", "nanotron")),
    )


@pytest.mark.parametrize("seed", range(8))
def test_none_changes_no_number(seed):
    plain, none = (perfmodel.predict(**JOB, **drawn(seed), **word) for word in ({}, {"gradient_compression": "none"}))
    assert none == plain
    assert "gradient_compression" not in plain.parts


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("word", WORDS)
def test_parts_add_up_and_one_data_rank_compresses_nothing(word, seed):
    words = drawn(seed)
    compressed = perfmodel.predict(**JOB, **words, gradient_compression=word)
    assert sum(compressed.parts.values()) == compressed.step_time
    assert compressed.parts["gradient_compression"] > 0.0
    assert compressed.rests_on["gradient_compression"] == compressed.rests_on["optimizer"]
    alone = words | dict(chips=words["tp"] * words["pp"])
    one, plain = perfmodel.predict(**JOB, **alone, gradient_compression=word), perfmodel.predict(**JOB, **alone)
    assert (one.step_time, one.memory["gradients"]) == (plain.step_time, plain.memory["gradients"])
    assert one.parts["gradient_compression"] == 0.0


def counted(word, **knobs):
    """Number and bytes of the data-parallel all-reduces of a step, and the counted FLOPs of factors."""
    plan = tiny_plan(4, precision=Precision.BF16_MIXED, profile=f"{EXECUTOR_PROFILE}+gradient_compression={word}", **knobs)
    profile = executor_profile(plan.job.policy, plan.compression)
    counts = predicted_counts(estimator_of(plan.job, chips=4, node=4, profile=profile), plan, place_of(plan, 0))
    (of_data,) = [value for (kind, axes), value in counts.collectives.items() if kind == "all_reduce" and "dp_replicate" in axes]
    return *of_data, sum(counts.flops[shape] for shape, names in counts.operators.items() if "powersgd" in names)


@pytest.mark.parametrize("knobs", [dict(), dict(tp=2), dict(cp=2), dict(micro_batch=2)], ids=str)
def test_bytes_fall_by_the_stated_ratio(knobs):
    """Casts send half of float32; PowerSGD's messages are three a unit, of (a + c) r elements where 2 (a + c) r < a c."""
    number, plain, _ = counted("none", **knobs)
    for word in ("fp16", "bf16"):
        assert counted(word, **knobs) == (number, plain / 2.0, 0.0)
    shapes = [shape.shape for shape in tiny().parameter_shapes()]
    for rank in (1, 3) if "tp" not in knobs else ():
        sent, flops = 0.0, 0.0
        for shape in shapes:
            a, c = shape if len(shape) == 2 else (shape[0], 1)
            r = min(a, c, rank)
            is_low = 2 * (a + c) * r < a * c
            sent, flops = sent + 4.0 * ((a + c) * r if is_low else a * c), flops + (6.0 * a * c * r if is_low else 0.0)
        assert counted(f"powersgd:{rank}", **knobs) == (3 * number, sent, flops)


@pytest.mark.parametrize("seed", range(4))
def test_more_rank_sends_keeps_and_takes_more(seed):
    words = drawn(seed)
    steps = [perfmodel.predict(**JOB, **words, gradient_compression=f"powersgd:{rank}") for rank in (1, 2, 4, 8, 16)]
    for name in ("gradient_reduction", "gradient_compression"):
        times = [step.parts[name] for step in steps]
        assert times == sorted(times), name
    kept = [step.memory["gradients"] for step in steps]
    assert kept == sorted(kept)
    assert kept[0] > perfmodel.predict(**JOB, **words).memory["gradients"]  # error feedback


def test_a_matrix_of_full_rank_is_sent_as_it_is():
    """Factors as large as half the matrix save nothing: torch's rule, so full rank equals no compression."""
    rows, columns, itemsize = (np.array([[value]]) for value in (64.0, 32.0, 4.0))
    full = compression_of("powersgd:32")
    assert [float(message.sum()) for message in messages(full, rows * columns * itemsize, rows, columns, itemsize)] == [8192.0, 0.0, 0.0]
    assert float(kept_bytes(full, rows, columns, itemsize).sum()) == 8192.0


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("profile", ["torch-fsdp2", "generic"])
def test_a_search_keeps_the_compression_and_its_rows_equal_predictions(word, profile):
    result = perfmodel.find_plans(**JOB, chips=16, profile=profile, gradient_compression=word, top=4)
    for row in result.plans:
        assert int(row.plan.zero) == 0
        assert str(row.plan.compression) == word
        again = perfmodel.predict(row.plan)
        assert (again.step_time, again.memory) == (row.step_time, row.memory)
