"""`perfmodel predict --interval`: the interval and the most sensitive parameters."""

import csv
import io

import pytest

from tests.cli.conftest import JOB


def test_the_interval_and_three_parameters_are_printed(call):
    code, out, err = call("predict", *JOB, "--tp", 2, "--interval")
    assert (code, err) == (0, "")
    assert "80% interval" in out
    assert "Most sensitive parameters: step time with each 10% larger" in out
    assert "rate of matrix multiplies (sustained clock)" in out


def test_the_object_has_the_bounds_around_the_step(call_json):
    prediction = call_json("predict", *JOB, "--tp", 2, "--interval")
    assert prediction["step_time_low"] < prediction["step_time"] < prediction["step_time_high"]
    assert prediction["interval"]["coverage"] == 0.8
    assert prediction["interval"]["num_runs"] > 0
    assert prediction["trust"]["grade"] == "framework unknown"
    assert prediction["interval"]["trust"] == "; ".join(prediction["trust"].values())
    assert len(prediction["sensitivities"]) == 3
    assert set(prediction["sensitivities"][0]) == {"parameter", "parameter_change", "step_time_change", "rests_on"}


def test_it_changes_nothing_else(call_json):
    plain, more = call_json("predict", *JOB), call_json("predict", *JOB, "--interval")
    assert {name: more[name] for name in plain} == plain
    assert "step_time_low" not in plain


def test_several_settings_have_an_interval_each(call, call_json):
    several = [*JOB[:4], "--chips", "64,128", *JOB[6:]]
    predictions = call_json("predict", *several, "--interval")["predictions"]
    assert all(prediction["step_time_low"] < prediction["step_time"] < prediction["step_time_high"] for prediction in predictions)
    assert "80% interval" in call("predict", *several, "--interval")[1]


def test_a_plan_file_has_one_too(call_json):
    assert call_json("predict", "megatron-22b", "--interval")["step_time_low"] > 0


@pytest.mark.parametrize(
    ("profile", "cluster"), [("llm-c", "tpu-v5p"), ("xla", "gb200-nvl72"), ("megatron", "pcie-workstation"), ("megatron", "mi300x")]
)
def test_less_known_is_wider(call_json, profile, cluster):
    def width(*flags):
        prediction = call_json("predict", *JOB[:2], "--cluster", *flags, *JOB[4:], "--interval")
        return prediction["step_time_high"] / prediction["step_time_low"]

    assert width(cluster, "--profile", profile) > width("dgx-a100", "--profile", "megatron")


def test_it_says_that_a_prior_is_no_calibration_of_the_chip(call_json):
    prediction = call_json("predict", *JOB[:2], "--cluster", "pcie-workstation", *JOB[4:], "--interval")
    assert prediction["rests_on"]["forward"] == "prior: mean of h100 and b200"
    assert "none on rtx4090-24gb, which has no calibration of its own" in prediction["interval"]["rests_on"]


def test_a_partial_calibration_is_not_called_none(call_json):
    prediction = call_json("predict", *JOB[:2], "--cluster", "mi300x", *JOB[4:], "--interval")
    assert prediction["rests_on"]["forward"] == "partial calibration: mi300x"
    assert "none on mi300x-192gb, which has a partial calibration only" in prediction["interval"]["rests_on"]


def test_another_calibration_than_the_runs_had_is_wider(call_json):
    usual, other = (call_json("predict", *JOB, "--interval", *flags) for flags in ((), ("--calibration", "spec-sheet")))
    assert other["step_time_high"] / other["step_time_low"] > usual["step_time_high"] / usual["step_time_low"]
    assert "another calibration" in other["interval"]["rests_on"]


@pytest.mark.slow
def test_the_interval_is_in_tables_of_predictions_and_of_searches(call, call_json):
    job = ("--model", "gpt2", "--cluster", "dgx-h100", "--chips", 8, "--gbs", 64, "--seq", "1k")
    for verb in ("predict", "search"):
        code, out, _ = call(verb, *job, "--interval", "--csv", "-")
        assert code == 0
        for row in csv.DictReader(io.StringIO(out)):
            assert float(row["step_time_low"]) < float(row["step_time"]) < float(row["step_time_high"])
    assert "80% interval" in call("search", *job, "--interval")[1]
    for plan in call_json("search", *job, "--interval", "--top", 2)["plans"]:
        assert plan["step_time_low"] < plan["step_time"] < plan["step_time_high"]
