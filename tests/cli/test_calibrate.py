"""`perfmodel calibrate`: the next prediction of localhost is based on the measurement."""

from dataclasses import replace

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.reader import load_calibration

pytest.importorskip("torch")

JOB = ["--model", "gpt2", "--cluster", "localhost", "--chips", "2", "--global-batch", "4", "--seq-len", "64", "--precision", "fp32"]


@pytest.fixture
def measured(monkeypatch):
    """Replace the microbenchmarks, which take a minute, with another chip's figures under the name of this machine."""
    chip = local_cluster().chip.name
    calibration = replace(perfmodel.load_calibration("a100"), name=f"local-{chip}", chips=(chip,), relatives=())
    monkeypatch.setattr("perfmodel.execute.measure.machine.measure_machine", lambda *_, **__: None)
    monkeypatch.setattr("perfmodel.calibrate.fit_host.fit_measurement", lambda *_, **__: calibration)
    return calibration


def test_predictions_and_saved_plans_find_it(measured, call, call_json, home):
    assert call_json("predict", *JOB)["rests_on"]["forward"] == "spec sheet"
    code, out, err = call("calibrate")
    assert (code, err) == (0, "")
    path = home / ".local/share/perfmodel/calibrations" / f"{measured.name}.yaml"
    assert str(path) in out
    assert load_calibration(path) == measured
    prediction = call_json("predict", *JOB, "--save", "plan.yaml")
    assert prediction["plan"]["calibration"] == measured.name
    assert measured.name in prediction["rests_on"]["optimizer"]
    again = call_json("predict", "plan.yaml")
    free = ("memory_usable", "memory_spare", "memory_capacity", "fits_probability")  # of this machine at that moment
    assert {name: again[name] for name in again if name not in free} == {name: prediction[name] for name in prediction if name not in free}
    assert measured.name in call("calibrations")[1]


def test_it_can_be_kept_elsewhere(measured, call, call_json, home, tmp_path):
    assert call_json("calibrate", "--save", "mine.yaml")["path"] == "mine.yaml"
    assert not (home / ".local").exists()
    assert call_json("predict", *JOB)["rests_on"]["forward"] == "spec sheet"
    prediction = call_json("predict", *JOB, "--calibration", "mine.yaml")
    assert prediction["plan"]["calibration"] == str(tmp_path / "mine.yaml")


def test_the_folder_that_the_system_names_is_used(measured, call, call_json, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    call("calibrate")
    assert (tmp_path / "data/perfmodel/calibrations" / f"{measured.name}.yaml").exists()
    assert measured.name in call_json("predict", *JOB)["rests_on"]["optimizer"]


@pytest.mark.parametrize("arguments", [(), ("--save", "file/mine.yaml")])
def test_nothing_is_measured_that_cannot_be_saved(arguments, call, home, tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.execute.measure.machine.measure_machine", lambda *_, **__: pytest.fail("measured"))
    (home / ".local").write_text("a file")
    (tmp_path / "file").write_text("a file")
    code, out, err = call("calibrate", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_cannot_be_saved_after_all_is_shown(form, measured, call, monkeypatch):
    def full(*_):
        raise InputError("mine.yaml: cannot be written (No space left on device)")

    monkeypatch.setattr("perfmodel.hardware.writer.save_calibration", full)
    code, out, err = call("calibrate", *form)
    assert code == 2
    assert measured.name in out
    assert "No space left" in err


def test_a_busy_machine_is_reported_and_recorded(measured, call, call_json, home, monkeypatch):
    busy = replace(measured, fit=replace(measured.fit, busy_fraction=0.35))
    monkeypatch.setattr("perfmodel.calibrate.fit_host.fit_measurement", lambda *_, **__: busy)
    assert "The machine was busy: other processes took 35%" in call("calibrate")[1]
    assert load_calibration(home / ".local/share/perfmodel/calibrations" / f"{measured.name}.yaml") == busy
    assert any("took 35% of the processors" in warning for warning in call_json("predict", *JOB)["warnings"])


@pytest.mark.parametrize("path", ["no/such/mine.yaml", "mine.txt"])
def test_a_bad_path_is_a_sentence_before_anything_is_measured(path, call):
    code, out, err = call("calibrate", "--save", path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
