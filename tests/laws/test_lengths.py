"""One program serves sequences of any length: a list of lengths is the predictions of each, and those of graphs written for each."""

import random
from collections.abc import Mapping

import pytest

import perfmodel
from perfmodel.cost import programs
from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import graph_length
from tests.marks import covering, mostly_nightly

#: Dense, sliding windows, windows of a share of the layers, chunks, experts, latents, sparse latents, states.
MODELS = (
    "llama-3-8b", "gpt2", "mistral-7b", "gemma-2-9b", "gpt-oss-20b", "llama-4-scout", "mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b",
    "deepseek-v2-lite", "deepseek-v3.2", "nemotron-h-8b", "qwen3-next-80b-a3b",
)  # fmt: skip
FRAMEWORKS = ("generic", "megatron", "torchtitan", "torch-fsdp2", "deepspeed", "hf-trainer", "unsloth", "xla", "torch-fsdp2+loss=chunked")
PLANS: tuple[Mapping[str, object], ...] = (
    {"tp": 2, "zero": 1},
    {"zero": 3, "recompute": "full"},
    {"tp": 2, "cp": 2, "zero": 1},
    {"cp": 4, "zero": 3, "recompute": "full"},
    {"pp": 2, "tp": 2, "recompute": "selective", "attention": "unfused"},
    {"tp": 4, "sequence_parallel": False, "attention": "unfused"},
    {"pp": 2, "micro_batch": 2, "recompute": "full"},
    {"zero": 2, "micro_batch": 3},
)
#: Whole chunks and tiles, halves of them, prime numbers, below and above windows.
LENGTHS = (61, 512, 1000, 1536, 2048, 4096, 6144, 8192, 10240, 16384, 32768, 131072)
SEEDS = range(60)


def drawn_call(seed):
    rng = random.Random(seed)
    call = {"model": rng.choice(MODELS), "profile": rng.choice(FRAMEWORKS), "cluster": "dgx-h100", "chips": 16, "global_batch": 96}
    call |= rng.choice(PLANS)
    if load_model(call["model"]).parts.experts is not None and rng.random() < 0.5:
        call |= {"ep": 2} | rng.choice(({}, {"dispatcher": "allgather"}, {"routing": "skew:1.37"}))
    if rng.random() < 0.2:
        call["precision"] = rng.choice(("fp8-delayed", "mxfp8"))
        call["cluster"] = "dgx-b200"
    if rng.random() < 0.2:
        call["train"] = rng.choice(("lora:16", "qlora:8"))
    return call, sorted(rng.sample(LENGTHS, 4))


def forget():
    perfmodel.Session.current().clear()


def alone(call, seq_len):
    try:
        return perfmodel.predict(**call, seq_len=seq_len)
    except InputError:
        return None


def assert_same(one, other, call):
    assert one.plan == other.plan
    time, total = other.step_time, other.memory["total"]
    assert one.step_time == pytest.approx(time, rel=1e-9), call
    assert one.memory["total"] == pytest.approx(total, rel=1e-9), call
    assert dict(one.parts) == pytest.approx(dict(other.parts), rel=1e-9, abs=1e-9 * time), call
    assert (one.mfu_palm, one.mfu_causal, one.hfu) == pytest.approx((other.mfu_palm, other.mfu_causal, other.hfu), rel=1e-9), call
    assert (one.memory_low, one.memory_high, one.fits_probability) == pytest.approx(
        (other.memory_low, other.memory_high, other.fits_probability), rel=1e-9, abs=1e-12
    ), call
    assert (one.verdict, one.warnings) == (other.verdict, other.warnings), call
    assert one.conditions.host_memory == pytest.approx(other.conditions.host_memory, rel=1e-9), call


#: Draws that show each model, framework and knob.
KEPT = covering({seed: drawn_call(seed)[0] for seed in SEEDS}, together=1)


@pytest.mark.parametrize("seed", mostly_nightly(SEEDS, KEPT))
def test_a_list_of_lengths_is_the_prediction_of_each(seed):
    call, lengths = drawn_call(seed)
    forget()
    singles = [prediction for length in lengths if (prediction := alone(call, length)) is not None]
    if not singles:
        pytest.skip("no plan of this draw can be")
    forget()
    listed = perfmodel.predict(**call, seq_len=lengths)
    assert len(listed) == len(singles)
    for one, other in zip(listed, singles, strict=True):
        assert_same(one, other, call)


JOB = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 16, "global_batch": 64}


@pytest.mark.parametrize(
    "call",
    [
        JOB | {"zero": 3, "profile": "torch-fsdp2", "offload": "activations"},
        JOB | {"zero": 3, "profile": "deepspeed", "offload": "optimizer"},
        JOB | {"cluster": "8@dgx-h100+8@dgx-a100", "tp": 2, "pp": 2},
        JOB | {"zero": 3, "risk": 0.01},
        {"model": "qwen3-235b-a22b", "cluster": "gb300-nvl72", "chips": 64, "profile": "nemo@26.02.01", "ep": 64, "global_batch": 1024},
    ],
    ids=lambda call: " ".join(str(value) for value in call.values()),
)
def test_lists_with_memory_of_the_host_pools_of_chips_a_risk_and_a_release(call):
    lengths = [2048, 3000, 4096, 16384]
    listed = perfmodel.predict(**call, seq_len=lengths)
    for one, length in zip(listed, lengths, strict=True):
        assert_same(one, perfmodel.predict(**call, seq_len=length), call)


def test_points_of_an_exploration_are_predictions():
    """Lengths combined with another axis, and with the shares of the bottlenecks."""
    vary = ["job.seq_len=2k,4k,8k", "plan.micro_batch=1,2"]
    exploration = perfmodel.explore(**JOB, seq_len=8192, zero=3, vary=vary, shares=True)
    assert len(exploration.points) == 6
    for point in exploration.points:
        length, micro_batch = point.values["job.seq_len"], point.values["plan.micro_batch"]
        alone = perfmodel.predict(**JOB, zero=3, seq_len=length, micro_batch=micro_batch)
        assert point.time == pytest.approx(alone.step_time, rel=1e-9)
        assert sum(point.shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", mostly_nightly(SEEDS, KEPT))
@pytest.mark.slow
def test_a_graph_of_one_token_is_that_of_each_length(seed, monkeypatch):
    call, lengths = drawn_call(seed)
    forget()
    predictions = {length: alone(call, length) for length in lengths}
    monkeypatch.setattr(programs, "graph_length", lambda model, seq_len: seq_len)
    forget()
    for length, one in predictions.items():
        other = alone(call, length)
        assert (one is None) == (other is None)
        if one is not None:
            assert_same(one, other, call | {"seq_len": length})
    forget()


def test_few_lengths_need_a_graph_of_their_own():
    """Lengths that are no multiple of a recurrence's chunk, or that a sparse indexer chooses completely."""
    assert graph_length(load_model("llama-4-scout"), 1021) == 0
    assert graph_length(load_model("nemotron-h-8b"), 4096) == 0
    assert graph_length(load_model("nemotron-h-8b"), 1021) == 1021
    assert graph_length(load_model("deepseek-v3.2"), 1024) == 1024
    assert graph_length(load_model("deepseek-v3.2"), 131072) == 0
