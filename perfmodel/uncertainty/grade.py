"""Grades of trust: how far the framework, the chip and the model are from the runs that the model was validated on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.frameworks.fitted import FittedTo
from perfmodel.frameworks.profile import GENERIC, list_profiles
from perfmodel.uncertainty.residuals import ModelResiduals, Residuals, shape_of
from perfmodel.workload.config import TransformerConfig

#: A model is like those that were seen up to this many times their extremes.
_FAR = 2.0
_SHAPE = re.compile(r" (\d+)x(\d+) ")


class Grade(StrEnum):
    """Best first."""

    OWN_RUNS = "fitted to your runs"
    KNOWN = "framework and chip known"
    OTHER_CHIP = "framework known, on other chips"
    NO_CALIBRATION = "framework known, chip not measured"
    UNKNOWN_FRAMEWORK = "framework unknown"
    NOT_COMPARED = "framework known, no run of it compared"
    OUTSIDE = "outside of anything seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """grade, and why: what was seen, and how far this is from it."""

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
    """By distance to the runs that predictions were held against: published ones of the family, of all where it has none, or one's own.

    trains_all   all of the model is trained, as in those runs
    """
    own = [each for each in residuals.models if each.family == family]
    seen = [each for each in own if each.chip == chip]
    if fitted.num_runs:
        grade = Grade.OWN_RUNS
        reasons = [f"{fitted.num_runs} of them on {', '.join(fitted.chips)}, {fitted.left_out_error:.1%} off left out"]
        if chip not in fitted.chips:
            reasons.append(f"none on {chip}")
    elif not own and family != GENERIC and family in list_profiles():
        grade = Grade.NOT_COMPARED
        reasons = [f"defaults of {family} from its source code; interval of unseen frameworks (leave-one-framework-out)"]
    elif not own:
        grade, reasons = Grade.UNKNOWN_FRAMEWORK, ["mean of the known frameworks; interval from leave-one-framework-out errors"]
    elif seen:
        grade, reasons = Grade.KNOWN, [_runs(seen)]
    elif is_calibrated:
        grade, reasons = Grade.OTHER_CHIP, [_runs(own)]
    else:
        grade, reasons = Grade.NO_CALIBRATION, [f"{_runs(own)}; {chip} by its relatives"]
    if not trains_all:
        reasons.append("these trained all weights, this trains adapters only")
    far = _far(model, fitted.models if fitted.num_runs else [each.model for each in own or residuals.models])
    return Trust(grade=Grade.OUTSIDE, reasons=(str(grade), *far, *reasons)) if far else Trust(grade=grade, reasons=tuple(reasons))


def _runs(models: Iterable[ModelResiduals]) -> str:
    found = list(models)
    count, shapes = sum(each.num_runs for each in found), len({each.model for each in found})
    chips = ", ".join(sorted({each.chip for each in found}))
    return f"{count:,} run{'s' if count > 1 else ''} of {shapes} model{'s' if shapes > 1 else ''} on {chips}"


def _far(model: TransformerConfig, shapes: Sequence[str]) -> list[str]:
    """Sizes of the model that lie far outside all of the shapes."""
    sizes = [tuple(map(int, match.groups())) for match in map(_SHAPE.search, shapes) if match]
    if not sizes or shape_of(model) in shapes:
        return []
    found = []
    named = {"layers": model.num_hidden_layers, "hidden size": model.hidden_size}
    for (name, value), seen in zip(named.items(), zip(*sizes, strict=True), strict=True):
        if value > _FAR * max(seen):
            found.append(f"{name} {value:,} is {value / max(seen):.1f} times the most that was seen")
        elif value < min(seen) / _FAR:
            found.append(f"{name} {value:,} is 1/{min(seen) / value:.1f} of the least that was seen")
    return found
