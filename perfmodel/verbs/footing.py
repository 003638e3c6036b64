"""A table of several chips on one footing: what each row would be if none rested on more than the weakest of them does.

Measured chips fall short of their data sheets, so a chip of which only the data sheet is known would win a table by what nobody measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import PRIOR_NAME, SPEC_SHEET_NAME, Provenance
from perfmodel.parallel.prediction import Prediction
from perfmodel.verbs.setting import Setting, make_setting

_GROUNDS = (str(Provenance.SPEC_SHEET), str(Provenance.PRIOR), str(Provenance.CALIBRATED))
"""Weakest first."""

_WORTH_SAYING = 1.01
"""How much longer than on the common ground the better known rows take, before it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """What all rows of a table can rest on, and their step times there.

    ground      spec sheet or prior
    step_times  one for each row  [s]
    own         what the kernels of each row rest on, by the weakest
    """

    ground: str
    step_times: tuple[float, ...]
    own: tuple[str, ...]


def common_footing(rows: Sequence[tuple[Setting, Prediction]]) -> Footing | None:
    """The weakest ground of the rows with the step times on it; None where all of them stand on the same."""
    own = tuple(ground_of(setting) for setting, _ in rows)
    chips = {setting.cluster.chip.name for setting, _ in rows}
    if len(set(own)) < 2 or len(chips) < 2:
        return None
    ground = min(own, key=_GROUNDS.index)
    if ground == str(Provenance.PRIOR):
        try:
            return Footing(ground=ground, step_times=_times(rows, PRIOR_NAME), own=own)
        except InputError:
            ground = str(Provenance.SPEC_SHEET)  # a measured chip whose maker has no other
    return Footing(ground=ground, step_times=_times(rows, SPEC_SHEET_NAME), own=own)


def ground_of(setting: Setting) -> str:
    """What the kernels of a chip rest on, by the weakest of them: `spec sheet`, `prior` or `calibrated`."""
    found = {setting.estimator.machine.rests_on[kernel].partition(":")[0] for kernel in ("matmul", "streaming", "attention")}
    return min(found, key=_GROUNDS.index)


def footing_object(footing: Footing, row: int) -> dict[str, object]:
    """A row's footing as `--json` has it."""
    return {"own": footing.own[row], "common": footing.ground, "step_time": footing.step_times[row]}


def footing_line(footing: Footing, predictions: Sequence[Prediction]) -> str:
    """How to read the column of the common ground, and by how much the rows that stand on more fall short of it."""
    told = f"The rows rest on different ground: compare chips by '{column_of(footing)}', where none rests on more than the weakest."
    better = max(footing.own, key=_GROUNDS.index)
    rows = zip(predictions, footing.step_times, footing.own, strict=True)
    factors = [each.step_time / time for each, time, own in rows if own == better]
    if footing.ground == better or min(factors) < _WORTH_SAYING:
        return told
    spread = f"{min(factors):.2f}" if max(factors) - min(factors) < 0.005 else f"{min(factors):.2f} to {max(factors):.2f}"
    return f"{told} What is {better} takes {spread} times that; expect the others to fall as short."


def column_of(footing: Footing) -> str:
    return f"on {footing.ground}s"


def _times(rows: Sequence[tuple[Setting, Prediction]], calibration: str) -> tuple[float, ...]:
    times = []
    for setting, prediction in rows:
        there = make_setting(setting.job, setting.cluster, calibration=calibration, profile=setting.estimator.profile)
        times.append(float(there.estimator.predict(prediction.plan).step_time))
    return tuple(times)
