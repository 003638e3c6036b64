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
    with pytest.raises(InputError, match="must be size"):
        check_tiers([inner, dataclasses.replace(ring, torus_shape=(2,))], chips_per_node=16)
