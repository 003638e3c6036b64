"""Predicted against measured, as people read it and as JSON."""

import json
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.cli import app as cli
from perfmodel.parallel.plan_file import write_plan
from perfmodel.parallel.results import CollectiveCount, Comparison, Measurement
from perfmodel.report.runs import collectives_table, comparison_object, demo_table, measurement_facts, predicted_and_measured


@pytest.fixture
def comparison():
    prediction = perfmodel.predict(
        model="gpt2", cluster="localhost", chips=2, global_batch=4, seq_len=64, precision="fp32", calibration="spec-sheet"
    )
    measurement = Measurement(
        plan=prediction.plan,
        plan_hash=prediction.plan.hash(),
        chip="a CPU",
        software={"torch": "2.13"},
        num_ranks=2,
        device="cpu",
        warmup=1,
        steps=1,
        step_times=(2 * prediction.step_time,),
        step_time=2 * prediction.step_time,
        step_time_spread=0.0,
        parts={"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "communication.dp_replicate": 0.1},
        peak_memory=prediction.memory["total"] / 2,
        memory_by_rank=(1.0, 2.0),
        collectives=(CollectiveCount(kind="all_reduce", axis="dp_replicate", count=3, num_bytes=1e6),),
        loss=1.0,
        gradient_error=float("nan"),
    )
    return Comparison(prediction=prediction, measurement=measurement)


def test_errors_are_shares_of_what_was_measured(comparison):
    assert comparison.time_error == pytest.approx(-0.5)
    assert comparison.memory_error == pytest.approx(1.0)
    rows = {row[0].strip(): row for row in predicted_and_measured(comparison).rows}
    assert rows["step time"][3] == "-50.0%"
    assert rows["memory of the fullest rank"][3] == "+100.0%"
    assert rows["communication dp replicate"][1] == ""


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_run_that_cannot_be_saved_is_shown_and_a_busy_machine_is_reported(form, comparison, tmp_path, capfd, monkeypatch):
    busy = replace(comparison, measurement=replace(comparison.measurement, busy_fraction=0.4))
    monkeypatch.setattr("perfmodel.verbs.api.run_plan", lambda *_, **__: busy)
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"\xff")
    write_plan(comparison.prediction.plan, tmp_path / "plan.yaml")
    assert cli.run(["run", str(tmp_path / "plan.yaml"), "--save", str(path), *form]) == 2
    out, err = capfd.readouterr()
    assert "gpt2" in out
    assert "40%" in out or json.loads(out)["measurement"]["busy_fraction"] == 0.4
    assert str(path) in err
    assert path.read_bytes() == b"\xff"


def test_json_has_both_and_no_nan(comparison):
    content = json.loads(json.dumps(comparison_object(comparison), allow_nan=False))
    assert content["time_error"] == pytest.approx(-0.5)
    assert content["measurement"]["gradient_error"] is None
    assert content["prediction"]["step_time"] * 2 == pytest.approx(content["measurement"]["step_time"])


def test_what_was_run_is_named(comparison):
    facts = dict(measurement_facts(comparison))
    assert "2 processes of a CPU" in facts["ran on"]
    assert facts["gradients"].startswith("not checked")
    assert collectives_table(comparison.measurement).rows == (("all reduce", "dp_replicate", "3", "1 MB"),)


def test_ties_share_places(comparison):
    (row,) = demo_table([("data parallel", comparison, (1, 1), (1, 3))]).rows
    assert row[4:6] == ("1", "1-3")


def test_a_run_on_a_machine_that_was_not_calibrated_says_so_first(comparison):
    (name, text), (_, remedy) = measurement_facts(comparison)[:2]
    assert name == "not calibrated"
    assert "based on a spec sheet" in text
    assert "run `perfmodel calibrate`" in remedy
