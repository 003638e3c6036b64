"""Models left out: no fit sees the model that it predicts, nor does one that lends it a constant; the table of the command."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from lab.accuracy_lines import EVERY
from lab.cases import read_runs
from lab.fitted import STEPS
from lab.left_out.fits import FITS, LeftOut, PredictedRun, with_prior
from lab.left_out.table import judge, main
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.options import RateOptions, TimingOptions
from perfmodel.frameworks.shipped import fitted_numbers
from perfmodel.validation.step_times import StepTimes
from perfmodel.validation.validate import CasePredictor
from tests.lab.published_steps import published
from tests.validation.published_cases import write


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read_runs(write(tmp_path_factory.mktemp("left_out") / "cases.jsonl", published("nanotron", "korthikanti", "simumax", "vtrain")))


def test_columns_are_single_plans_to_the_last_digit(runs):
    together = StepTimes(runs=runs).predict(range(len(runs)), {})
    predictor = CasePredictor()
    assert together.tolist() == [predictor.predict(run.planned).step_time for run in runs]


def test_lower_rates_and_a_slower_host_are_slower(runs):
    times = StepTimes(runs=runs)
    every = range(len(runs))
    shipped = times.predict(every, {})
    assert np.all(times.predict(every, {"matmul_rate_fraction": 0.5}) > shipped)
    assert np.all(times.predict(every, {"step_time_constant": 1.0}) > shipped)


def test_what_is_kept_is_as_what_is_made_anew(runs):
    """Columns of other constants are used again where these do not reach them."""
    runs = runs[::45]
    chosen, times = range(len(runs)), StepTimes(runs=runs)
    times.predict(chosen, {})
    for constant in (*RateOptions.__dataclass_fields__, *TimingOptions.__dataclass_fields__):
        values = {"matmul_rate_fraction": 0.6, constant: 2.0 if constant.endswith("_factor") else 0.5}
        assert times.predict(chosen, values).tolist() == StepTimes(runs=runs).predict(chosen, values).tolist(), constant


@pytest.mark.slow
def test_no_fit_sees_the_model_that_it_predicts(runs):
    """Whatever that model's steps had been, its predictions would be the same; also where a relative lends the constants."""
    runs = [run for run in runs if run.source in ("nanotron", "simumax")][::2]
    predictions = LeftOut.of_times(runs).predictions()
    assert len(predictions) == len(runs)
    for model in dict.fromkeys(run.model for run in runs):
        others = [run if run.model != model else replace(run, measured=3 * run.measured) for run in runs]
        moved = LeftOut.of_times(others)
        for name in FITS:
            assert not any(runs[index].model == model for index in moved.rows_of(name, without=model))
        of_model = {prediction.run.id: prediction for prediction in predictions if prediction.run.model == model}
        assert of_model
        assert all(model in prediction.fold for prediction in of_model.values())
        for name, fit in FITS.items():  # what `predictions` does for this model alone: the other models' fits are not asked for
            rows = [index for index, run in enumerate(runs) if run.model == model and run.profile in fit.profiles]
            again = moved.predictor.predict(rows, moved.fitted(name, without=model).values) if rows else ()
            assert [of_model.pop(runs[index].id).predicted for index in rows] == list(again)
        assert not of_model


def test_one_model_under_two_names_is_one(tmp_path):
    cases = published("nanotron")[:1]
    cases.append(cases[0] | {"id": "nanotron-again", "model": cases[0]["model"] | {"name": "another name", "vocab_size": 32000}})
    assert len({run.model for run in read_runs(write(tmp_path / "cases.jsonl", cases))}) == 1


def test_a_relative_lends_its_constant_within_bounds():
    constant = FITS["megatron"].constants[0].constant
    assert with_prior(constant, 4e-5).prior == 4e-5
    assert with_prior(constant, 7.0).prior == constant.upper


def test_every_relative_is_fitted_before_whoever_leans_on_it():
    names = list(FITS)
    for name, fit in FITS.items():
        assert all(names.index(relative) < names.index(name) for relatives in fit.lent.values() for relative in relatives)
        for item in fit.constants:
            if item.relative:
                assert names.index(item.relative) < names.index(name)
                assert item.constant.name in [constant.constant.name for constant in FITS[item.relative].constants]


def test_the_table_counts_its_lines(runs):
    times = StepTimes(runs=runs).predict(range(len(runs)), {})
    table = judge([PredictedRun(run=run, predicted=float(time), fold="shipped") for run, time in zip(runs, times, strict=True)])
    assert len(table.errors("Megatron-LM on A100, Korthikanti")) == 8
    counted = sum(len(errors) for line, errors in table.lines.items() if line.counts and line is not EVERY)
    assert len(table.lines[EVERY]) == counted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.csv", "rows.json"])
def test_the_command_prints_the_table_and_writes_every_run(name, tmp_path, capsys):
    cases = write(tmp_path / "cases.jsonl", published("korthikanti"))
    out = tmp_path / name
    assert main([str(cases), "--out", str(out), "--constants"]) == 0
    printed = capsys.readouterr().out
    assert "Megatron-LM on A100, Korthikanti" in printed
    assert "host_launch_time" in printed
    assert f"of {len(published('korthikanti')) - 1} runs" in printed  # the run of 8 replicas has a line of its own
    text = out.read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines())) if name.endswith("csv") else json.loads(text)
    assert len(rows) == len(published("korthikanti"))
    assert list(rows[0]) == ["id", "source", "model", "measured_step_time", "predicted_step_time", "fold"]


def test_bad_input_is_answered_with_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    cases = write(tmp_path / "cases.jsonl", published("korthikanti"))
    assert main([str(cases), "--out", str(tmp_path / "rows.txt")]) == 2
    assert "must end in .csv or .json" in capsys.readouterr().err
    assert main([str(cases), "--out", str(tmp_path / "no" / "rows.csv")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text('{"id": "x"}\n', encoding="utf-8")
    assert main([str(tmp_path / "empty.jsonl")]) == 2
    assert "no primary training run" in capsys.readouterr().err


def test_no_number_that_steps_tell_is_seen_by_the_fit_of_a_model_left_out():
    """Shipped numbers are fitted to every run; here each one is fitted, or lent by a fit, without that model."""
    for fit in FITS.values():
        fitted = {item.constant.name for item in fit.constants} | set(fit.lent)
        for profile in fit.profiles:
            assert {name for name, number in fitted_numbers(profile).items() if number.how.startswith(STEPS)} == fitted, profile
        for constant, relatives in fit.lent.items():
            assert all(constant in {item.constant.name for item in FITS[relative].constants} for relative in relatives)


def test_an_unknown_constant_is_refused(runs):
    with pytest.raises(InputError, match="constant=speed: no option of an execution profile"):
        StepTimes(runs=runs).predict([0], {"speed": 2.0})
