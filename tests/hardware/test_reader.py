import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import dump_yaml, read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.hardware.calibration import (
    SPEC_SHEET,
    AttentionModel,
    Calibration,
    CalibrationFit,
    CollectiveModel,
    HostTimes,
    KernelClass,
    KernelModels,
    MatmulModel,
    SoftwareMemory,
    StreamingModel,
)
from perfmodel.hardware.chip import USABLE_FRACTIONS, Chip, UsualNode
from perfmodel.hardware.cluster import Cluster, make_cluster
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.reader import (
    calibrations_for,
    cluster_of,
    cluster_of_chip,
    list_calibrations,
    list_chips,
    list_clusters,
    load_calibration,
    load_chip,
    load_cluster,
    load_prices,
    parse_chip,
    parse_cluster,
    prior_for,
)
from perfmodel.hardware.writer import calibration_text, cluster_text, save_calibration, save_cluster
from tests.fuzz.checks import check_refusal
from tests.hardware.domains import scale_up_size

SPECS = resource_dir("hardware_specs")
CHIP_DATA = read_yaml(SPECS / "chips" / "trainium2-96gb.yaml")
CLUSTER_DATA = read_yaml(SPECS / "clusters" / "tpu-v4.yaml")


def test_a_chip_has_its_dense_rates_in_si_units():
    chip = load_chip("h100-sxm-80gb")
    assert chip.flop_rate(Dtype.BF16) == 989.4e12
    assert chip.memory.bandwidth == 3.35e12
    assert chip.memory.capacity == 81559 * 2.0**20
    assert chip.units.compute_units == 132
    assert chip.price_per_hour == 2.99


@pytest.mark.parametrize("chip, dtype", [("v100-sxm2-16gb", "bf16"), ("a100-sxm-80gb", "fp8"), ("tpu-v4", "fp32")])
def test_a_dtype_that_a_chip_lacks_is_never_another_ones_rate(chip, dtype):
    with pytest.raises(InputError, match=f"dtype={dtype}: chip {chip} has no {dtype} units; it has"):
        load_chip(chip).flop_rate(dtype)


@pytest.mark.parametrize(
    "load, name, remedy",
    [
        (load_chip, "h100-sx", "did you mean 'h100-"),
        (load_chip, "H100-SXM-81GB", "did you mean 'h100-sxm-80gb'"),
        (load_chip, "", "use one of"),
        (load_chip, "../clusters/dgx-h100.yaml", "no such file"),
        (load_chip, "x" * 5000, "unknown chip"),
        (load_chip, "a\0b", "unknown chip"),
        (load_cluster, "dgx-h10", "did you mean 'dgx-h100'"),
        (load_cluster, "./no.yaml", "no such file"),
        (load_calibration, "nothing-like-it", "unknown calibration"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(load, name, remedy):
    with pytest.raises(InputError, match=remedy) as caught:
        load(name)
    assert len(str(caught.value)) < 600


def test_localhost_is_one_of_the_clusters():
    assert "localhost" in list_clusters()


@pytest.mark.parametrize("num_chips", [1, 2, 4, 8, 16, 64, 4096, 16384])
@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200", "mi300x", "aws-p4d", "aws-p5"])
def test_a_cluster_scales_from_one_chip_to_thousands(name, num_chips):
    cluster = load_cluster(name, num_chips=num_chips)
    assert cluster.num_chips == num_chips
    assert cluster == load_cluster(name).with_chips(num_chips)


@pytest.mark.parametrize(
    "name, num_chips, rule",
    [
        ("dgx-h100", 12, "multiple of chips_per_node=8.*use 8 or 16"),
        ("dgx-h100", 0, "at least 1"),
        ("tpu-v5e", 264, "whole domains of 256"),
        ("tpu-v4", 4 * 17, "no box"),
        ("gb200-nvl72", 6, "multiple of chips_per_node=4"),
    ],
)
def test_a_number_of_chips_that_the_cluster_cannot_have_is_refused(name, num_chips, rule):
    with pytest.raises(InputError, match=rule):
        load_cluster(name).with_chips(num_chips)


def test_node_and_scale_up_domain_are_kept_apart():
    cluster = load_cluster("gb200-nvl72")
    assert (cluster.chips_per_node, scale_up_size(cluster)) == (4, 72)
    assert scale_up_size(load_cluster("dgx-h100")) == 8
    assert scale_up_size(load_cluster("tpu-v4")) == 4096


@pytest.mark.parametrize("name", list_clusters())
def test_a_cluster_survives_its_own_file_and_a_pickle(name, tmp_path):
    cluster = load_cluster(name)
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    if name != "localhost":
        assert parse_cluster(cluster_text(cluster)) == cluster
        save_cluster(cluster, tmp_path / "mine.yaml")
        assert load_cluster(tmp_path / "mine.yaml") == cluster


def test_a_cluster_file_may_bring_its_own_chip(tmp_path):
    (tmp_path / "mychip.yaml").write_text((SPECS / "chips" / "l4-24gb.yaml").read_text().replace("name: l4-24gb", "name: mychip"))
    text = (SPECS / "clusters" / "dgx-h100.yaml").read_text().replace("chip: h100-sxm-80gb", "chip: mychip.yaml")
    (tmp_path / "mine.yaml").write_text(text)
    assert load_cluster(tmp_path / "mine.yaml").chip.name == "mychip"


def test_an_edited_cluster_file_or_chip_file_is_another_cluster(tmp_path):
    chip, cluster = tmp_path / "mychip.yaml", tmp_path / "mine.yaml"
    chip.write_text((SPECS / "chips" / "l4-24gb.yaml").read_text().replace("name: l4-24gb", "name: mychip"))
    cluster.write_text((SPECS / "clusters" / "dgx-h100.yaml").read_text().replace("chip: h100-sxm-80gb", "chip: mychip.yaml"))
    first = load_cluster(cluster)
    assert load_cluster(cluster) is first
    chip.write_text(chip.read_text().replace("launch_year: 2023", "launch_year: 2024"))
    assert load_cluster(cluster).chip.launch_year == 2024
    cluster.write_text(cluster.read_text().replace("num_chips: 8", "num_chips: 16"))
    assert load_cluster(cluster).num_chips == 16


@pytest.mark.parametrize("chip", list_chips())
@pytest.mark.parametrize("nodes", [1, 16])
def test_any_chip_makes_a_cluster_with_its_usual_links(chip, nodes):
    usual = load_chip(chip)
    cluster = cluster_of(chip, num_chips=nodes * usual.node.chips_per_node)
    assert cluster.tiers[:-1] == usual.node.default_tiers[:-1]
    assert cluster.tiers[-1].topology == Topology.FAT_TREE
    assert cluster.chips_per_node == usual.node.chips_per_node


def test_a_published_run_sets_node_size_and_nics():
    cluster = cluster_of("a100-sxm-80gb", 4, 64, inter_node_bandwidth_per_chip=1600e9 / 8 / 8)
    assert [tier.size for tier in cluster.tiers] == [4, 16384]
    assert cluster.tiers[1].link.bandwidth == 25e9
    assert scale_up_size(cluster_of("tpu-v5e", 4, 8192)) == 256
    assert cluster_of("a100-sxm-80gb", 8, 12288).max_chips == 16384
    assert cluster_of("a100-sxm-80gb", 8, 11200).num_chips == 11200
    assert scale_up_size(cluster_of("gb200-nvl72", 4, 512)) == 72
    with pytest.raises(InputError, match="multiple of chips_per_node"):
        cluster_of("a100-sxm-80gb", 8, 12)


# --- a chip is a cluster ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed, chip",
    [("h20", "h20-96gb"), ("RTX 5090", "rtx5090-32gb"), ("5090", "rtx5090-32gb"), ("a6000", "rtx-a6000-48gb"), ("mi210", "mi210-64gb")],
)
def test_a_chip_is_found_as_people_call_it(typed, chip):
    assert load_chip(typed).name == chip
    cluster = load_cluster(typed, num_chips=16)
    assert (cluster.name, cluster.chip.name, cluster.num_chips) == (chip, chip, 16)
    assert cluster.tiers[:-1] == load_chip(chip).node.default_tiers[:-1]


def test_a_name_that_several_chips_begin_with_is_not_guessed():
    with pytest.raises(InputError, match=r"h100-pcie-80gb, h100-sxm-80gb.*give one of them, or a cluster: dgx-h100"):
        load_cluster("h100")
    with pytest.raises(InputError, match="a chip or a path works too"):
        load_cluster("nothing-of-the-kind")


def test_what_is_stated_of_a_chips_surroundings_holds_and_can_be_read_again():
    cluster = cluster_of_chip("h20", per_node=4, scale_up="200GB/s", scale_out="100 Gbit/s", chips=8)
    assert cluster.name == "h20-96gb per-node=4 scale-up=200 GB/s scale-out=100 Gbit/s"
    assert [(tier.size, tier.link.bandwidth) for tier in cluster.tiers] == [(4, 200e9), (16384, 12.5e9)]
    assert load_cluster(cluster.name, num_chips=8) == cluster
    assert cluster_of_chip("h20") == load_cluster("h20-96gb")


def test_a_mesh_keeps_its_shape_and_a_card_without_nvlink_has_none_unless_stated():
    mesh = cluster_of_chip("mi300x-192gb", scale_up="224 GB/s").tiers[0]
    assert (mesh.topology, mesh.link.bandwidth, mesh.link.pair_bandwidth) == (Topology.FULL_MESH, 224e9, 32e9)
    card, slower, bridged = (cluster_of_chip("rtx4090-24gb", scale_up=rate).tiers[0] for rate in (None, "15.75 GB/s", "100 GB/s"))
    assert (card.topology, card.peer_to_peer) == (slower.topology, slower.peer_to_peer) == (Topology.PCIE_TREE, False)
    assert (bridged.topology, bridged.peer_to_peer, bridged.link.bandwidth) == (Topology.SWITCH, True, 100e9)


def test_a_chip_file_is_a_cluster_and_says_what_to_give_where_it_has_no_links(tmp_path):
    data = {key: value for key, value in CHIP_DATA.items() if key not in ("scale_up", "scale_out")} | {"chips_per_node": 8}
    (tmp_path / "mine.yaml").write_text(dump_yaml(data))
    with pytest.raises(InputError, match="how the chips of a node are joined; give scale_up too"):
        load_cluster(tmp_path / "mine.yaml")
    with pytest.raises(InputError, match="how nodes are joined; give scale_out too"):
        cluster_of_chip(tmp_path / "mine.yaml", scale_up="100 GB/s", chips=16)
    assert cluster_of_chip(tmp_path / "mine.yaml", scale_up="100 GB/s").max_chips == 8
    cluster = cluster_of_chip(tmp_path / "mine.yaml", scale_up="100 GB/s", scale_out="10 GB/s", chips=16)
    assert load_cluster(cluster.name, num_chips=16) == cluster


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_any_chip_stands_in_nodes_of_any_size(per_node):
    for chip in list_chips():
        cluster = cluster_of_chip(chip, per_node=per_node, scale_up="10 GB/s", scale_out="1 GB/s")
        assert (cluster.chips_per_node, cluster.num_chips) == (per_node, per_node)
        assert load_cluster(cluster.name) == cluster


def test_a_node_that_cuts_a_domain_is_refused_and_one_beyond_the_fabric_is_not():
    with pytest.raises(InputError, match="chips_per_node=7: must divide size=72 of tier nvlink"):
        cluster_of_chip("gb200-nvl72", per_node=7)
    assert cluster_of_chip("h20", per_node=100_000).max_chips == 200_000


@pytest.mark.parametrize(
    "stated, rule",
    [
        (dict(scale_up="450"), "needs its unit"),
        (dict(scale_out="400 Gb"), "bits or bytes"),
        (dict(scale_out=-1.0), "must be positive"),
        (dict(per_node=0), "per_node=0: must be a whole number"),
        (dict(per_node=True), "per_node=True"),
    ],
)
def test_surroundings_that_cannot_be_are_refused(stated, rule):
    with pytest.raises(InputError, match=rule):
        cluster_of_chip("h20", **stated)


# --- calibrations -------------------------------------------------------------------------------------------------------------------------


FULL = Calibration(
    name="mine",
    chips=("a100-sxm-80gb",),
    relatives=("a100-sxm-40gb",),
    software="torch 2.13",
    source="measured",
    date="2026-11-21",
    kernels=KernelModels(
        matmul={Dtype.BF16: MatmulModel(peak_fraction=0.85, floor_time=2.3e-6, tiles=((256.0, 128.0, 0.0), (64.0, 64.0, 1.5)))},
        streaming={
            KernelClass.DEFAULT: StreamingModel(bandwidth_fraction=0.8, element_time=1 / 3e9, caches=((2.0**21, 4.0), (2.0**24, 2.0)))
        },
        attention={"flash": AttentionModel(peak_fraction=0.6, sequence_offset=100.0)},
        collectives={"scale_up": {CollectiveKind.ALL_REDUCE: CollectiveModel(base_time=1.1e-5, ramp_time=3e-7)}},
    ),
    peaks={"flop_rate.bf16": 1.5e11, "memory_bandwidth": 1e10 / 3, "scale_up_bandwidth": 2e9},
    host=HostTimes(host_times={"dtensor_op": 1.234567e-4}),
    memory=SoftwareMemory(context_bytes=5e8 / 3),
    contention={"2": 1.1},
    fit=CalibrationFit(points={"matmul": 120}, errors={"matmul": 0.03, "step_time": 0.1}),
)


@pytest.mark.parametrize("calibration", [FULL, SPEC_SHEET], ids=["full", "spec-sheet"])
def test_a_calibration_survives_its_own_file_exactly(calibration, tmp_path):
    save_calibration(calibration, tmp_path / "cal.yaml")
    assert load_calibration(tmp_path / "cal.yaml") == calibration


def test_a_calibration_file_has_units():
    text = calibration_text(FULL)
    assert "floor_time: 2.3 us" in text
    assert "dtensor_op: 123.4567 us" in text
    assert "flop_rate.bf16: 150 GFLOP/s" in text
    assert "step_time: 0.1\n" in text


def test_a_relative_with_less_power_has_a_lower_clock_and_one_with_more_the_same():
    """Cube root: 500 W instead of 700 W leave .894; only the chip that was measured keeps the file's figure exactly."""
    measured = load_calibration("h100").sustained.sustained_clock_fraction

    def clock(chip):
        return next(c for c in calibrations_for(chip) if c.name == "h100").sustained.sustained_clock_fraction

    assert clock("h100-sxm-80gb") == measured
    assert clock("h100-sxm-96gb-hbm2e") == pytest.approx(measured * (500 / 700) ** (1 / 3), rel=1e-12)
    assert clock("gh200-96gb") == measured


def test_only_calibrations_that_name_the_chip_are_read(tmp_path):
    save_calibration(FULL, tmp_path / "mine.yaml")
    (tmp_path / "broken.yaml").write_text("name: [")
    assert "mine" in list_calibrations([tmp_path])
    assert calibrations_for("a100-sxm-80gb", [tmp_path])[0] == FULL
    assert FULL not in calibrations_for("tpu-v2", [tmp_path])
    assert load_calibration("mine", [tmp_path]) == FULL


def test_a_calibration_that_only_speaks_of_a_chip_is_not_for_it(tmp_path):
    """Its source may name the chip; so may the name of another chip, as its beginning."""
    spoken = dataclasses.replace(FULL, name="spoken", chips=("tpu-v2-pod",), relatives=(), source="not measured on tpu-v2")
    save_calibration(spoken, tmp_path / "spoken.yaml")
    assert calibrations_for("tpu-v2", [tmp_path]) == ()
    assert calibrations_for("tpu-v2-pod", [tmp_path]) == (spoken,)


@pytest.mark.parametrize("chip", ["h100-sxm-80gb", "gb200-nvl72"])
def test_other_chips_calibrations_are_read_only_where_a_prior_is_needed(chip, monkeypatch):
    def refuse():
        raise AssertionError("read")

    monkeypatch.setattr("perfmodel.hardware.reader.measured_chips", refuse)
    assert calibrations_for(chip)
    with pytest.raises(AssertionError, match="read"):
        calibrations_for("l40s-48gb")


def test_a_user_defined_chip_gets_the_prior_too():
    """An unknown chip file, twice as fast as an A100 at the same power, is between two generations and at a lower clock."""
    a100 = load_chip("a100-sxm-80gb")
    rates = {dtype: 2 * rate for dtype, rate in a100.peak_flop_rate.items()}
    mine = dataclasses.replace(a100, name="mine", launch_year=2021, peak_flop_rate=rates)
    (prior,) = calibrations_for(mine)
    assert prior == prior_for(mine)
    assert prior.name == "mean of a100 and h100"
    assert prior.relatives == ("mine",)
    assert prior.sustained.sustained_clock_fraction < load_calibration("a100").sustained.sustained_clock_fraction


@pytest.mark.parametrize(
    "old, new, rule",
    [
        ("floor_time: 2.3 us", "floor_time: 2.3e-6", "needs its unit"),
        ("floor_time:", "flor_time:", "did you mean 'floor_time'"),
        ("all_reduce:", "allreduce:", "did you mean 'all_reduce'"),
        ("bf16:", "bf61:", "did you mean 'bf16'"),
        ("software: torch 2.13", "software: 2.13", "must be a text; write '2.13' in quotes"),
        ("peak_fraction: 0.85", "peak_fraction: .nan", "finite"),
        ("peak_fraction: 0.85", "peak_fraction: -1", "must be positive"),
        ("source: measured\n", "", "source: required field is missing"),
        ("matmul: 120", "matmul: 1.5", "whole number"),
    ],
)
def test_a_bad_calibration_names_the_field(tmp_path, old, new, rule):
    text = calibration_text(FULL)
    assert old in text
    (tmp_path / "cal.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=rule):
        load_calibration(tmp_path / "cal.yaml")


# --- bad files ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new, rule",
    [
        ("bandwidth: 2.9 TB/s", "bandwith: 2.9 TB/s", "memory.bandwith: unknown field; did you mean 'bandwidth'"),
        ("bandwidth: 2.9 TB/s", "bandwidth: 2.9 TB", "memory.bandwidth='2.9 TB': unknown bandwidth unit"),
        ("bandwidth: 2.9 TB/s", "bandwidth: 2900", "memory.bandwidth=2900"),
        ("bf16: 667 TFLOP/s", "bf61: 667 TFLOP/s", "peak_flop_rate.bf61: unknown name; did you mean 'bf16'"),
        ("topology: torus", "topology: donut", "topology='donut'"),
        ("devices_per_chip: 1", "devices_per_chip: 0", "devices_per_chip=0: must be at least 1"),
        ("devices_per_chip: 1", "any_operand_order: perhaps", "any_operand_order='perhaps': must be true or false"),
        ("chips_per_node: 16", "chips_per_node: 12", "must divide size=16"),
        ("vendor: aws\n", "", "vendor: required field is missing"),
        ("provenance: read", "provenance: guessed", "provenance='guessed'"),
        ("  memory_capacity: {", "  memory_capacty: {", "facts.memory_capacty: unknown name; did you mean 'memory_capacity'"),
        ("capacity: 96 GiB", "capacity: 0 GiB", "must be positive"),
        ("capacity: 96 GiB", "capacity: 96 GiB\n  usable_capacity: 95 GiB", "add facts.memory_usable"),
    ],
)
def test_a_bad_chip_file_names_file_field_and_remedy(tmp_path, old, new, rule):
    path = tmp_path / "mychip.yaml"
    text = (SPECS / "chips" / "trainium2-96gb.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=rule) as caught:
        load_chip(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chip_offers_no_more_than_it_has(tmp_path):
    path = tmp_path / "mychip.yaml"
    text = (SPECS / "chips" / "h100-sxm-80gb.yaml").read_text()
    path.write_text(text.replace("usable_capacity: 79.1 GiB", "usable_capacity: 80 GiB"))
    with pytest.raises(InputError, match=r"memory.usable_capacity=.*must not exceed the capacity"):
        load_chip(path)


def test_a_chip_without_a_stated_usable_memory_follows_its_vendor(tmp_path):
    path = tmp_path / "mychip.yaml"
    text = (SPECS / "chips" / "h100-sxm-80gb.yaml").read_text()
    path.write_text("".join(line for line in text.splitlines(keepends=True) if "usable" not in line))
    assert load_chip(path).memory.usable_fraction == pytest.approx(USABLE_FRACTIONS["nvidia"])
    path.write_text(path.read_text().replace("vendor: nvidia", "vendor: somebody"))
    assert load_chip(path).memory.usable_fraction == pytest.approx(min(USABLE_FRACTIONS.values()))


def test_a_number_without_a_source_is_refused():
    data = copy.deepcopy(CHIP_DATA)
    del data["facts"]["peak_flop_rate"]
    with pytest.raises(InputError, match="every number has a provenance and a source"):
        parse_chip(dump_yaml(data))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["1 GB/s", "-1 GB/s", "1e999 GB/s", "0 B", "1 us", "torus", "fat_tree", "switch", "read"]),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5
)


def places(value, at=()):
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


@st.composite
def mutated(draw, original):
    """The data of a good file with one to three places changed, removed or added to."""
    data = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([key_path for key_path in places(data) if key_path]))
        holder = data
        for key in path:
            holder = holder[key]
        action = draw(st.sampled_from(["change", "remove", "add"]))
        if action == "change":
            holder[last] = draw(ANYTHING)
        elif action == "remove":
            del holder[last]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = draw(ANYTHING)
        if not data:
            break
    return data


def assert_valid_or_refused(parse, data, kind):
    """A good object or a refusal of a few short sentences; any other exception fails the test."""
    try:
        message = ""
        assert isinstance(parse(dump_yaml(data)), kind)
    except InputError as error:
        check_refusal(error)
        message = str(error)
    assert message.isprintable()


@settings(max_examples=150)
@given(data=mutated(CHIP_DATA))
@pytest.mark.slow
def test_any_chip_file_is_a_chip_or_an_input_error(data):
    assert_valid_or_refused(parse_chip, data, Chip)


@settings(max_examples=150)
@given(data=mutated(CLUSTER_DATA))
@pytest.mark.slow
def test_any_cluster_file_is_a_cluster_or_an_input_error(data):
    assert_valid_or_refused(parse_cluster, data, Cluster)


@settings(max_examples=100)
@given(text=st.text(alphabet="abn:-[]{}&*!|>'\"# \n\t0?%@`,é\x00", max_size=60))
def test_any_text_is_an_input_error(text):
    for parse in (parse_chip, parse_cluster):
        with pytest.raises(InputError):
            parse(text)


@settings(max_examples=100)
@given(
    change=st.dictionaries(
        st.sampled_from(["matmul", "collectives", "peaks", "chips", "context_bytes", "points", "x"]), ANYTHING, min_size=1
    )
)
@pytest.mark.slow
def test_any_calibration_file_is_a_calibration_or_an_input_error(change, tmp_path_factory):
    path = tmp_path_factory.mktemp("cal") / "cal.yaml"
    path.write_text(calibration_text(FULL), encoding="utf-8")
    path.write_text(dump_yaml({**read_yaml(path), **change}), encoding="utf-8")
    try:
        assert isinstance(load_calibration(path), Calibration)
    except InputError:
        pass


# --- prices and this machine --------------------------------------------------------------------------------------------------------------


def test_a_price_table_of_the_user_is_read_and_a_bad_one_refused(tmp_path):
    table = tmp_path / "prices.tsv"
    head = "chip\tdate\tper_hour\tlow\thigh\tprovenance\tsource\n"
    table.write_text(head + "tpu-v4\t2026-11-21\t3 USD/h\t2 USD/h\t4 USD/h\tread\tan offer\n")
    assert load_prices(table)["tpu-v4"].per_hour == 3.0
    for bad in (
        "chip,date\n",
        head + "tpu-v4\t3\n",
        head + "a\tb\t3\t2\t4\tread\tx\n",
        head + "a\tb\t3 USD/h\t2 USD/h\t4 USD/h\ty\tx\n",
    ):
        table.write_text(bad)
        with pytest.raises(InputError):
            load_prices(table)
    with pytest.raises(InputError):
        load_prices(tmp_path)


PROC = {
    "intel": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.70GHz\n"
    "cpu MHz\t\t: 2600.000\ncache size\t: 1024 KB\n"
    "flags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16\n\n",
    "arm": "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n\n",
    "empty": "",
}


@pytest.mark.parametrize("kind", PROC)
def test_this_machine_is_found_from_proc(kind, tmp_path):
    (tmp_path / "cpuinfo").write_text(PROC[kind])
    (tmp_path / "meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n")
    cluster = local_cluster(num_chips=4, proc=tmp_path)
    assert cluster.num_chips == 4
    assert cluster.chip.memory.capacity <= 1e9 * 1.024
    assert cluster.chip.flop_rate("fp32") > 1e9
    if kind == "intel":
        assert cluster.chip.name == "cpu-intel-xeon"
        assert cluster.chip.flop_rate("bf16") == 16 * cluster.chip.flop_rate("fp32")


def test_more_processes_share_the_memory_of_this_machine():
    assert local_cluster(num_chips=64).chip.memory.capacity < local_cluster(num_chips=1).chip.memory.capacity
    with pytest.raises(InputError, match="localhost runs 1 to"):
        load_cluster("localhost", num_chips=10**6)


def test_a_machine_without_proc_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="describe the machine in a cluster file"):
        local_cluster(proc=tmp_path)
    (tmp_path / "cpuinfo").write_text("")
    (tmp_path / "meminfo").write_text("nothing")
    with pytest.raises(InputError, match="MemAvailable"):
        local_cluster(proc=tmp_path)


def test_a_cluster_is_loaded_without_pydantic_and_numpy():
    code = (
        "import sys; from perfmodel.hardware.reader import load_cluster; load_cluster('dgx-h100'); "
        "print(sorted({'pydantic', 'pydantic_core', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_chip_is_replaced_with_dataclasses():
    chip = load_chip("tpu-v4")
    assert dataclasses.replace(chip, price_per_hour=1.0).price_per_hour == 1.0
    with pytest.raises(InputError, match="price_per_hour"):
        dataclasses.replace(chip, price_per_hour=-1.0)


def test_a_fat_tree_takes_more_chips_than_its_source_states():
    cluster = load_cluster("dgx-h100", num_chips=100_000)
    stated = load_cluster("dgx-h100", num_chips=8)
    assert (cluster.num_chips, cluster.largest_job) == (100_000, stated.max_chips)
    assert cluster.tiers[-1].size >= 100_000
    assert (cluster.tiers[-1].link, cluster.tiers[:-1]) == (stated.tiers[-1].link, stated.tiers[:-1])


def test_one_chip_needs_no_network():
    cluster = make_cluster(dataclasses.replace(load_chip("rtx4090-24gb"), node=UsualNode()), num_chips=1)
    assert cluster.num_chips == cluster.max_chips == 1
    with pytest.raises(InputError, match="does not say how nodes are joined; give scale_out too"):
        make_cluster(dataclasses.replace(load_chip("rtx4090-24gb"), node=UsualNode()), num_chips=2)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA GB10", "gb10-128gb"),
        ("NVIDIA A30", "a30-24gb"),
        ("NVIDIA A40", "a40-48gb"),
        ("NVIDIA L20", "l20-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA GeForce RTX 3080", "rtx3080-10gb"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti-12gb"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper-16gb"),
        ("NVIDIA GeForce RTX 5080", "rtx5080-16gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada-48gb"),
    ],
)
def test_a_name_that_nvidia_smi_prints_is_a_chip(printed, name):
    assert load_chip(printed).name == name


def test_no_two_chips_share_a_name():
    names = [alias.lower() for chip in list_chips() for alias in load_chip(chip).aliases]
    assert len(names) == len(set(names))


def test_a_peak_without_a_known_unit_is_refused_by_name(tmp_path):
    content = {"name": "bad", "chips": ["h100-sxm-80gb"], "software": "x", "source": "x", "date": "2026-01-01", "peaks": {"z": "1 B"}}
    (tmp_path / "bad.yaml").write_text(dump_yaml(content))
    with pytest.raises(InputError, match=r"peaks\.z=1 B: is no figure that is known; correct its name"):
        load_calibration(tmp_path / "bad.yaml")
