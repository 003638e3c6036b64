"""Grades of a prediction: distance of framework, chip and model from the runs of the validation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.frameworks.fitted import FittedTo
from perfmodel.frameworks.profile import GENERIC, list_profiles
from perfmodel.uncertainty.residuals import ModelResiduals, Residuals, shape_of
from perfmodel.workload.config import TransformerConfig

#: A model size is outside the seen range beyond this factor of its extremes.
_FAR = 2.0
_SHAPE = re.compile(r" (\d+)x(\d+) ")


class Grade(StrEnum):
    """Grade of a prediction, best first."""

    OWN_RUNS = "fitted to your runs"
    KNOWN = "framework and chip known"
    OTHER_CHIP = "framework known, on other chips"
    NO_CALIBRATION = "framework known, chip not measured"
    UNKNOWN_FRAMEWORK = "framework unknown"
    NOT_COMPARED = "framework known, no run of it compared"
    OUTSIDE = "outside of anything seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Grade of a prediction and its reasons: the runs of the validation, and the distance from them."""

    grade: Grade
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join((str(self.grade), *self.reasons))


def trust_in(
    residuals: Residuals,
    *,
    family: str,
    chip: str,
    model: TransformerConfig,
    is_calibrated: bool,
    fitted: FittedTo,
    trains_all: bool = True,
) -> Trust:
    """Grade a prediction by its distance to the runs that the residuals or the fit are based on.

    The runs are the user's for a fitted profile. Otherwise they are published runs of the family, or of all families if it has none.

    trains_all   all weights are trained, as in those runs
    """
    family_runs = [runs for runs in residuals.models if runs.family == family]
    seen = [runs for runs in family_runs if runs.chip == chip]
    if fitted.num_runs:
        grade = Grade.OWN_RUNS
        reasons = [f"{fitted.num_runs} of them on {', '.join(fitted.chips)}, {fitted.left_out_error:.1%} off left out"]
        if chip not in fitted.chips:
            reasons.append(f"none on {chip}")
    elif not family_runs and family != GENERIC and family in list_profiles():
        grade = Grade.NOT_COMPARED
        reasons = [f"defaults of {family} from its source code; interval of unseen frameworks (leave-one-framework-out)"]
    elif not family_runs:
        grade, reasons = Grade.UNKNOWN_FRAMEWORK, ["mean of the known frameworks; interval from leave-one-framework-out errors"]
    elif seen:
        grade, reasons = Grade.KNOWN, [_runs(seen)]
    elif is_calibrated:
        grade, reasons = Grade.OTHER_CHIP, [_runs(family_runs)]
    else:
        grade, reasons = Grade.NO_CALIBRATION, [f"{_runs(family_runs)}; {chip} by its relatives"]
    if not trains_all:
        reasons.append("these trained all weights, this trains adapters only")
    far = _far(model, fitted.models if fitted.num_runs else [runs.model for runs in family_runs or residuals.models])
    return Trust(grade=Grade.OUTSIDE, reasons=(str(grade), *far, *reasons)) if far else Trust(grade=grade, reasons=tuple(reasons))


def _runs(models: Iterable[ModelResiduals]) -> str:
    residuals = list(models)
    count, shapes = sum(runs.num_runs for runs in residuals), len({runs.model for runs in residuals})
    chips = ", ".join(sorted({runs.chip for runs in residuals}))
    return f"{count:,} run{'s' if count > 1 else ''} of {shapes} model{'s' if shapes > 1 else ''} on {chips}"


def _far(model: TransformerConfig, shapes: Sequence[str]) -> list[str]:
    """Return the sizes of the model that are far outside those of all shapes."""
    sizes = [tuple(map(int, match.groups())) for match in map(_SHAPE.search, shapes) if match]
    if not sizes or shape_of(model) in shapes:
        return []
    far = []
    named = {"layers": model.num_hidden_layers, "hidden size": model.hidden_size}
    for (name, value), seen in zip(named.items(), zip(*sizes, strict=True), strict=True):
        if value > _FAR * max(seen):
            far.append(f"{name} {value:,} is {value / max(seen):.1f} times the most that was seen")
        elif value < min(seen) / _FAR:
            far.append(f"{name} {value:,} is 1/{min(seen) / value:.1f} of the least that was seen")
    return far
