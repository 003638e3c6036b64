"""Clusters of several kinds of chips, by their text."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.hardware.chip_cluster import short_name
from perfmodel.hardware.mixed import chips_of, is_mixed, joined_pools, read_pools
from perfmodel.hardware.reader import load_cluster


def test_pools_are_read_in_their_order():
    pools = read_pools("12 @ v100-sxm2-16gb per-node=4 scale-out=10 Gbit/s + 4@t4-16gb*80%")
    assert [(pool.chips, pool.name, pool.speed) for pool in pools] == [
        (12, "v100-sxm2-16gb per-node=4 scale-out=10 Gbit/s", 1.0),
        (4, "t4-16gb", 0.8),
    ]


@pytest.mark.parametrize("text", ["dgx-h100", "h20-96gb per-node=8", "./my@cluster.yaml", "localhost"])
def test_other_clusters_are_no_pools(text):
    assert not is_mixed(text)


def test_a_slow_pool_computes_and_reads_memory_slower_and_sends_alike():
    slow, fast = load_cluster("8@dgx-h100*50%+8@dgx-h100").pools
    assert slow.chip.peak_flop_rate == {dtype: rate * 0.5 for dtype, rate in fast.chip.peak_flop_rate.items()}
    assert slow.chip.memory.bandwidth == 0.5 * fast.chip.memory.bandwidth
    assert (slow.tiers, slow.chip.memory.capacity) == (fast.tiers, fast.chip.memory.capacity)


def test_pools_are_joined_by_the_slowest_of_their_outermost_links():
    cluster = load_cluster("8@dgx-h100+4@t4")
    one, other = joined_pools(cluster.pools)
    least = min(pool.tiers[-1].link.bandwidth for pool in cluster.pools)
    assert one.tiers[-1].link.bandwidth == other.tiers[-1].link.bandwidth == least
    assert one.tiers[:-1] == cluster.pools[0].tiers[:-1]
    assert chips_of(cluster.name) == cluster.num_chips == 12


def test_cards_of_one_workstation_are_joined_by_pcie():
    cluster = load_cluster("1@rtx3090+1@rtx4090")
    assert all(len(pool.tiers) == 1 for pool in joined_pools(cluster.pools))


def test_a_pool_may_leave_a_part_of_its_last_node_to_others():
    assert [pool.num_chips for pool in load_cluster("12@h20+8@h200").pools] == [12, 8]


def test_names_in_tables_are_short():
    assert short_name("8@/data/clusters/mine.yaml*0.5+4@t4 scale-out=10 Gbit/s") == "8@mine.yaml*0.5+4@t4 scale-out=10 Gbit/s"


def test_the_number_of_chips_is_that_of_the_pools():
    with pytest.raises(InputError, match=r"chips=16: 8@dgx-h100\+4@t4 has 12; leave it out"):
        load_cluster("8@dgx-h100+4@t4", num_chips=16)
