"""Laws of the collective times, and the hand-computed time of each algorithm and topology."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.collectives import collective_time, lone_rate, send_time
from perfmodel.cost.link_rates import DEFAULT_LINK_FRACTION, NEVER
from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import (
    COLLECTIVE_CODE,
    SCALE_OUT,
    SCALE_UP,
    SPEC_SHEET,
    Calibration,
    CollectiveModel,
    KernelModels,
)
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.parallel.grid import neighbours_together
from tests.cost.machines import CALIBRATED, make_machine, make_tier, shipped_machine

AR, RS, AG, A2A, SEND = CollectiveKind
FABRIC = make_tier(Topology.FAT_TREE, size=4096, bandwidth=25e9, latency=5e-6)
MACHINES = {
    "switch": make_machine(make_tier()),
    "two tiers": make_machine(make_tier(), FABRIC),
    "three tiers": make_machine(make_tier(), make_tier(size=64, bandwidth=100e9), FABRIC),
    "mesh": make_machine(make_tier(Topology.FULL_MESH, bandwidth=448e9, pair_bandwidth=64e9), FABRIC),
    "pcie": make_machine(make_tier(Topology.PCIE_TREE, bandwidth=12e9, peer_to_peer=False), FABRIC),
    "torus": make_machine(make_tier(Topology.TORUS, size=64, torus_shape=(4, 4, 4), wrap_multiple=4)),
    **{name: shipped_machine(name) for name in CALIBRATED},
}
machines = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
kinds = pytest.mark.parametrize("kind", list(CollectiveKind))
RATE = DEFAULT_LINK_FRACTION


def inside_of(machine, group_size, per_tier=()):
    """Return the members inside a domain of each tier: `per_tier`, or the number that fits."""
    sizes = per_tier or machine.tier_sizes[:-1]
    return [np.minimum(group_size, size) for size in sizes] + [group_size]


@kinds
@machines
def test_a_group_of_one_takes_exactly_no_time(machine, kind):
    ones = np.ones((3, 5))
    time = collective_time(kind, 1e9 * ones, group_size=ones, inside=[ones] * len(machine.tier_sizes), machine=machine)
    assert (time == 0).all()


@kinds
@machines
def test_row_of_a_batch_equals_the_single_one(machine, kind):
    generator = np.random.default_rng(0)
    codes = np.arange(20)[:, None] % len(CollectiveKind)
    num_bytes = generator.integers(1, 2**32, (20, 33)).astype(float)
    group_size = 2.0 ** generator.integers(0, 6, (20, 33))
    inside = inside_of(machine, group_size)
    batch = collective_time(codes, num_bytes, group_size=group_size, inside=inside, machine=machine)
    for row in range(20):
        for plan in (0, 8, 32):
            alone = collective_time(
                list(CollectiveKind)[codes[row, 0]],
                num_bytes[row, plan],
                group_size=group_size[row, plan],
                inside=[members[row, plan] for members in inside],
                machine=machine,
            )
            assert alone == batch[row, plan]
    for plan in (0, 8, 32):
        cut = slice(plan, plan + 1)
        column = collective_time(
            codes, num_bytes[:, cut], group_size=group_size[:, cut], inside=[members[:, cut] for members in inside], machine=machine
        )
        np.testing.assert_array_equal(column, batch[:, cut])


@machines
def test_plans_may_be_a_vector_with_a_column_of_kinds(machine):
    group_size = np.array([1.0, 2.0, 8.0])
    codes = np.array([[COLLECTIVE_CODE[AG]], [COLLECTIVE_CODE[AR]]])
    inside = inside_of(machine, group_size)
    time = collective_time(codes, np.array([[1e6], [1e8]]), group_size=group_size, inside=inside, machine=machine)
    full = np.broadcast_to(group_size, (2, 3))
    expected = collective_time(codes, np.array([[1e6], [1e8]]), group_size=full, inside=inside_of(machine, full), machine=machine)
    np.testing.assert_array_equal(time, expected)


@kinds
@machines
def test_more_bytes_are_never_quicker(machine, kind):
    num_bytes = np.geomspace(1, 1e11, 300)
    for group_size in (2.0, 4.0, 8.0, 64.0):
        time = collective_time(kind, num_bytes, group_size=group_size, inside=inside_of(machine, group_size), machine=machine)
        assert (np.diff(time) >= 0).all()


@kinds
@settings(max_examples=60, deadline=None)
@given(
    num_bytes=st.floats(1, 1e11),
    group=st.sampled_from([(1, 2), (2, 2), (1, 64), (4, 8), (8, 8), (8, 64), (2, 512)]),
    faster=st.floats(1, 10),
    tier=st.integers(0, 1),
)
@pytest.mark.slow
def test_a_faster_link_is_never_slower(kind, num_bytes, group, faster, tier):
    tiers = [make_tier(), FABRIC]
    slow = make_machine(*tiers)
    link = tiers[tier].link
    tiers[tier] = replace(
        tiers[tier],
        link=replace(link, bandwidth=link.bandwidth * faster, pair_bandwidth=link.bandwidth * faster, latency=link.latency / faster),
    )
    fast = make_machine(*tiers)
    operands = {"group_size": float(group[1]), "inside": [float(count) for count in group]}
    assert collective_time(kind, num_bytes, **operands, machine=fast) <= collective_time(kind, num_bytes, **operands, machine=slow)


@pytest.mark.parametrize("group", [(2, 2), (8, 8), (8, 64), (1, 16), (4, 4096)])
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
def test_all_reduce_is_reduce_scatter_then_all_gather(group, num_bytes):
    machine = make_machine(make_tier(latency=0.0), FABRIC)  # no latency inside: no one-shot
    machine.links.table[9] = NEVER
    operands = {"group_size": float(group[1]), "inside": [float(count) for count in group], "machine": machine}
    parts = collective_time(RS, num_bytes, **operands) + collective_time(AG, num_bytes, **operands)
    assert collective_time(AR, num_bytes, **operands) == pytest.approx(parts, rel=1e-12)


def one_tier(kind, num_bytes, group_size, machine):
    return collective_time(kind, num_bytes, group_size=group_size, inside=[group_size], machine=machine)


def test_large_ring_on_a_switch():
    assert one_tier(AG, 1e10, 8.0, MACHINES["switch"]) == pytest.approx(3 * 2e-6 + 1e10 * 7 / 8 / (RATE * 300e9), rel=1e-12)


def test_small_all_reduce_is_one_shot():
    assert one_tier(AR, 1e3, 8.0, MACHINES["switch"]) == pytest.approx(2e-6 + 7 * 1e3 / (RATE * 300e9), rel=1e-12)


def test_middle_all_reduce_takes_the_tree():
    assert one_tier(AR, 3e6, 8.0, MACHINES["switch"]) == pytest.approx(2 * 3 * 2e-6 + 2 * 3e6 * 7 / 8 / (RATE * 300e9), rel=1e-12)


def test_a_send_is_one_hop_with_the_whole_message():
    assert one_tier(SEND, 1e8, 2.0, MACHINES["switch"]) == pytest.approx(2e-6 + 1e8 / (RATE * 300e9), rel=1e-12)


def test_a_send_between_nodes_uses_the_nic():
    time = collective_time(SEND, 1e8, group_size=2.0, inside=[1.0, 2.0], machine=MACHINES["two tiers"])
    assert time == pytest.approx(5e-6 + 1e8 / (RATE * 25e9), rel=1e-12)


def test_a_hierarchical_all_gather_moves_its_part_between_nodes():
    """8 nodes of 8: each chip sends (1/8 - 1/64) V to other nodes and 7/8 V inside; the NICs set the pace."""
    time = collective_time(AG, 1e10, group_size=64.0, inside=[8.0, 64.0], machine=MACHINES["two tiers"])
    assert time == pytest.approx(3 * 2e-6 + 3 * 5e-6 + 1e10 * (1 / 8 - 1 / 64) / (RATE * 25e9), rel=1e-12)


def test_one_rank_a_node_has_its_nic_alone():
    time = collective_time(AG, 1e10, group_size=8.0, inside=[1.0, 8.0], machine=MACHINES["two tiers"])
    assert time == pytest.approx(3 * 5e-6 + 1e10 * 7 / 8 / (RATE * 25e9), rel=1e-12)


def test_an_all_to_all_sends_most_of_its_buffer_out_of_the_node():
    time = collective_time(A2A, 1e10, group_size=64.0, inside=[8.0, 64.0], machine=MACHINES["two tiers"])
    assert time == pytest.approx(56 * 2e-6 + 7 * 5e-6 + 1e10 * 56 / 64 / (RATE * 25e9), rel=1e-12)


@pytest.mark.parametrize(("group_size", "bandwidth"), [(2, 64e9), (4, 192e9), (8, 448e9)])
def test_on_a_full_mesh_bandwidth_grows_with_the_peers(group_size, bandwidth):
    n = float(group_size)
    time = collective_time(AG, 1e10, group_size=n, inside=[n, n], machine=MACHINES["mesh"])
    assert 1e10 * (n - 1) / n / time == pytest.approx(RATE * bandwidth, rel=0.01)


@pytest.mark.parametrize(
    ("group_size", "share"),
    [(2, 1 / 6), (4, 1 / 3), (16, 2 / 3), (64, 1.0)],  # two ports of three dims; a pair has one link, a ring of four closes
)
def test_on_a_torus_bandwidth_grows_with_the_dims(group_size, share):
    n = float(group_size)
    assert 1e10 * (n - 1) / n / one_tier(AG, 1e10, n, MACHINES["torus"]) == pytest.approx(RATE * 300e9 * share, rel=0.01)


def test_a_torus_that_does_not_wrap_takes_twice_as_long():
    open_torus = make_machine(make_tier(Topology.TORUS, size=64, torus_shape=(8, 8), wrap_multiple=16))
    closed = make_machine(make_tier(Topology.TORUS, size=64, torus_shape=(8, 8), wrap_multiple=4))
    assert one_tier(AG, 1e10, 64.0, open_torus) == pytest.approx(2 * one_tier(AG, 1e10, 64.0, closed), rel=0.01)


def test_an_all_to_all_on_a_torus_grows_with_its_longest_dim():
    """16 x 16, wrapped: 16/8 of a chip's bytes on each of its links, over four of them."""
    machine = make_machine(make_tier(Topology.TORUS, size=256, torus_shape=(16, 16), wrap_multiple=16, bandwidth=200e9))
    assert one_tier(A2A, 1e9, 256.0, machine) == pytest.approx(255 * 2e-6 + 1e9 * 16 / 8 / (RATE * 50e9), rel=0.01)


def test_without_peer_to_peer_half_the_bandwidth_is_left():
    time = collective_time(AG, 1e9, group_size=4.0, inside=[4.0, 4.0], machine=MACHINES["pcie"])
    assert 1e9 * 3 / 4 / time == pytest.approx(RATE * 6e9, rel=0.01)


def test_oversubscription_divides_the_bandwidth_between_nodes():
    crowded = make_machine(make_tier(), replace(FABRIC, oversubscription=4.0))
    operands = {"group_size": 512.0, "inside": [8.0, 512.0]}
    full = collective_time(AG, 1e11, **operands, machine=MACHINES["two tiers"])
    assert collective_time(AG, 1e11, **operands, machine=crowded) == pytest.approx(4 * full, rel=0.01)


GLOO = Calibration(
    name="gloo",
    chips=("test-chip",),
    software="gloo",
    source="",
    date="",
    kernels=KernelModels(
        collectives={
            SCALE_UP: {
                AR: CollectiveModel(base_time=214e-6, bandwidth_fraction=1.0),
                RS: CollectiveModel(base_time=408e-6, bandwidth_fraction=0.285),
            }
        },
    ),
    peaks={f"{SCALE_UP}_bandwidth": 1.56e9},
)


def test_a_measured_reduce_scatter_may_cost_more_than_an_all_reduce():
    """gloo makes it of an all-reduce and a copy: its own figures are used, no ring formula."""
    machine = make_machine(make_tier(), calibration=GLOO)
    assert one_tier(RS, 1e6, 2.0, machine) == pytest.approx(408e-6 + 0.5e6 / (0.285 * 1.56e9), rel=1e-12)
    assert one_tier(RS, 1e6, 2.0, machine) > one_tier(AR, 1e6, 2.0, machine)


def test_a_collective_that_was_not_measured_borrows_the_nearest():
    machine = make_machine(make_tier(), calibration=GLOO)
    assert one_tier(AG, 1e6, 2.0, machine) == one_tier(RS, 1e6, 2.0, machine)


def test_figures_of_a_switch_are_not_used_on_a_relatives_mesh():
    borrowed = replace(GLOO, chips=("other",), relatives=("test-chip",), peaks={})
    assert make_machine(make_tier(), calibration=borrowed).basis.parts[SCALE_UP] == "prior: gloo"
    partial = replace(GLOO, borrowed=(SCALE_UP,))
    assert make_machine(make_tier(), calibration=partial).basis.parts[SCALE_UP] == "partial calibration: gloo"
    mesh = make_tier(Topology.FULL_MESH, bandwidth=448e9, pair_bandwidth=64e9)
    assert make_machine(mesh, calibration=borrowed).basis.parts[SCALE_UP] == "spec sheet"


def test_a_ring_between_nodes_pays_for_its_hops_inside():
    models = {AG: CollectiveModel(hop_time=10e-6, inner_hop_time=2e-6, bandwidth_fraction=1.0)}
    inside = {AG: CollectiveModel(hop_time=1e-6, bandwidth_fraction=1.0)}
    kernels = KernelModels(collectives={SCALE_UP: inside, SCALE_OUT: models})
    machine = make_machine(make_tier(), FABRIC, calibration=replace(GLOO, kernels=kernels, peaks={}))
    across = collective_time(AG, 1.0, group_size=64.0, inside=[8.0, 64.0], machine=machine)
    assert across == pytest.approx(56 * 3e-6 + 7 * 10e-6, rel=1e-5)
    assert collective_time(AG, 1.0, group_size=8.0, inside=[8.0, 8.0], machine=machine) == pytest.approx(7e-6, rel=1e-5)


@pytest.mark.parametrize("chips, measured", [(8, 312.9e9), (2, 47.7e9)])
def test_the_mesh_of_mi300x_reaches_what_was_measured_on_it(chips, measured):
    """Bus bandwidth of a large all-reduce, all to all and one to one (Bekman, Machine Learning Engineering, network tables)."""
    chip = load_cluster("mi300x", num_chips=8)
    machine = resolve_machine(chip, load_calibration("mi300x"), dtype=Dtype.BF16)
    time = float(collective_time(AR, 8e9, group_size=chips, inside=[chips, chips], machine=machine))
    assert 2 * (chips - 1) / chips * 8e9 / time == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize("kind", [AR, AG, A2A, SEND])
def test_a_stated_latency_is_added_to_measured_collectives(kind):
    """A latency above the one of the chip's usual links is added to each measured hop; a lower one is subtracted."""
    cluster, calibration = load_cluster("dgx-h100", num_chips=64), load_calibration("h100")

    def time(*latencies):
        tiers = tuple(
            replace(tier, link=replace(tier.link, latency=latency)) for tier, latency in zip(cluster.tiers, latencies, strict=True)
        )
        machine = resolve_machine(replace(cluster, tiers=tiers), calibration, dtype=Dtype.BF16)
        return float(collective_time(kind, 1e3, group_size=16, inside=[2, 16], machine=machine))

    usual = [tier.link.latency for tier in cluster.tiers]
    assert time(*usual) < time(*(10 * latency for latency in usual)) < time(1.0, 1.0)
    assert time(*(latency / 100 for latency in usual)) < time(*usual)
    assert time(1.0, 1.0) > 1.0


@machines
@pytest.mark.parametrize("ranks", [1, 2, 4, 16, 24])
@pytest.mark.parametrize("stride", [1, 2, 8, 64])
def test_a_send_of_a_pipeline_is_the_mean_over_its_boundaries(machine, ranks, stride):
    sizes = machine.tier_sizes
    hop = [1.0 + neighbours_together(np.array([float(stride)]), np.array([float(ranks)]), size) for size in sizes]

    def between(rank):
        tiers = [np.array([2.0 if rank * stride // size == (rank + 1) * stride // size else 1.0]) for size in sizes[:-1]]
        return float(collective_time(SEND, 1e7, group_size=np.array([2.0]), inside=[*tiers, np.array([2.0])], machine=machine)[0])

    wanted = np.mean([between(rank) for rank in range(ranks - 1)]) if ranks > 1 else 0.0
    assert float(send_time(1e7, np.array([float(ranks)]), hop, machine)[0]) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("ranks", "stride", "share"), [(16, 1, 4.0), (8, 2, 2.0), (4, 4, 1.0), (2, 8, 1.0), (4, 1, 1.0)])
def test_a_pipeline_rank_has_the_shared_nic_of_its_node_to_itself(ranks, stride, share):
    """One of k pipeline ranks in a node sends to the next node: it has the NIC of all k. Collectives of all ranks share it."""
    texts = ("t4-16gb per-node=4 scale-out=12.5 Gbit/s", "t4-16gb per-node=4 scale-out=12.5 Gbit/s nics=1")
    unshared, shared = (resolve_machine(load_cluster(text, num_chips=16), SPEC_SHEET, dtype=Dtype.FP16) for text in texts)
    number = np.array([float(ranks)])
    hop = [1.0 + neighbours_together(np.array([float(stride)]), number, size) for size in unshared.tier_sizes]
    assert lone_rate(number, hop, shared) == share
    assert lone_rate(number, hop, unshared) == 1.0
    node, network = (
        float(collective_time(SEND, size, group_size=np.array([2.0]), inside=[np.array([count]), np.array([2.0])], machine=unshared)[0])
        for count, size in ((2.0, 1e8), (1.0, 1e8 / share))
    )
    wanted = (hop[0] - 1.0) * node + (2.0 - hop[0]) * network
    assert float(send_time(1e8, number, hop, shared)[0]) == pytest.approx(float(wanted[0]), rel=1e-12)
    everyone = {"group_size": 16, "inside": [4, 16]}
    assert collective_time(AR, 1e8, **everyone, machine=shared) == collective_time(AR, 1e8, **everyone, machine=unshared)


def test_two_chips_that_share_two_nics_have_their_own():
    texts = (f"t4-16gb per-node=4 scale-out=12.5 Gbit/s nics={nics}" for nics in (1, 2, 4, 8))
    rates = [resolve_machine(load_cluster(text, num_chips=16), SPEC_SHEET, dtype=Dtype.FP16).links.lone for text in texts]
    assert rates == [4.0, 2.0, 1.0, 1.0]


def test_flat_rings_send_no_less_between_nodes_than_hierarchical_algorithms():
    """A ring sends 2 V (n - 1) / n over a node's NIC, a hierarchical all-reduce 2 V (1 - 1 / nodes)."""
    machine = resolve_machine(load_cluster("t4-16gb per-node=4 scale-out=12.5 Gbit/s", num_chips=8), SPEC_SHEET, dtype=Dtype.FP16)
    ring = replace(machine, links=machine.links.flat())
    hierarchical, flat = (float(collective_time(AR, 1e10, group_size=8, inside=[4, 8], machine=of)) for of in (machine, ring))
    assert flat / hierarchical == pytest.approx((7 / 8) / (1 / 2), rel=1e-3)
    assert collective_time(AR, 1e8, group_size=4, inside=[4, 4], machine=ring) == collective_time(
        AR, 1e8, group_size=4, inside=[4, 4], machine=machine
    )
