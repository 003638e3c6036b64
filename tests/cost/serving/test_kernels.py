"""Kernels of serving: limits, published figures, and what a chip without a table gets."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.link_rates import NEVER
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.serving.kernels import small_all_reduce_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.reader import calibrations_for, load_calibration, load_cluster
from perfmodel.hardware.serving_kernels import ONE_SHOT, ServingKernels, SmallAllReduceModel
from tests.cost.machines import make_machine, make_tier, shipped_machine

ALL_REDUCES = {  # TensorRT-LLM's own kernel, aiconfigurator's tables: chip, bytes, ranks, us
    ("h100", 65536, 8): 4.59, ("h100", 262144, 4): 5.48, ("h100", 2097152, 2): 9.41, ("b200", 65536, 8): 5.99,
    ("b200", 1048576, 8): 17.8, ("b200", 2097152, 4): 14.6, ("a100", 65536, 8): 9.0, ("a100", 524288, 2): 7.84,
}  # fmt: skip


@pytest.mark.parametrize(("chip", "num_bytes", "ranks"), ALL_REDUCES)
def test_small_all_reduces_take_what_was_measured(chip, num_bytes, ranks):
    machine = shipped_machine(chip)
    time = small_all_reduce_time(num_bytes, ranks, machine)
    assert time * 1e6 == pytest.approx(ALL_REDUCES[chip, num_bytes, ranks], rel=0.13)
    assert time < collective_time(CollectiveKind.ALL_REDUCE, num_bytes, group_size=ranks, inside=[ranks, ranks], machine=machine)


def test_a_large_all_reduce_is_left_to_the_library():
    machine = shipped_machine("h100")
    library = collective_time(CollectiveKind.ALL_REDUCE, 1e9, group_size=8, inside=[8, 8], machine=machine)
    assert small_all_reduce_time(1e9, 8, machine) > library


def test_an_all_reduce_in_limits():
    machine = make_machine()
    sizes, ranks = np.array([1.0, 1e5, 1e7, 1e9]), np.array([[1], [2], [4], [8], [16]])
    time = small_all_reduce_time(sizes, ranks, machine)
    assert not time[0].any()
    assert (time[4] == NEVER).all()
    assert (np.diff(time[1:4], axis=0) > 0).all()
    assert (np.diff(time[1:4], axis=1) > 0).all()
    assert time[2, 1] == small_all_reduce_time(1e5, 4, machine)


def test_few_peers_leave_links_of_a_mesh_idle():
    mesh = make_machine(make_tier(Topology.FULL_MESH, bandwidth=448e9, pair_bandwidth=64e9))
    switch = make_machine(make_tier(bandwidth=448e9))
    assert small_all_reduce_time(1e6, 2, mesh) > 3 * small_all_reduce_time(1e6, 2, switch)
    assert small_all_reduce_time(1e6, 8, mesh) == pytest.approx(small_all_reduce_time(1e6, 8, switch))


def test_ranks_that_cannot_read_each_other_have_none():
    machine = make_machine(make_tier(Topology.PCIE_TREE, bandwidth=25e9, peer_to_peer=False))
    assert small_all_reduce_time(1e4, 2, machine) == NEVER


def test_a_chip_without_tables_gets_its_neighbours():
    cluster = load_cluster("dgx-h100")
    others = [other for other in calibrations_for("h100-sxm-80gb") if other.name != "h100"]
    bare = small_all_reduce_time(65536, 8, resolve_machine(cluster, others[0] if others else SPEC_SHEET))
    assert bare == pytest.approx(small_all_reduce_time(65536, 8, shipped_machine("h100")), rel=0.6)


def test_serving_kernels_survive_a_pickle_and_are_checked():
    calibration = load_calibration("h100")
    assert pickle.loads(pickle.dumps(calibration)) == calibration
    with pytest.raises(InputError, match="small_all_reduce"):
        ServingKernels(small_all_reduce={"three_shot": SmallAllReduceModel(base_time=1e-6)})
    with pytest.raises(InputError, match="base_time"):
        SmallAllReduceModel(base_time=-1.0)
    assert replace(calibration, serving=ServingKernels()).serving.small_all_reduce.get(ONE_SHOT) is None
