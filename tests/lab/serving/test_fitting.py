"""Fits of engines, on a toy whose host times are known."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.serving.choices import Point, choice_figures
from lab.serving.engines import generic_engine, generic_text, todays_engines
from lab.serving.fitting import fit_engine, left_out_residuals, with_ranges
from lab.serving.residuals import ServingResidual, factors
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.engine import fitted_numbers, list_engines, load_engine
from perfmodel.parallel.interval import ServingBasis, interval_factors, intervals_of
from perfmodel.parallel.serving_prediction import Spread
from perfmodel.validation.cases import parse_case
from perfmodel.validation.run_labels import RunLabels
from perfmodel.validation.validate import metrics_of, serving_row
from tests.validation.serving_cases import LLAMA, changed, stand_in

TRUE = {"step_time": 4e-3, "sequence_time": 60e-6}


def toy(row, engine):
    """The stand-in, with the host's times in each step."""
    base = stand_in(row.planned)
    job = row.planned.job
    step = base.decode_step + engine.host.step_time + engine.host.sequence_time * job.concurrency
    latency = base.ttft.mean + (job.output_len.mean - 1) * step
    return replace(base, tpot=Spread(mean=step), request_latency=Spread(mean=latency))


@pytest.fixture(scope="module")
def rows():
    import json

    truth = load_engine("vllm-2024").having(**TRUE)
    runs = []
    for model in (LLAMA, {**LLAMA, "name": "deep", "layers": 64}):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            case = changed(id=f"{model['name']}-{batch}", model=model, batch=batch, framework="vLLM", kind="static_batch", tp=1, chips=1)
            row = serving_row(parse_case(json.dumps(case), 1), stand_in)
            measured = metrics_of(row.planned, toy(row, truth))
            latency = {"request_latency": measured["request_latency"]}
            runs.append(replace(row, case=replace(row.case, measurements=latency)))
    return runs


def test_a_fit_finds_the_times_that_the_runs_were_made_with(rows):
    fit = fit_engine(load_engine("vllm-2024"), rows, toy)
    for name, value in TRUE.items():
        assert fit.numbers()[name] == pytest.approx(value, rel=0.08)
    residuals, others = left_out_residuals(fit, "model", {})
    assert np.abs(residuals).max() < 0.15
    assert all(constant.low <= constant.value <= constant.high for constant in with_ranges(fit, others))
    assert fit_engine(load_engine("vllm-2024"), rows[:3], toy) is None


def test_a_choice_is_judged_by_what_was_measured():
    def point(predicted, measured, rate, chips):
        return Point(group="g", predicted_tpot=predicted, predicted_rate=rate, measured_tpot=measured, measured_rate=rate, chips=chips)

    points = [point(0.005, 0.005, 10, 8), point(0.009, 0.009, 20, 8), point(0.009, 0.012, 30, 4), point(0.05, 0.05, 40, 4)]
    figures = choice_figures(points, limits=(0.010, 0.020))
    assert (figures.num_cases, figures.broken, figures.mean_regret) == (2, 0.5, 0.0)
    assert choice_figures(points, limits=(0.010,), margin=0.2).broken == 0.0
    late = choice_figures([replace(point, predicted_tpot=2 * point.predicted_tpot) for point in points], limits=(0.020,))
    assert late.mean_regret == 0.0
    assert late.median_point == pytest.approx(1 / 3)


def test_intervals_are_quantiles_of_the_narrowest_set_with_enough_figures():
    basis = ServingBasis(engine_known=True, chip_measured=True, has_experts=False)
    labels = type("Row", (), {"labels": RunLabels(source="s", model="m", engine="e")})()
    values = np.linspace(-0.5, 0.5, 101)
    some = [ServingResidual(basis=basis, metric="tpot", row=labels, value=float(value)) for value in values]
    low, high, number = factors(some, basis, "tpot")
    assert (math.log(low), math.log(high), number) == (pytest.approx(-0.4, abs=0.01), pytest.approx(0.4, abs=0.01), 101)
    assert factors(some, replace(basis, has_experts=True), "tpot") == (low, high, number)  # the next wider set
    assert factors(some[:5], basis, "tpot") is None


def test_what_ships_is_what_the_command_writes():
    """The mean of today's engines; a fitted number of each, within its range, where runs tell it."""
    shipped = (resource_dir("strategies") / "engines" / "generic.yaml").read_text(encoding="utf-8")
    assert shipped == generic_text(generic_engine(todays_engines()))
    for name, numbers in fitted_numbers().items():
        assert name in list_engines()
        assert all(load_engine(name).option(number) > 0 for number in numbers)


def test_a_prediction_has_the_interval_of_its_basis():
    known, unknown = (ServingBasis(engine_known=known, chip_measured=True, has_experts=False) for known in (True, False))
    low, high = intervals_of(known, {"tpot": 10.0})["tpot"]
    assert low < 10.0 < high
    wide, narrow = (interval_factors(estimate)["ttft"] for estimate in (unknown, known))
    assert wide[1] / wide[0] > narrow[1] / narrow[0]


def test_an_engine_is_its_base_but_for_what_it_says(tmp_path: Path) -> None:
    """An engine takes the defaults of its base, not the figures of its base's runs."""
    eager, new = load_engine("vllm-2024-eager"), load_engine("vllm-2024-mi300x")
    assert (
        (eager.kernels.shares_key_values, eager.kernels.tunes_products)
        == (new.kernels.shares_key_values, True)
        == (False, not new.kernels.tunes_products)
    )
    assert eager.kernels.few_rows_fraction == 1.0 > new.kernels.few_rows_fraction
    path = tmp_path / "own.yaml"
    path.write_text("base: vllm\nname: own\nmax_batch: 7\n")
    assert (load_engine(path).scheduling.max_batch, load_engine(path).scheduling.max_tokens) == (
        7,
        load_engine("vllm").scheduling.max_tokens,
    )
    path.write_text("base: vlm\nname: own\n")
    with pytest.raises(InputError, match=r"base=vlm: is no engine.*vllm"):
        load_engine(path)
