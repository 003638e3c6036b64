"""Axes: how they are written, what they change, and what is refused."""

from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request, Service
from perfmodel.verbs.axes import axes_of, changed, hardware_axes, read_axis
from perfmodel.verbs.system_times import system_of

TRAINING = Request(model="llama-3-8b", cluster="dgx-h100", chips=8, global_batch=64, seq_len=4096)
SYSTEM = system_of(TRAINING, Knobs(tp=2), Service())
MADE = system_of(replace(TRAINING, cluster="a100-spec"), Knobs(), Service())
SERVICE = system_of(
    Request(model="llama-3-8b", cluster="dgx-h100", chips=1), Knobs(tp=1), Service().having({"input_len": 512, "output_len": 128})
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("chip.memory.bandwidth=1..4TB/s", [1e12 * 4 ** (exponent / 2) for exponent in range(3)]),
        ("chip.memory.bandwidth=1,2 TB/s", [1e12, 2e12]),
        ("chip.memory.bandwidth=x1,x2", [3.35e12, 6.7e12]),
        ("network.scale_out.latency=1us,2us", [1e-6, 2e-6]),
        ("model.num_hidden_layers=16,32", [16, 32]),
        ("plan.tp=1..8", [1, 4, 8]),
        ("job.precision=bf16-mixed,fp8-current", ["bf16-mixed", "fp8-current"]),
        ("chip=h100-sxm-80gb,b200-180gb", ["h100-sxm-80gb", "b200-180gb"]),
    ],
)
def test_values_of_an_axis(text, values):
    points = read_axis(text, SYSTEM, points=3).values
    assert list(points) == (pytest.approx(values) if isinstance(values[0], float) else [1, 3, 8] if text.startswith("plan") else values)


def test_whole_numbers_double_where_their_number_is_not_given():
    assert read_axis("plan.tp=1..8", SYSTEM).values == (1, 2, 4, 8)
    assert read_axis("job.seq_len=1k..6k", SYSTEM).values == (1024, 2048, 4096, 6144)
    assert read_axis("technology.memory.stacks=2..6", MADE).values == (2, 4, 6)


def test_an_axis_changes_its_field_and_no_other():
    for name, field in hardware_axes(SYSTEM).items():
        value = field.get(SYSTEM)
        other = changed(SYSTEM, {name: value * 2})
        assert field.get(other) == value * 2, name
        related = {name, "chip.peak_flop_rate"} if "peak" in name else {name}
        for axis_name, kept in hardware_axes(SYSTEM).items():
            if axis_name not in related and not (name == "chip.peak_flop_rate" and "peak" in axis_name):
                assert kept.get(other) == kept.get(SYSTEM), (name, axis_name)


def test_technology_is_applied_before_the_chip():
    bandwidth = changed(MADE, {"chip.memory.bandwidth": 9e12, "technology.logic": "n5"})
    assert bandwidth.cluster.chip.memory.bandwidth == 9e12
    assert bandwidth.cluster.chip.units.compute_units > MADE.cluster.chip.units.compute_units
    other = changed(MADE, {"technology.memory": "hbm3"})
    assert other.cluster.chip.memory.bandwidth == pytest.approx(5 * 1024 * 6.4e9 / 8)
    assert other.cluster.num_chips == 8


def test_every_axis_can_be_read():
    for system in (SYSTEM, MADE, SERVICE):
        for field in axes_of(system).values():
            field.get(system)


@pytest.mark.parametrize(
    ("cluster", "kinds"),
    [
        ("8@dgx-h100+8@dgx-a100+8@dgx-h100", {"h100": (0, 2), "a100": (1,)}),
        ("8@h100-pcie+8@h100-sxm-80gb", {"h100-pcie": (0,), "h100-sxm": (1,)}),
        ("8@dgx-h100+8@dgx-h100*80%", {"pool1": (0,), "pool2": (1,)}),
        ("4@l4 scale-out=50 Gbit/s+4@l4 scale-out=25 Gbit/s", {"pool1": (0,), "pool2": (1,)}),
    ],
)
def test_an_axis_of_a_mixed_cluster_changes_the_pools_of_its_kind_alone(cluster, kinds):
    system = system_of(replace(TRAINING, cluster=cluster, chips=None, global_batch=48), Knobs(), Service())
    axes = hardware_axes(system)
    assert {name.split(".")[1] for name in axes} == set(kinds)
    for name, field in axes.items():
        value = field.get(system)
        pools = changed(system, {name: value * 2}).cluster.pools
        of_kind = kinds[name.split(".")[1]]
        assert all((pool == before) is (i not in of_kind) for i, (pool, before) in enumerate(zip(pools, system.cluster.pools, strict=True)))


def test_an_axis_of_a_mixed_cluster_takes_any_beginning_of_the_chips_name():
    system = system_of(replace(TRAINING, cluster="8@dgx-h100+8@dgx-a100", chips=None), Knobs(), Service())
    for name in ("h100", "h100-sxm", "h100-sxm-80gb"):
        axis = read_axis(f"chip.{name}.memory.bandwidth=x1,x2", system)
        assert (axis.name, axis.values) == ("chip.h100.memory.bandwidth", (3.35e12, 6.7e12))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("chip.memory.bandwith=1TB/s", "^chip.memory.bandwith: is no axis; did you mean 'chip.memory.bandwidth'"),
        ("chip.memory.bandwidth", "^chip.memory.bandwidth: has no values; write chip.memory.bandwidth=a,b,c"),
        ("chip.memory.bandwidth=4..1TB/s", "must be two positive numbers, the smaller first"),
        ("chip.memory.bandwidth=fast", "^chip.memory.bandwidth='fast': must be a number and a unit"),
        (
            "technology.logic=n5",
            "^technology.logic: the chip is not made from technology; give --chip with a specification, such as",
        ),
        ("job.precision=a..b", "must be two positive numbers"),
    ],
)
def test_bad_axes_are_refused_in_one_sentence(text, sentence):
    with pytest.raises(InputError, match=sentence):
        read_axis(text, SYSTEM)
