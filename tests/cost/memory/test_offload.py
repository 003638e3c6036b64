"""Tensors in the host's memory, and the time of their transfers."""

import pytest

import perfmodel
from perfmodel.parallel.prediction import Prediction

LONG = {"model": "qwen3-8b", "cluster": "dgx-h100", "chips": 8, "global_batch": 1, "seq_len": "1M", "cp": 8, "zero": 3, "recompute": "full"}
GIB = 2.0**30


def long(**settings: object) -> Prediction:
    return perfmodel.predict(**LONG, profile="torch-fsdp2", settings={"attention_kernel": "cudnn", **settings})


def test_a_million_tokens_fit_with_layer_inputs_in_the_hosts_memory():
    """TRL pull request 6846: Qwen3-8B at 1M tokens on 8 H100 takes 56.2 GB with offloaded checkpoints and runs out of memory without."""
    kept, carried = long(loss="chunked"), long(loss="chunked", checkpoint_offload=True)
    assert not kept.fits
    assert carried.fits
    inputs = 36 * (2**20 / 8) * 4096 * 2
    assert kept.memory["total"] - carried.memory["total"] == pytest.approx(inputs, rel=0.15)
    assert carried.memory["total"] == pytest.approx(56.2e9, rel=0.12)


def test_transfers_overlapped_by_long_passes_cost_nothing():
    assert long(loss="chunked", checkpoint_offload=True).step_time == pytest.approx(long(loss="chunked").step_time, rel=1e-6)


def test_a_layer_takes_no_less_than_its_transfer():
    """One layer's input of 8k tokens, 64 MiB at 25 GB/s, takes longer than a small layer's pass on A100."""
    job = {"model": "gpt2", "cluster": "dgx-a100", "chips": 8, "global_batch": 64, "seq_len": 1024, "micro_batch": 8, "recompute": "full"}
    carried = perfmodel.predict(**job, profile="torch-fsdp2", settings={"activation_offload": True, "compile": True})
    assert carried.step_time > 12 * 2 * (8 * 1024 * 768 * 2) / 25e9


def test_an_optimizer_on_the_host_holds_no_state_on_the_chip_and_takes_longer():
    """DeepSpeed issue 6834: tens of seconds where the host has many parameters a chip."""
    on_chip, there = long(loss="chunked"), long(loss="chunked", optimizer_offload=True)
    assert there.memory["optimizer"] == 0.0 < on_chip.memory["optimizer"]
    assert there.parts["optimizer"] > 3.0 > on_chip.parts["optimizer"]
    without = long(loss="chunked", optimizer_offload=True, parameter_offload=True)
    assert without.memory["weights"] == 0.0


def test_the_host_holds_what_the_chips_do_not():
    """36 layer inputs of 131,072 tokens, and 12 byte of state for each of the 1/8 of the parameters that are a chip's."""
    inputs, states = 36 * 131072 * 4096 * 2, 8.19e9 / 8 * 12
    assert long(loss="chunked").conditions.host_memory == 0.0
    assert long(loss="chunked", checkpoint_offload=True).conditions.host_memory == pytest.approx(inputs, rel=0.01)
    both = long(loss="chunked", checkpoint_offload=True, optimizer_offload=True)
    assert both.conditions.host_memory == pytest.approx(inputs + states, rel=0.1)
    assert "in the host's memory" in " ".join(both.warnings)


def test_gradients_on_the_host_free_nothing_in_a_pipeline_that_keeps_weights_gathered():
    job = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 16, "global_batch": 64, "seq_len": 2048}
    plan = {"pp": 2, "dp_shard": 8, "zero": 3, "profile": "torch-fsdp2", "settings": {"optimizer_offload": True}}
    assert perfmodel.predict(**job, **plan).memory["gradients"] == 0.0
