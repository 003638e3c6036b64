"""An unmeasured chip is predicted by the mean of its vendor's neighbouring generations."""

import math
from dataclasses import fields, replace

import pytest

from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SCALE_UP, SPEC_SHEET, Provenance
from perfmodel.hardware.prior import generations, neighbours, other_generations, prior_calibration
from perfmodel.hardware.reader import load_calibration, load_chip, load_cluster

CHIPS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb", "b200": "b200-180gb"}


def known(*names):
    return [(load_calibration(name), load_chip(CHIPS[name])) for name in names]


def names(priors):
    return [calibration.name for calibration, _ in priors]


def test_the_nearest_generations_before_and_after_are_neighbours():
    assert names(neighbours(load_chip(CHIPS["h100"]), known("b200", "a100"))) == ["a100", "b200"]
    assert names(neighbours(load_chip(CHIPS["a100"]), known("b200", "h100"))) == ["h100"]
    assert names(neighbours(load_chip(CHIPS["b200"]), known("a100", "h100"))) == ["h100"]


def test_collectives_are_the_mean_of_every_generation():
    pairs = known("a100", "h100", "h200")
    chip = load_chip(CHIPS["b200"])
    assert sorted(names(generations(chip, pairs))) == ["a100", "h200"]  # H100 and H200 compute alike; the later one is nearer
    prior = prior_calibration(chip, pairs)
    bases = [calibration.kernels.collectives[SCALE_UP][CollectiveKind.ALL_GATHER].base_time for calibration, _ in generations(chip, pairs)]
    assert prior.kernels.collectives[SCALE_UP][CollectiveKind.ALL_GATHER].base_time == pytest.approx((bases[0] * bases[1]) ** 0.5)


def test_a_chip_is_no_neighbour_of_itself():
    assert names(neighbours(load_chip(CHIPS["a100"]), known("a100"))) == []
    assert prior_calibration(load_chip(CHIPS["a100"]), known("a100")) is None


def test_another_vendor_is_no_neighbour():
    assert prior_calibration(load_chip("mi300x-192gb"), known("a100", "h100", "b200")) is None


def test_parameters_are_means_and_the_prediction_is_based_on_a_prior():
    pairs = known("a100", "b200")
    prior = prior_calibration(load_chip(CHIPS["h100"]), pairs)
    ends = [calibration.kernels.matmul[Dtype.BF16].peak_fraction for calibration, _ in pairs]
    assert prior.kernels.matmul[Dtype.BF16].peak_fraction == pytest.approx((ends[0] * ends[1]) ** 0.5)
    hops = [calibration.kernels.collectives[SCALE_UP][CollectiveKind.ALL_REDUCE].hop_time for calibration, _ in pairs]
    assert min(hops) < prior.kernels.collectives[SCALE_UP][CollectiveKind.ALL_REDUCE].hop_time < max(hops)
    assert prior.provenance is Provenance.PRIOR
    machine = resolve_machine(load_cluster("dgx-h100"), prior)
    assert machine.basis.parts["matmul"] == "prior: mean of a100 and b200"


def test_a_mean_with_zero_is_the_plain_one():
    pairs = known("a100", "b200")
    calibration, chip = pairs[0]
    models = {dtype: replace(model, wave_softness=0.0) for dtype, model in calibration.kernels.matmul.items()}
    other = pairs[1][0].kernels.matmul[Dtype.BF16].wave_softness
    even = replace(calibration, kernels=replace(calibration.kernels, matmul=models))
    prior = prior_calibration(load_chip(CHIPS["h100"]), [(even, chip), pairs[1]])
    assert prior.kernels.matmul[Dtype.BF16].wave_softness == pytest.approx(other / 2)


def test_softmax_keeps_its_time_on_a_compute_unit():
    """As head dims it grows with the FLOP rate of a unit, so that offset / rate of a unit stays."""
    (calibration, source), target = known("h100")[0], load_chip(CHIPS["b200"])
    prior = prior_calibration(target, [(calibration, source)])
    times = [
        model.kernels.attention["flash"].head_dim_offset / (chip.flop_rate(Dtype.BF16) / chip.units.compute_units)
        for model, chip in ((calibration, source), (prior, target))
    ]
    assert times[0] == pytest.approx(times[1])


def test_between_two_equal_calibrations_the_prior_equals_them():
    """Chips with the same compute units and the same power for their peak, too."""
    (calibration, chip), *_ = known("a100")
    twins = [(replace(calibration, name=name), slower(chip, name, launch_year)) for name, launch_year in (("old", 2018), ("new", 2024))]
    prior = prior_calibration(chip, twins)
    assert prior.name == "mean of old and new"
    for part in ("matmul", "streaming", "attention"):
        assert numbers(getattr(prior.kernels, part)) == pytest.approx(numbers(getattr(calibration.kernels, part)), rel=1e-12)
    assert numbers(prior.kernels.collectives[SCALE_UP]) == pytest.approx(numbers(calibration.kernels.collectives[SCALE_UP]), rel=1e-12)
    assert prior.sustained.sustained_clock_fraction == pytest.approx(calibration.sustained.sustained_clock_fraction)
    assert prior.memory.context_bytes == pytest.approx(calibration.memory.context_bytes)


def slower(chip, name, launch_year):
    """Half the units at half the power: another generation, whose units and watts are the same."""
    share = {2018: 2, 2024: 4}[launch_year]
    rates = {dtype: rate / share for dtype, rate in chip.peak_flop_rate.items()}
    units = replace(chip.units, compute_units=chip.units.compute_units // share)
    return replace(chip, name=name, launch_year=launch_year, peak_flop_rate=rates, units=units, tdp_watts=chip.tdp_watts / share)


def numbers(value):
    """Every number of a record or mapping, in its order."""
    if isinstance(value, (int, float)):
        return [float(value)]
    items = value.values() if hasattr(value, "values") else [getattr(value, field.name) for field in fields(value)]
    return [number for item in items if not isinstance(item, tuple) for number in numbers(item)]


@pytest.mark.parametrize(("name", "others"), [("a100", ("h100", "b200")), ("h100", ("a100", "b200")), ("b200", ("a100", "h100"))])
def test_the_clock_of_a_chip_left_out_follows_its_power(name, others):
    """Within 10 %; the plain mean of its neighbours' clocks misses the A100's by 24 %."""
    fraction = prior_calibration(load_chip(CHIPS[name]), known(*others)).sustained.sustained_clock_fraction
    assert fraction == pytest.approx(load_calibration(name).sustained.sustained_clock_fraction, rel=0.1)


def test_no_clock_exceeds_the_data_sheets():
    chip = replace(load_chip(CHIPS["h100"]), tdp_watts=1e4)
    assert prior_calibration(chip, known("a100", "b200")).sustained.sustained_clock_fraction == 1.0


def test_a_chip_without_matrix_units_has_no_neighbours():
    assert neighbours(load_chip("gtx1080ti-11gb"), known("a100", "h100", "b200")) == []
    assert names(neighbours(load_chip("rtx2080ti-11gb"), known("a100", "h100", "b200"))) == ["a100"]


def test_a_measured_sister_is_the_only_neighbour():
    sister = replace(load_chip(CHIPS["h100"]), name="sister", launch_year=2024)
    pairs = known("a100", "h100", "h200", "b200")
    assert names(neighbours(sister, pairs)) == ["h200"]
    assert names(generations(sister, pairs)) == ["h200"]
    assert names(other_generations(sister, pairs)) == ["a100", "b200"]


def test_a_dtype_that_one_neighbour_has_is_carried():
    assert Dtype.FP8 not in load_calibration("a100").kernels.matmul
    prior = prior_calibration(load_chip(CHIPS["h100"]), known("a100", "b200"))
    assert prior.kernels.matmul[Dtype.FP8] == load_calibration("b200").kernels.matmul[Dtype.FP8]


#: Best matrix multiply of the MAMF table (Bekman, Machine Learning Engineering, stas00/ml-engineering @744d01e), as a share of the peak.
BEST_SHAPE = {"a100": 0.87, "h100": 0.80, "b200": 0.78}


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi355x", "gaudi2", "gaudi3", ""])
def test_a_chip_known_by_its_best_shape_has_the_discount_of_the_chips_with_tables(name):
    shares = []
    for chip, best in BEST_SHAPE.items():
        calibration = load_calibration(chip)
        shares.append(calibration.kernels.matmul[Dtype.BF16].peak_fraction * calibration.sustained.sustained_clock_fraction / best)
    discount = math.prod(shares) ** (1 / len(shares))
    calibration = load_calibration(name) if name else SPEC_SHEET
    assert calibration.sustained.sustained_clock_fraction == pytest.approx(discount, abs=0.002)


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi355x", "gaudi2", "gaudi3"])
def test_attention_falls_short_of_a_data_sheet_as_the_best_matrix_multiply_does(name):
    measured, typical = load_calibration(name).kernels, SPEC_SHEET.kernels
    ratio = measured.matmul[Dtype.BF16].peak_fraction / typical.matmul[Dtype.BF16].peak_fraction
    assert measured.attention["flash"].peak_fraction == pytest.approx(typical.attention["flash"].peak_fraction * ratio, abs=0.001)
