"""Every shipped hardware file against the mistakes found in comparable tables: sparse rates as dense, TB as 1024**4, duplex links as one
direction, Gbit read as GB, a node taken for the scale-up domain, values of a sister product, software settings in a hardware file."""

import math
import re
from itertools import pairwise

import pytest

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.units import QuantityKind, parse_quantity
from perfmodel.hardware.chip import FACT_GROUPS, PROVENANCES, USABLE_FRACTIONS
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.reader import LOCALHOST, list_chips, list_clusters, load_chip, load_cluster, load_prices
from tests.hardware.domains import scale_up_size

SPECS = resource_dir("hardware_specs")
CHIPS = list_chips()
CLUSTERS = [name for name in list_clusters() if name != LOCALHOST]
TIERS = [
    *((f"chip {name}", number, tier) for name in CHIPS for number, tier in enumerate(load_chip(name).node.default_tiers)),
    *((f"cluster {name}", number, tier) for name in CLUSTERS for number, tier in enumerate(load_cluster(name).tiers)),
]
QUANTITY_FIELDS = {"capacity", "usable_capacity", "bandwidth", "pair_bandwidth", "latency", "tdp"}
COUNT_FIELDS = {
    "launch_year",
    "compute_units",
    "devices_per_chip",
    "chips_per_node",
    "num_chips",
    "largest_job",
    "size",
    "torus_shape",
    "wrap_multiple",
    "oversubscription",
    "matmul_fraction",
}

# Headline rates that data sheets print with 2:4 sparsity, or for both directions of a link; none of them may appear here.
SPARSE_BF16 = {
    "a100": 624,
    "h100-sxm": 1979,
    "h200": 1979,
    "gh200": 1979,
    "h100-pcie": 1513,
    "h100-nvl": 1671,
    "l40s": 733,
    "l4": 242,
    "t4": 130,
    "a10-": 250,
    "rtx-a6000": 310,
    "rtx5090": 419,
    "rtx6000-ada": 728,
    "rtx-pro-6000": 1000,
    "h20-": 296,
    "h800": 1979,
    "a800": 624,
    "b100": 3500,
    "b200": 4500,
    "gb200": 5000,
    "b300": 4500,
    "gb300": 5000,
    "mi300x": 2615,
    "mi325x": 2615,
    "mi355x": 5033,
    "trainium2": 2563,
}
DUPLEX_LINK = {
    "v100": 300,
    "a100-sxm": 600,
    "h100-sxm": 900,
    "h200": 900,
    "h20-": 900,
    "h800": 400,
    "a800": 400,
    "b100": 1800,
    "b200": 1800,
    "gb200": 1800,
    "b300": 1800,
    "gb300": 1800,
    "mi300x": 896,
    "mi325x": 896,
    "mi355x": 1071,
    "tpu-v5e": 400,
    "tpu-v5p": 1200,
    "tpu-v6e": 800,
    "tpu-v7": 1200,
}
NODE_GBIT = {
    "aws-p4d": 400,
    "aws-p5": 3200,
    "dgx-a100": 1600,
    "dgx-h100": 3200,
    "hgx-h200": 3200,
    "dgx-b200": 3200,
    "mi300x": 3200,
    "gb200-nvl72": 1600,  # ConnectX-7, one 400 Gbit/s port a GPU; 800 is the GB300's ConnectX-8
}


def longest_prefix(table, name):
    prefixes = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(prefixes, key=len)] if prefixes else None


def test_all_the_promised_files_are_there():
    assert len(CHIPS) >= 51
    promised = {
        "dgx-a100",
        "dgx-h100",
        "hgx-h200",
        "dgx-b200",
        "gb200-nvl72",
        "mi300x",
        "tpu-v4",
        "tpu-v5e",
        "tpu-v5p",
        "tpu-v6e",
        "aws-p4d",
        "aws-p5",
        "pase-1080ti",
        "pase-2080ti",
        "pcie-workstation",
    }
    assert promised <= set(CLUSTERS)
    assert LOCALHOST in list_clusters()


@pytest.mark.parametrize("folder, name", [("chips", name) for name in CHIPS] + [("clusters", name) for name in CLUSTERS])
def test_a_file_is_named_as_what_it_holds(folder, name):
    assert read_yaml(SPECS / folder / f"{name}.yaml")["name"] == name


@pytest.mark.parametrize(
    "path", sorted([*SPECS.glob("chips/*.yaml"), *SPECS.glob("clusters/*.yaml")]), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_number_has_a_unit_and_is_hardware(path):
    def check(value, field):
        if isinstance(value, dict):
            for key, item in value.items():
                check(item, "flop_rate" if field == "peak_flop_rate" else key)
        elif isinstance(value, list):
            for item in value:
                check(item, field)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert field in COUNT_FIELDS, f"{field}: {value} has no unit"
        elif field in QUANTITY_FIELDS | {"flop_rate"}:
            assert re.fullmatch(r"[\d.]+ [A-Za-z/]+", value), f"{field}: {value}"
            assert not ({"TiB/s", "GiB/s"} & set(value.split())), f"{field}: {value}: bandwidths are decimal"

    data = read_yaml(path)
    check({key: value for key, value in data.items() if key != "facts"}, "")
    software = {"tp", "pp", "dp", "precision", "efficiency", "batch", "framework", "zero", "recompute"}
    assert not software & set(data)


@pytest.mark.parametrize("name", CHIPS)
def test_every_group_of_numbers_has_a_provenance_and_a_source(name):
    data = read_yaml(SPECS / "chips" / f"{name}.yaml")
    chip = load_chip(name)
    assert set(data["facts"]) <= set(FACT_GROUPS)
    for group, fact in data["facts"].items():
        assert fact["provenance"] in PROVENANCES
        assert len(fact["source"]) > 5, group
        assert ("recalled" in fact["source"]) or fact["provenance"] != "recalled", f"{group}: a recalled number says so"
    assert {"peak_flop_rate", "memory_capacity", "memory_bandwidth", "on_chip", "launch_year", "scale_out"} <= set(chip.provenance)


def test_the_rule_for_unmeasured_memory_is_the_least_measured_share():
    shares: dict[str, list[float]] = {}
    for name in CHIPS:
        if "usable_capacity" in read_yaml(SPECS / "chips" / f"{name}.yaml")["memory"]:
            chip = load_chip(name)
            assert 0.9 < chip.memory.usable_fraction <= 1
            shares.setdefault(chip.vendor, []).append(chip.memory.usable_fraction)
    assert {vendor: math.floor(min(fractions) * 1000) / 1000 for vendor, fractions in shares.items()} == USABLE_FRACTIONS


@pytest.mark.parametrize("owner, number, tier", TIERS, ids=[f"{owner} {number}" for owner, number, _ in TIERS])
def test_every_tier_has_a_source_and_plausible_numbers(owner, number, tier):
    assert tier.provenance in PROVENANCES
    assert len(tier.source) > 10
    assert 0.1e-6 <= tier.link.latency <= 100e-6
    assert 0.1e9 <= tier.link.bandwidth <= 1280e9, "one direction of one chip: nothing shipped exceeds NeuronLink-v4"
    if tier.topology == Topology.FAT_TREE:
        assert tier.link.bandwidth <= 100e9, "no chip has more than 800 Gbit/s of NICs; a node's total in its place?"
    if tier.topology == Topology.TORUS:
        ports = 2 * len(tier.torus_shape)
        assert tier.link.pair_bandwidth * ports == pytest.approx(tier.link.bandwidth)
        assert tier.wrap_multiple
        assert all(dim % tier.wrap_multiple == 0 for dim in tier.torus_shape), "a whole pod wraps"
    if tier.topology in (Topology.SWITCH, Topology.FAT_TREE, Topology.PCIE_TREE):
        assert tier.link.pair_bandwidth == tier.link.bandwidth


@pytest.mark.parametrize("name", CHIPS)
def test_rates_are_dense(name):
    chip = load_chip(name)
    rates = chip.peak_flop_rate
    tensor = rates.get(Dtype.BF16) or rates.get(Dtype.FP16)
    sparse = longest_prefix(SPARSE_BF16, name)
    if sparse:
        assert tensor < 0.75 * sparse * 1e12
    for narrow, wide, most in [
        ("fp8", "bf16", 3.76 if name.startswith("trainium3") else 2.03),  # its MXFP8 is 2,517 of 671 TFLOP/s, dense
        ("fp16", "bf16", 1.01),
        ("bf16", "tf32", 4.1),
        ("fp4", "bf16", 8.01),
        ("int8", "bf16", 4.01),
    ]:
        if narrow in rates and wide in rates:
            assert rates[Dtype(narrow)] <= most * rates[Dtype(wide)], f"{narrow} against {wide}: sparse against dense?"
    assert 1e12 < max(rates.values()) < 2e16


RATIOS = [
    ("h100-sxm-80gb", "a100-sxm-80gb", 989.4 / 312),
    ("h200-sxm-141gb", "h100-sxm-80gb", 1.0),
    ("h100-sxm-96gb-hbm2e", "h100-sxm-80gb", 1.0),
    ("a100-pcie-80gb", "a100-sxm-80gb", 1.0),
    ("gb200-nvl72", "b200-180gb", 2500 / 2250),
    ("mi325x-256gb", "mi300x-192gb", 1.0),
    ("tpu-v6e", "tpu-v5e", 918 / 197),
    ("tpu-v7", "tpu-v5p", 2307 / 459),
    ("a10g-24gb", "a100-sxm-40gb", 70 / 312),
    ("h800-sxm-80gb", "h100-sxm-80gb", 1.0),
    ("a800-sxm-80gb", "a100-sxm-80gb", 1.0),
    ("mi210-64gb", "mi250x-128gb", 104 * 1.7 / (220 * 1.7)),
]


@pytest.mark.parametrize("chip, other, ratio", RATIOS)
def test_bf16_rates_stand_in_the_known_ratios(chip, other, ratio):
    assert load_chip(chip).flop_rate("bf16") / load_chip(other).flop_rate("bf16") == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    "name, clock, flops_per_cycle",
    [
        ("a100-sxm-80gb", 1410e6, 2048),
        ("h100-sxm-80gb", 1830e6, 4096),
        ("h100-pcie-80gb", 1620e6, 4096),
        ("v100-sxm2-16gb", 1530e6, 1024),
        ("mi300x-192gb", 2100e6, 2048),
        ("t4-16gb", 1590e6, 1024),
        ("a10-24gb", 1695e6, 1024),
        ("rtx-a6000-48gb", 1800e6, 1024),
        ("rtx6000-ada-48gb", 2505e6, 1024),
        ("rtx-pro-6000-96gb", 2430e6, 1024),
        ("rtx5090-32gb", 2407e6, 512),  # GeForce: half with fp32 accumulation
        ("rtx4090-24gb", 2520e6, 512),
        ("mi210-64gb", 1700e6, 1024),
    ],
)
def test_a_rate_is_units_times_clock_times_dense_flops_per_cycle(name, clock, flops_per_cycle):
    chip = load_chip(name)
    assert chip.flop_rate("fp16") == pytest.approx(chip.units.compute_units * clock * flops_per_cycle, rel=0.01)


@pytest.mark.parametrize("name", CHIPS)
def test_memory_is_as_the_driver_reports_and_its_bandwidth_decimal(name):
    chip = load_chip(name)
    label = re.search(r"(\d+)gb", name)
    if label:  # what torch can use is never more than the label in GiB, and within a few percent of it in GB
        assert 0.95 * int(label[1]) * 1e9 <= chip.memory.capacity <= int(label[1]) * 2.0**30
    assert 10 * 2**30 <= chip.memory.capacity <= 300 * 2**30
    assert chip.memory.bandwidth <= 8e12, "8 TB/s is the most of any; 1024**4 would make it 8.8e12"
    written = read_yaml(SPECS / "chips" / f"{name}.yaml")["memory"]["bandwidth"]
    assert written.endswith((" GB/s", " TB/s"))
    intensity = max(chip.peak_flop_rate.values()) / chip.memory.bandwidth
    assert 15 < intensity < 2000


def test_the_traps_of_single_chips():
    a10g = load_chip("a10g-24gb")
    assert (a10g.flop_rate("bf16"), a10g.memory.bandwidth) == (70e12, 600e9), "not the A10's 125 TFLOP/s, not the A30's 933 GB/s"
    assert load_chip("rtx3090-24gb").flop_rate("fp16") == 71e12, "fp32 accumulation halves a GeForce"
    assert load_chip("h100-sxm-80gb").memory.capacity == parse_quantity("81559 MiB", "bytes")
    assert load_chip("h100-sxm-96gb-hbm2e").memory.bandwidth == 2.4e12, "torchtitan's part is not the stock H100"
    for name in ("mi250x-128gb", "tpu-v2", "tpu-v3", "tpu-v7"):
        assert load_chip(name).units.devices_per_chip == 2
    assert load_chip("mi250x-128gb").flop_rate("bf16") == 383e12, "the module, not one of its two dies"


@pytest.mark.parametrize("name", CHIPS)
def test_links_are_one_direction(name):
    duplex = longest_prefix(DUPLEX_LINK, name)
    if duplex:
        inner = load_chip(name).node.default_tiers[0]
        assert inner.link.bandwidth == pytest.approx(duplex * 1e9 / 2, rel=0.01)


@pytest.mark.parametrize("name, gbit", NODE_GBIT.items())
def test_nics_are_bytes_per_chip_not_bits_per_node(name, gbit):
    cluster = load_cluster(name)
    assert cluster.tiers[-1].link.bandwidth * cluster.chips_per_node == gbit * 1e9 / 8


@pytest.mark.parametrize("name", CLUSTERS)
def test_outer_tiers_are_slower_and_larger(name):
    tiers = load_cluster(name).tiers
    assert all(inner.size < outer.size and outer.size % inner.size == 0 for inner, outer in pairwise(tiers))
    assert all(inner.link.bandwidth > outer.link.bandwidth for inner, outer in pairwise(tiers))
    assert all(inner.link.latency <= outer.link.latency for inner, outer in pairwise(tiers) if "pcie" not in inner.name)


@pytest.mark.parametrize(
    "name, node, domain",
    [
        ("dgx-a100", 8, 8),
        ("dgx-h100", 8, 8),
        ("gb200-nvl72", 4, 72),
        ("tpu-v4", 4, 4096),
        ("tpu-v5e", 8, 256),
        ("tpu-v5p", 4, 8960),
        ("tpu-v6e", 8, 256),
        ("pase-1080ti", 8, 8),
        ("pase-2080ti", 8, 8),
        ("pcie-workstation", 4, 4),
    ],
)
def test_node_and_scale_up_domain(name, node, domain):
    cluster = load_cluster(name)
    assert (cluster.chips_per_node, scale_up_size(cluster)) == (node, domain)


def test_one_to_one_differs_from_all_to_all_on_a_mesh():
    tier = load_cluster("mi300x").tiers[0]
    assert (tier.topology, tier.link.pair_bandwidth, tier.link.bandwidth) == (Topology.FULL_MESH, 64e9, 448e9)
    for name in ("mi325x-256gb", "mi355x-288gb", "gaudi2-96gb", "gaudi3-128gb"):
        link = load_chip(name).node.default_tiers[0].link
        assert link.pair_bandwidth * 7 == pytest.approx(link.bandwidth)


def test_the_cards_without_peer_to_peer_say_so():
    assert not load_cluster("pase-2080ti").tiers[0].peer_to_peer
    assert load_cluster("pase-1080ti").tiers[0].peer_to_peer
    assert not load_cluster("pcie-workstation").tiers[0].peer_to_peer


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5p", "tpu-v5e", "tpu-v6e"])
def test_a_pod_is_its_torus(name):
    tier = load_cluster(name).tiers[0]
    assert math.prod(tier.torus_shape) == tier.size
    assert tier.wrap_multiple == (4 if len(tier.torus_shape) == 3 else 16)


def test_prices_are_dated_sourced_and_apart():
    prices = load_prices()
    assert set(prices) <= set(CHIPS)
    for name, price in prices.items():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", price.date)
        assert price.low <= price.per_hour <= price.high, name
        assert price.provenance in PROVENANCES
        assert price.source
        assert load_chip(name).price_per_hour == price.per_hour
    for name in CHIPS:
        assert QuantityKind.PRICE not in read_yaml(SPECS / "chips" / f"{name}.yaml")
