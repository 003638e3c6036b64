"""Predictions of this machine's runs: its own calibration, or one that is measured with the run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from perfmodel.calibrate import fit_host
from perfmodel.execute.measure import machine
from perfmodel.hardware.calibration import MEASURED_NOW, SPEC_SHEET, Provenance
from perfmodel.hardware.local import local_cluster
from perfmodel.verbs import own_calibration as module
from perfmodel.verbs.own_calibration import own_calibration

OWN = replace(SPEC_SHEET, name="local", provenance=Provenance.CALIBRATED, chips=(local_cluster().chip.name,))


@pytest.fixture
def measured(monkeypatch):
    """Numbers of ranks that were calibrated."""
    ranks = []
    monkeypatch.setattr(machine, "measure_machine", lambda number, **_: ranks.append(number) or SimpleNamespace())
    monkeypatch.setattr(fit_host, "fit_measurement", lambda _: OWN)
    return ranks


def test_without_a_calibration_of_this_machine_one_is_measured(measured, monkeypatch):
    monkeypatch.setattr(module, "choose_calibration", lambda chip, name: SPEC_SHEET)
    assert own_calibration(None, ranks=1).name == MEASURED_NOW
    own_calibration(None, ranks=64)
    assert measured == [1, min(2, local_cluster().num_chips)]


def test_this_machines_own_calibration_is_used_where_it_suffices(measured, monkeypatch):
    monkeypatch.setattr(module, "choose_calibration", lambda chip, name: OWN)
    assert own_calibration(None, ranks=2) is OWN
    assert not measured
    own_calibration(None, ranks=2, suffices=lambda calibration: False)
    assert measured == [min(2, local_cluster().num_chips)]


def test_a_given_calibration_is_taken_as_it_is(measured):
    assert own_calibration("spec-sheet", ranks=2) is SPEC_SHEET
    assert own_calibration(OWN, ranks=2) is OWN
    assert not measured
