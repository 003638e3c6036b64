"""Memory of communicators: none on one chip, one group for each axis of the mesh, and channels by the bandwidth of the links."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel import predict
from perfmodel.cost.link_rates import channels_of
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.memory.chip import communicator_bytes, world_communicator_bytes
from perfmodel.frameworks.shipped import framework_names
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER

CALIBRATION = load_calibration("h100")
MACHINE = resolve_machine(load_cluster("dgx-h100", num_chips=64), CALIBRATION)
IN_NODE, BETWEEN = MACHINE.memory.communicator_bytes
MEGATRON_ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


def buffers(folding=None, **degrees):
    columns = {axis: [degrees.get(axis, 1)] for axis in DEFAULT_ORDER}
    grid = make_grid(columns, [MEGATRON_ORDER], tier_sizes=MACHINE.tier_sizes, num_key_value_heads=8, folding=[folding])
    return float(np.asarray(communicator_bytes(MACHINE, grid)).reshape(-1)[0])


def test_channels_follow_the_bandwidth_of_the_links():
    assert [channels_of(bandwidth * 1e9) for bandwidth in (12, 32, 50, 150, 300, 450, 900)] == [2, 3, 4, 12, 24, 24, 24]
    assert 24 * CALIBRATION.memory.channel_bytes == IN_NODE
    assert 4 * CALIBRATION.memory.channel_bytes == BETWEEN


def test_one_chip_has_no_communicator():
    assert buffers() == 0.0
    assert world_communicator_bytes(MACHINE, 1) == 0.0


def test_a_single_axis_is_the_communicator_of_all_ranks():
    for axis in ("tp", "cp", "dp_shard", "dp_replicate"):
        assert buffers(**{axis: 8}) == IN_NODE == world_communicator_bytes(MACHINE, 8)


def test_each_further_axis_adds_its_own_and_all_ranks_together_have_one():
    assert buffers(tp=8, dp_shard=8) == IN_NODE + BETWEEN + IN_NODE
    assert buffers(tp=4, dp_shard=16) == 3 * IN_NODE
    assert buffers(tp=2, dp_shard=4, dp_replicate=8) == 3 * IN_NODE + BETWEEN
    assert buffers(tp=8, pp=8) == IN_NODE + BETWEEN + IN_NODE


def test_experts_add_their_exchange_and_their_replicas():
    plain = buffers(tp=2, dp_shard=32)
    assert buffers(folding=(8, 1), tp=2, dp_shard=32) == plain + 2 * IN_NODE


def test_channels_without_buffers_take_nothing():
    memory = replace(CALIBRATION.memory, channel_bytes=0.0)
    machine = resolve_machine(load_cluster("dgx-h100", num_chips=64), replace(CALIBRATION, memory=memory))
    assert world_communicator_bytes(machine, 64) == 0.0


@pytest.mark.parametrize("profile", sorted(set(framework_names()) - {"xla", "mesh-tensorflow", "llama-3", "torch-gloo"}))
def test_one_gpu_is_charged_the_context_alone_under_every_framework(profile):
    prediction = predict(model="gpt2", cluster="rtx4090-24gb", chips=1, global_batch=8, seq_len=1024, profile=profile)
    assert prediction.memory["framework"] == 500e6


def test_generic_charges_for_communicators_what_named_frameworks_do():
    job = dict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192, tp=2, pp=2)
    charged = {profile: predict(**job, profile=profile).memory["framework"] for profile in ("generic", "megatron", "torch-fsdp2")}
    assert len(set(charged.values())) == 1
    assert 1.5e9 < charged["generic"] < 3e9
