"""`perfmodel doctor` from outside."""

import pytest

from perfmodel.hardware import local
from perfmodel.verbs import doctor


@pytest.fixture
def gpus(monkeypatch):
    def have(*names):
        monkeypatch.setattr(doctor, "gpu_names", lambda: names)

    have()
    return have


def test_it_names_what_is_missing_and_what_would_help(call, gpus, monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL_PARTS", {"torch": "run", "no-such-part": "nothing"})
    gpus("NVIDIA A10", "NVIDIA A10", "NVIDIA X1")
    code, out, err = call("doctor")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for part in ("perfmodel ", "no-such-part not installed", "2 x NVIDIA A10: a10-24gb, not calibrated", "1 x NVIDIA X1: an unknown chip"):
        assert part in text
    assert "perfmodel calibrate" in text


def test_a_calibrated_gpu_needs_nothing(call_json, gpus):
    gpus("NVIDIA H100 80GB HBM3")
    report = call_json("doctor")
    device = report["devices"][-1]
    assert (device["chip"], device["is_calibrated"], device["calibration"]) == ("h100-sxm-80gb", True, "h100")
    assert not any("h100" in line for line in report["advice"])
    assert set(report["hardware_data"]) == {"chips", "calibrations", "prices"}


def test_gpus_are_read_from_the_drivers_tool(monkeypatch):
    listing = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n"
    monkeypatch.setattr(local.shutil, "which", lambda name: name)
    monkeypatch.setattr(local.subprocess, "run", lambda *arguments, **options: type("Done", (), {"stdout": listing}))
    assert local.gpu_names() == ("NVIDIA H100 80GB HBM3",) * 2
