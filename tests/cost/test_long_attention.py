"""Fused attention over many keys: its own clock, by generation of its kernel."""

from dataclasses import replace

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.compute import SHARED_BLOCK, AttentionBehaviour, attention_share, attention_time
from perfmodel.cost.estimate import with_rates_of
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.reader import calibrations_for, load_calibration, load_cluster
from perfmodel.workload.causal import CausalWindow

LONG = {"cluster": "dgx-h100", "chips": 8, "global_batch": 1, "seq_len": "1M", "cp": 8, "zero": 3, "recompute": "full"}


def machine_with(kernel: str, *, cluster: str = "dgx-h100", calibration: str = "h100") -> Machine:
    machine = resolve_machine(load_cluster(cluster, num_chips=8), load_calibration(calibration))
    return with_rates_of(load_profile(f"generic+attention_kernel={kernel}"), machine)


def rates(machine: Machine, tokens: float) -> tuple[float, float]:
    """[TFLOP/s] forward and backward of 32 heads of 128, causal."""
    shape = {"batch": 1, "heads": 32, "kv_heads": 8, "query_length": tokens, "key_length": tokens, "head_dim": 128}
    kwargs = {**shape, "causal_fraction": 0.5, "itemsize": 2, "machine": machine}
    flops = 4 * 32 * tokens**2 * 128 / 2
    return flops / float(attention_time(**kwargs)) / 1e12, 2.5 * flops / float(attention_time(**kwargs, is_backward=True)) / 1e12


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [("flash2", 370, 322), ("cudnn", 595, 516), ("flash3", 648, 561)],
)
def test_long_sequences_reach_what_benchmarks_of_them_do(kernel, forward, backward):
    """Shah et al. 2024 (FlashAttention-3), H100, heads of 128, at .95 of the burst's clock."""
    reached = rates(machine_with(kernel), 4194304)
    assert reached == pytest.approx((0.95 * forward, 0.95 * backward), rel=0.02)


def test_a100_runs_flash_attention_2_over_many_keys_as_fast_as_burst_engine_measured():
    """BurstEngine's kernel files: 4M tokens over 32 A800 in blocks of 131k, 200 TFLOP/s forward and 191 backward."""
    reached = rates(machine_with("flash2", cluster="dgx-a100", calibration="a100"), 4194304 / 32**0.5)
    assert reached == pytest.approx((200, 191), rel=0.1)


@pytest.mark.parametrize("kernel", ["flash1", "flash2", "flash3", "cudnn"])
def test_short_sequences_are_what_they_were(kernel):
    machine = machine_with(kernel)
    short = replace(machine, attention={name: replace(figures, long=None) for name, figures in machine.attention.items()})
    assert rates(machine, 8192) == pytest.approx(rates(short, 8192), rel=0.01)


@pytest.mark.parametrize("kernel", ["flash1", "flash2", "flash3", "cudnn"])
def test_more_tokens_never_take_less_time(kernel):
    machine = machine_with(kernel)
    tokens = np.geomspace(1024, 4e6, 200)
    kwargs = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "causal_fraction": 0.5, "itemsize": 2, "machine": machine}
    for is_backward in (False, True):
        assert np.all(np.diff(attention_time(query_length=tokens, key_length=tokens, is_backward=is_backward, **kwargs)) > 0)


@pytest.mark.parametrize(
    ("model", "measured"),
    [("qwen3-0.6b", 137), ("qwen3-8b", 372), ("qwen3-30b-a3b", 483), ("qwen3-32b", 1295)],
)
def test_a_million_tokens_on_torch_take_what_trl_measured(model, measured):
    """TRL pull requests 6845 and 6846 (8 H100, cp 8, full recomputation, cuDNN); 8B: 364 and 380 s."""
    settings = {"attention_kernel": "cudnn", "loss": "chunked"}
    prediction = perfmodel.predict(model=model, **LONG, profile="torch-fsdp2", settings=settings)
    assert prediction.step_time == pytest.approx(measured, rel=0.08)


def test_a_stated_kernel_is_not_slowed_by_what_a_frameworks_older_release_reached():
    stated = load_profile("torch-fsdp2+attention_kernel=flash2")
    assert load_profile("torch-fsdp2").kernels.context_attention_rate_fraction < 1.0
    assert stated.kernels.context_attention_rate_fraction == 1.0


def test_long_blocks_overlap_what_ranks_that_share_queries_do_in_addition():
    behaviours = AttentionBehaviour(mask=CausalWindow(), is_head_tail=True, shared_rate_fraction=0.5)
    ranks = np.array([8.0])
    shares = [float(attention_share(behaviours, ranks, times * SHARED_BLOCK * ranks)[0]) for times in (0.5, 1.0, 4.0)]
    assert shares == pytest.approx([1.0, 1.0, 0.5 * 1.25])


def test_ranks_that_share_a_sequence_have_the_rate_of_one_that_has_it_alone():
    job = {
        "model": "llama-3.1-8b",
        "cluster": "dgx-h100",
        "chips": 8,
        "global_batch": 16,
        "seq_len": 131072,
        "profile": "megatron",
        "zero": 1,
    }
    shared, alone = perfmodel.predict(**job, cp=8), perfmodel.predict(**job)
    assert shared.parts["backward"] == pytest.approx(alone.parts["backward"], rel=0.05)


def test_rates_over_many_keys_are_of_their_silicon():
    """An H20 has 148 TFLOP/s: shares of an H100's peak would leave its softmax no time. An H800 has an H100's compute."""
    (h20, *_), (h800, *_) = calibrations_for("h20-96gb"), calibrations_for("h800-sxm-80gb")
    assert not h20.sustained.long_attention
    assert h800.sustained.long_attention == load_calibration("h100").sustained.long_attention
