"""Clusters of several kinds of chips, by their text."""

from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import dump_yaml
from perfmodel.hardware.cluster_text import chips_of, is_mixed, joined_pools, read_pools, short_name
from perfmodel.hardware.reader import load_cluster
from perfmodel.hardware.writer import save_cluster


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


NODE = {
    "chips": 12,
    "name": "p3.8xlarge",
    "chip": "v100-sxm2-16gb",
    "chips_per_node": 4,
    "tiers": [
        {
            "name": "nvlink", "topology": "full_mesh", "size": 4, "bandwidth": "150 GB/s", "pair_bandwidth": "25 GB/s",
            "latency": "600 ns", "provenance": "recalled", "source": "NVLink 2",
        },
        {
            "name": "ethernet", "topology": "fat_tree", "size": 1024, "bandwidth": "2.5 Gbit/s", "nics_per_node": 1,
            "latency": "15 us", "provenance": "read", "source": "10 Gbit/s a node",
        },
    ],
}  # fmt: skip
NAMED = {"chips": 4, "cluster": "t4-16gb per-node=4 scale-out=12.5 Gbit/s nics=1", "speed": "57%"}


def file_of(folder, *pools, **more):
    path = folder / "mine.yaml"
    path.write_text(dump_yaml({"name": "ours", "pools": list(pools), **more}), encoding="utf-8")
    return path


def test_a_file_states_pools_of_node_types_and_of_clusters(tmp_path):
    cluster = load_cluster(file_of(tmp_path, NODE, NAMED, notes="a note"))
    node, named = cluster.pools
    assert (cluster.name, cluster.num_chips, cluster.notes) == ("ours", 16, "a note")
    assert (node.name, node.chip.name, node.num_chips, node.chips_per_node) == ("p3.8xlarge", "v100-sxm2-16gb", 12, 4)
    assert node.tiers[-1].nics_per_node == named.tiers[-1].nics_per_node == 1
    assert named == load_cluster(f"12@v100-sxm2-16gb+4@{NAMED['cluster']}*57%").pools[1]


def test_a_pool_may_be_another_file(tmp_path):
    save_cluster(load_cluster("dgx-a100"), tmp_path / "other.yaml")
    cluster = load_cluster(file_of(tmp_path, NODE, {"chips": 8, "cluster": "./other.yaml"}))
    assert cluster.pools[1].chip.name == "a100-sxm-80gb"
    assert load_cluster(tmp_path / "mine.yaml", num_chips=20) == cluster


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([NODE], "pools"),
        ([NODE, {"chips": 4}], "must name a cluster, or describe a node type"),
        ([NODE, {**NAMED, "chip": "t4-16gb"}], "give one of the two"),
        ([NODE, {**NAMED, "speed": "0%"}], "must be above 0"),
        ([NODE, {**NAMED, "cluster": "8@h100-sxm-80gb+8@t4"}], "list its pools here"),
        ([NODE, {**NAMED, "number": 3}], "number"),
    ],
)
def test_a_file_of_pools_that_cannot_be_is_refused(tmp_path, pools, says):
    with pytest.raises(InputError, match=says):
        load_cluster(file_of(tmp_path, *pools))


def test_a_cluster_of_pools_is_not_written_as_one_of_equal_chips(tmp_path):
    with pytest.raises(InputError, match="several kinds of chips"):
        save_cluster(load_cluster("8@dgx-h100+8@dgx-a100"), tmp_path / "pools.yaml")


def test_shared_nics_are_stated_in_text_and_in_files(tmp_path):
    cluster = load_cluster("t4-16gb per-node=4 scale-out=12.5 Gbit/s nics=1", num_chips=8)
    assert cluster.tiers[-1].nics_per_node == 1
    assert load_cluster(cluster.name, num_chips=8) == cluster
    save_cluster(cluster, tmp_path / "t4.yaml")
    assert load_cluster(tmp_path / "t4.yaml").tiers == cluster.tiers
    with pytest.raises(InputError, match="nics=0"):
        load_cluster("t4-16gb nics=0", num_chips=8)
    with pytest.raises(InputError, match="nics_per_node=1: is a positive count between nodes"):
        replace(cluster.tiers[0], nics_per_node=1)
