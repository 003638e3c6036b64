"""Intervals from residuals: they hold what they should, and widen where less is known."""

import math
import random
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import list_profiles
from perfmodel.parallel.interval import NORMAL, StepInterval
from perfmodel.uncertainty.residuals import (
    ModelResiduals,
    Residuals,
    RunFeatures,
    UnseenResiduals,
    interval,
    load_residuals,
    scale_of,
    shape_of,
    unseen_interval,
    with_experts,
)
from perfmodel.uncertainty.run_features import features_of
from perfmodel.workload.models import load_model


def model_of(values, *, model="m", family="f", chip="c", scale="one node", bits=16):
    runs = dict(num_runs=len(values), quantiles=tuple(sorted(values)))
    return ModelResiduals(family=family, model=model, chip=chip, scale=scale, bits=bits, **runs)


UNSEEN = tuple(
    UnseenResiduals(group=name, family=name, num_runs=5, quantiles=tuple(centre + i / 10 for i in range(-6, 7)))
    for name, centre in (("f", 0.0), ("g", 0.1), ("h", -0.1))
)


def residuals_of(*models, **scatter):
    values = dict(between_models=0.0, between_chips=0.04, between_calibrations=0.1, unseen_frameworks=UNSEEN) | scatter
    return Residuals(source="s", date="d", num_runs=sum(model.num_runs for model in models), models=models, **values)


UNIFORM = [i / 100 for i in range(-50, 51)]


def bounds_of(residuals, *, chip="c", scale="one node", bits=16, rare=(), **values):
    features = RunFeatures(chip=chip, scale=scale, bits=bits, rare=frozenset(rare))
    return interval(residuals, features, **(dict(family="f") | values))


def test_many_runs_give_their_own_quantiles():
    bounds = bounds_of(residuals_of(model_of(UNIFORM)))
    assert (math.log(bounds.low), math.log(bounds.high)) == pytest.approx((-0.4, 0.4), abs=0.015)
    assert bounds.num_runs == 101


def test_a_further_run_lies_in_the_interval_of_few_four_times_of_five():
    """Twenty runs of a heavy-tailed distribution, and one more; unseen frameworks are spread alike."""
    source = random.Random(5)
    alike = sorted(source.gauss(0.0, 0.05) + 0.2 * (source.random() < 0.1) for _ in range(300))
    unseen = (UnseenResiduals(group="f", family="f", num_runs=300, quantiles=tuple(alike)),)
    held = 0
    for _ in range(2000):
        *seen, new = [source.gauss(0.0, 0.05) + 0.2 * (source.random() < 0.1) for _ in range(21)]
        bounds = bounds_of(residuals_of(model_of(seen), unseen_frameworks=unseen))
        held += math.log(bounds.low) <= new <= math.log(bounds.high)
    assert held / 2000 == pytest.approx(0.8, abs=0.03)


def test_a_model_counts_by_its_runs_however_few_quantiles_it_keeps():
    many = replace(model_of([i / 100 for i in range(-10, 10)]), num_runs=100)
    few = model_of([1.0] * 5, model="other")
    assert math.log(bounds_of(residuals_of(many, few)).high) < 0.2


@pytest.mark.parametrize(
    "wider",
    [
        dict(chip="other"),
        dict(chip="other", uncalibrated="no calibration of its own"),
        dict(is_usual=False),
    ],
)
def test_what_has_no_runs_is_wider(wider):
    residuals = residuals_of(model_of(UNIFORM))
    base, more = bounds_of(residuals), bounds_of(residuals, **wider)
    assert more.low < base.low
    assert more.high > base.high
    assert "widened" in more.rests_on
    assert "widened" not in base.rests_on


def test_an_unseen_framework_gets_the_spread_of_all_groups_each_weighing_one():
    residuals = residuals_of(model_of(UNIFORM))
    bounds = bounds_of(residuals, borrows=True)
    assert bounds == bounds_of(residuals, family="nobody")
    assert (bounds.low, bounds.high) == unseen_interval(UNSEEN)
    assert bounds.rests_on == "15 runs of 3 frameworks, each left out of the fit"
    crowded = (*UNSEEN[:2], replace(UNSEEN[2], num_runs=10_000))
    assert unseen_interval(crowded) == unseen_interval(UNSEEN)
    assert unseen_interval(UNSEEN, without="g")[1] < bounds.high
    assert bounds_of(residuals, borrows=True, chip="other").high > bounds.high
    with pytest.raises(InputError, match="no runs of unseen frameworks"):
        unseen_interval(())


def test_a_plan_that_depends_on_defaults_more_than_those_runs_is_wider_on_that_side():
    hanging = tuple(replace(model, open=(0.01, 0.02)) for model in UNSEEN)
    base = unseen_interval(UNSEEN)
    assert unseen_interval(hanging, open_behaviours=(0.01, 0.02)) == pytest.approx(base)
    low, high = unseen_interval(hanging, open_behaviours=(0.0, 0.02 + 0.3**2))
    assert low == pytest.approx(base[0])
    assert math.log(high) == pytest.approx(math.hypot(math.log(base[1]), NORMAL * 0.3))
    residuals = replace(residuals_of(model_of(UNIFORM)), unseen_frameworks=hanging)
    assert "widened: this step hangs more than theirs" in bounds_of(residuals, borrows=True, open_behaviours=(0.2, 0.0)).rests_on
    assert bounds_of(residuals, open_behaviours=(0.2, 0.0)) == bounds_of(residuals)  # of a framework with runs of its own


def test_a_further_group_lies_in_the_interval_of_few_four_times_of_five():
    """Ten groups, each about a place of its own, and one run of one more."""
    source = random.Random(6)
    held = 0
    for _ in range(1000):
        *centres, new = [source.gauss(0.0, 0.1) for _ in range(11)]
        groups = [
            UnseenResiduals(group=str(i), family=str(i), num_runs=9, quantiles=tuple(sorted(source.gauss(at, 0.05) for _ in range(9))))
            for i, at in enumerate(centres)
        ]
        low, high = unseen_interval(groups)
        held += math.log(low) <= source.gauss(new, 0.05) <= math.log(high)
    assert held / 1000 == pytest.approx(0.8, abs=0.04)


def test_a_chip_without_a_calibration_is_wider_than_one_with():
    residuals = residuals_of(model_of(UNIFORM))
    assert bounds_of(residuals, chip="x", uncalibrated="no calibration of its own").high > bounds_of(residuals, chip="x").high


def test_few_models_are_wider_than_many():
    one = residuals_of(model_of(UNIFORM), between_models=0.1)
    four = residuals_of(*(model_of(UNIFORM, model=name) for name in "abcd"), between_models=0.1)
    assert bounds_of(one).high > bounds_of(four).high > bounds_of(residuals_of(model_of(UNIFORM))).high


def test_few_runs_have_nearly_the_interval_of_an_unseen_framework():
    """Three runs cannot give -1/+5 %: the spread of unseen frameworks counts as three more."""
    exact = bounds_of(residuals_of(model_of([0.0] * 3)))
    unseen = unseen_interval(UNSEEN)
    assert math.log(exact.high) == pytest.approx(math.log(unseen[1]) / math.sqrt(2.0))
    assert "only 3 runs" in exact.rests_on
    many = bounds_of(residuals_of(model_of([0.0] * 300)))
    assert math.log(many.high) == pytest.approx(math.log(unseen[1]) / math.sqrt(101.0))
    assert "only" not in many.rests_on


def test_runs_with_products_of_equal_bits_are_taken_where_they_are_enough():
    residuals = residuals_of(model_of(UNIFORM), model_of([0.5 + value for value in UNIFORM], bits=8))
    assert bounds_of(residuals, bits=8).high > bounds_of(residuals).high + 0.5
    assert "in 8 bits" in bounds_of(residuals, bits=8).rests_on


def test_what_no_run_has_widens_the_interval_and_is_named():
    residuals = residuals_of(model_of(UNIFORM), features=(("adapters", 0.2), ("8-bit products", 0.4)))
    base = bounds_of(residuals)
    adapters = bounds_of(residuals, rare=["adapters"])
    assert math.log(adapters.high) == pytest.approx(math.hypot(math.log(base.high), NORMAL * 0.2))
    assert "none with adapters" in adapters.rests_on
    assert math.log(bounds_of(residuals, bits=8).high) == pytest.approx(math.hypot(math.log(base.high), NORMAL * 0.4))
    states = bounds_of(residuals, rare=["state-space layers"])  # no published run: as far as the others were off
    assert math.log(states.high) == pytest.approx(math.hypot(math.log(base.high), NORMAL * math.sqrt((0.2**2 + 0.4**2) / 2)))
    assert bounds_of(residuals, rare=["adapters"], borrows=True).high > bounds_of(residuals, borrows=True).high


@pytest.mark.parametrize(
    "model, feature",
    [("nemotron-h-8b", "state-space layers"), ("gemma-3-27b", "sliding windows"), ("deepseek-v3", "latent attention")],
)
def test_a_model_of_a_kind_that_no_framework_has_runs_of_has_a_wider_interval(model, feature):
    job = dict(cluster="dgx-h100", chips=64, global_batch=64, profile="megatron")
    kind = perfmodel.predict(model=model, seq_len="8k", **job)
    assert feature in features_of(kind.plan, "h100-sxm-80gb").rare
    assert features_of(perfmodel.predict(model="llama-3.1-8b", seq_len="8k", **job).plan, "c").rare == frozenset()
    assert features_of(perfmodel.predict(model="llama-3.1-8b", seq_len="64k", train="lora:16", **job).plan, "c").rare == {
        "adapters",
        "long sequences",
    }


def test_the_runs_of_an_unseen_model_are_not_looked_at():
    residuals = residuals_of(model_of(UNIFORM), model_of([5.0] * 50, model="own"))
    assert bounds_of(residuals, unseen="own").high == bounds_of(residuals_of(model_of(UNIFORM))).high


def test_a_scale_with_too_few_runs_takes_the_family():
    residuals = residuals_of(model_of(UNIFORM), model_of([3.0, 3.1], scale="many nodes"))
    few = bounds_of(residuals, scale="many nodes")
    assert few.num_runs == 103
    assert "on many nodes" not in few.rests_on
    assert "on one node" in bounds_of(residuals).rests_on


def test_an_interval_holds_the_prediction():
    bounds = bounds_of(residuals_of(model_of([0.1 + i / 1000 for i in range(50)])))
    assert bounds.low == 1.0
    assert bounds.high > 1.1


def test_the_shipped_residuals_are_read_and_cover_the_profiles():
    residuals = load_residuals()
    assert residuals.source
    assert residuals.date
    assert residuals.num_runs == sum(model.num_runs for model in residuals.models) > 700
    assert all(len(model.quantiles) == min(model.num_runs, 20) for model in residuals.models)
    assert {model.family for model in residuals.models} <= set(list_profiles())
    bounds = interval(residuals, RunFeatures(chip="h100-sxm-80gb", scale="several nodes"), family="nanotron")
    assert 0.7 < bounds.low < 1.0 < bounds.high < 1.4


@pytest.mark.parametrize("text", ["", "a: [", "families: {f: [{model: m}]}", "[]"])
def test_a_broken_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "residuals.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"residuals=.*cannot be read"):
        load_residuals(path)


def test_scales_and_shapes():
    assert [scale_of(chips) for chips in (1, 8, 9, 64, 65, 4096)] == [
        "one node", "one node", "several nodes", "several nodes", "many nodes", "many nodes",
    ]  # fmt: skip
    assert shape_of(load_model("llama-3-8b")) == shape_of(load_model("llama-3.1-8b")) != shape_of(load_model("llama-3-70b"))


def test_models_with_experts_are_known_no_better_than_their_runs():
    """The shipped runs of such models lie further off than those of dense ones: whatever else is known, the interval is as wide."""
    residuals = load_residuals()
    dense = StepInterval(low=0.99, high=1.01, rests_on="runs", num_runs=3)
    bounds = with_experts(dense, residuals.experts)
    assert (bounds.low, bounds.high) == unseen_interval(residuals.experts)
    assert bounds.low < dense.low
    assert bounds.high > 1.1
    assert f"{sum(model.num_runs for model in residuals.experts)} runs of models with experts" in bounds.rests_on
    wide = StepInterval(low=0.1, high=9.0, rests_on="runs", num_runs=3)
    assert (with_experts(wide, residuals.experts).low, with_experts(wide, residuals.experts).high) == (0.1, 9.0)
    assert with_experts(dense, ()) is dense
