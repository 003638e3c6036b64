"""Calibration of the machine of a run: the saved one, or one that is measured with the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.cost.resolve import choose_calibration
from perfmodel.hardware.calibration import MEASURED_NOW, Calibration, Provenance
from perfmodel.hardware.local import local_cluster

if TYPE_CHECKING:
    from perfmodel.execute.launch.launch import WorkerGroup


def own_calibration(
    given: Calibration | str | Path | None,
    *,
    ranks: int,
    suffices: Callable[[Calibration], bool] = lambda calibration: True,
    group: WorkerGroup | None = None,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Return the calibration for a prediction of this machine's CPUs, measured now (about a minute) if there is none.

    A calibration measured by this function is not saved; `perfmodel calibrate` saves one.

    given      a calibration, its name or path; None: this machine's own
    ranks      processes of the run; a calibration uses at most two
    suffices   whether this machine's own calibration contains the rates that the prediction needs
    group      a running WorkerGroup to measure with, in place of new processes
    """
    if isinstance(given, Calibration):
        return given
    cluster = local_cluster()
    chosen = choose_calibration(cluster.chip, given or "")
    if given or (chosen.provenance is Provenance.CALIBRATED and suffices(chosen)):
        return chosen
    from perfmodel.calibrate.fit_host import fit_measurement
    from perfmodel.execute.measure.machine import measure_machine

    note = progress or (lambda what: None)
    ranks = min(2, ranks, cluster.num_chips)
    measured = measure_machine(ranks, brief=True, device="cpu", group=group, progress=lambda share, what: note(f"calibrating: {what}"))
    return replace(fit_measurement(measured), name=MEASURED_NOW)
