import dataclasses
import math

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.hardware.fabric import Link, NetworkTier, Topology, check_tiers

LINK = Link(bandwidth=600e9, pair_bandwidth=100e9, latency=1e-6)


def tier(topology=Topology.SWITCH, size=8, **more):
    return NetworkTier(name="net", topology=topology, size=size, link=more.pop("link", LINK), **more)


TPU_V4 = tier(Topology.TORUS, 4096, torus_shape=(16, 16, 16), wrap_multiple=4)
TPU_V5E = tier(Topology.TORUS, 256, torus_shape=(16, 16), wrap_multiple=16)


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_a_switch_gives_every_group_the_whole_link(group_size):
    assert tier().group_bandwidth(group_size, num_chips=8) == 600e9


@pytest.mark.parametrize("group_size, links", [(2, 1), (4, 3), (7, 6), (8, 6)])
def test_a_full_mesh_gives_a_group_the_links_to_its_members(group_size, links):
    assert tier(Topology.FULL_MESH).group_bandwidth(group_size, num_chips=8) == links * 100e9


def test_without_peer_to_peer_half_the_bandwidth_is_left():
    assert tier(Topology.PCIE_TREE).group_bandwidth(4, num_chips=8) == 600e9
    staged = tier(Topology.PCIE_TREE, peer_to_peer=False)
    assert staged.group_bandwidth(4, num_chips=8) == 300e9
    assert staged.point_to_point_bandwidth == 50e9


def test_oversubscription_divides_the_bandwidth():
    assert tier(Topology.FAT_TREE, oversubscription=2.0).group_bandwidth(4, num_chips=8) == 300e9


@pytest.mark.parametrize(
    "torus, num_chips, shape",
    [
        (TPU_V4, 4, (1, 2, 2)),
        (TPU_V4, 8, (2, 2, 2)),
        (TPU_V4, 16, (2, 2, 4)),
        (TPU_V4, 64, (4, 4, 4)),
        (TPU_V4, 192, (4, 4, 12)),
        (TPU_V4, 512, (8, 8, 8)),
        (TPU_V4, 4096, (16, 16, 16)),
        (TPU_V5E, 8, (2, 4)),
        (TPU_V5E, 64, (8, 8)),
        (TPU_V5E, 256, (16, 16)),
    ],
)
def test_a_slice_has_the_published_shape(torus, num_chips, shape):
    assert torus.slice_shape(num_chips) == shape


def test_a_slice_that_no_box_holds_is_refused():
    with pytest.raises(InputError, match="no box of that many chips"):
        TPU_V4.slice_shape(17)


def test_a_torus_below_its_wrap_condition_takes_twice_the_time():
    whole = TPU_V5E.group_bandwidth(256, num_chips=256)
    slice_of_64 = TPU_V5E.group_bandwidth(64, num_chips=64)
    assert whole == 600e9
    assert slice_of_64 == whole / 2
    assert TPU_V4.group_bandwidth(64, num_chips=64) == 600e9
    assert TPU_V4.group_bandwidth(8, num_chips=8) == 300e9


def test_a_group_uses_only_the_dimensions_that_it_spans():
    assert TPU_V4.group_bandwidth(4, num_chips=64) == 200e9
    assert TPU_V4.group_bandwidth(2, num_chips=64) == 100e9
    assert TPU_V4.group_bandwidth(16, num_chips=64, stride=4) == 400e9
    assert TPU_V4.group_bandwidth(4, num_chips=64, stride=16) == 200e9


@pytest.mark.parametrize("torus", [TPU_V4, TPU_V5E])
@pytest.mark.parametrize("num_chips", [4, 16, 64, 256])
def test_more_of_a_torus_is_never_slower_and_never_above_the_link(torus, num_chips):
    sizes = [2**power for power in range(1, int(math.log2(num_chips)) + 1)]
    rates = [torus.group_bandwidth(size, num_chips=num_chips) for size in sizes]
    assert rates == sorted(rates)
    assert rates[-1] <= torus.link.bandwidth


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(torus_shape=(2, 4)), "goes with topology torus"),
        (dict(topology=Topology.TORUS), "goes with topology torus"),
        (dict(topology=Topology.TORUS, torus_shape=(3, 3)), "must divide size"),
        (dict(wrap_multiple=4), "on a torus"),
        (dict(oversubscription=2.0), "belongs to a fat tree"),
        (dict(topology=Topology.FAT_TREE, oversubscription=0.5), "at least 1"),
        (dict(peer_to_peer=False), "PCIe tree"),
        (dict(size=0), "at least 1"),
    ],
)
def test_a_tier_that_contradicts_itself_is_refused(change, rule):
    with pytest.raises(InputError, match=rule):
        dataclasses.replace(tier(), **change)


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(bandwidth=0.0), "positive"),
        (dict(bandwidth=math.nan), "positive"),
        (dict(latency=-1.0), "negative"),
        (dict(bandwidth=1e9), "exceed"),
    ],
)
def test_a_link_that_cannot_be_is_refused(change, rule):
    with pytest.raises(InputError, match=rule):
        dataclasses.replace(LINK, **change)


@pytest.mark.parametrize(
    "sizes, node, rule",
    [
        ((8, 12), 4, "larger multiple of 8"),
        ((8, 8), 8, "larger multiple"),
        ((), 1, "empty"),
        ((8, 64), 3, "must divide size=8"),
        ((8,), 0, "at least 1"),
    ],
)
def test_tiers_nest(sizes, node, rule):
    with pytest.raises(InputError, match=rule):
        check_tiers([tier(size=size) for size in sizes], chips_per_node=node)


def test_a_ring_of_inner_domains_counts_domains():
    inner = tier(Topology.TORUS, 16, torus_shape=(4, 4), wrap_multiple=4)
    ring = tier(Topology.TORUS, 64, torus_shape=(4,), wrap_multiple=4)
    check_tiers([inner, ring], chips_per_node=16)
    assert ring.group_bandwidth(4, num_chips=64) == 600e9
    with pytest.raises(InputError, match="must be size"):
        check_tiers([inner, dataclasses.replace(ring, torus_shape=(2,))], chips_per_node=16)
