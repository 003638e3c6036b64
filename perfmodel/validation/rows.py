"""Predicted runs next to their cases, and the flat rows of `validate --out` and of data frames: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.parallel.interval import METRICS
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import STEP_METRICS, Case
from perfmodel.validation.fields import UNKNOWN, known_label
from perfmodel.validation.run_labels import RunLabels
from perfmodel.validation.serving_cases import PlannedServing

NO_TIMES = ("mcore",)
"""Sources whose step times are meaningless: continuous integration of toy models in deterministic mode, launch-bound. Memory counts."""
SECOND_HAND = "nemo"
"""Source of serving runs with second-hand figures: scored in a separate table."""

_Planned = TypeVar("_Planned", PlannedCase, PlannedServing)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow(Generic[_Planned]):
    """Prediction of one run next to its case: seconds, bytes, output tokens a second of all chips.

    kind       training, out of memory, or a kind of serving
    labels     labels that errors are grouped by
    planned    the run as predicted; None without a plan
    predicted  metric -> value; empty without a prediction, with the reason
    intervals  metric -> 80 % interval
    max_sequences   predicted, of a replica of a service
    reason     why there is no prediction
    has_failed      the prediction raised an error that is a bug, no `InputError`
    """

    case: Case
    kind: str = "training"
    labels: RunLabels = field(default_factory=lambda: RunLabels(source=UNKNOWN))
    planned: _Planned | None = field(default=None, repr=False)
    predicted: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    predicted_fits: bool | None = None
    max_sequences: float = math.nan
    reason: str = ""
    has_failed: bool = False

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def group(self) -> str:
        return self.case.group

    @property
    def tier(self) -> str:
        return self.case.tier

    @property
    def run(self) -> _Planned:
        """Plan of a predicted run."""
        assert self.planned is not None
        return self.planned

    @property
    def is_predicted(self) -> bool:
        return bool(self.predicted)

    @property
    def is_scored(self) -> bool:
        """The run is predicted, primary and not suspect. A step has a meaningful time, and trains all weights of a dense model."""
        case = self.case
        if case.tier != "primary" or case.suspect or not self.is_predicted:
            return False
        return case.is_serving or (self.has_time and case.group not in NO_TIMES and not case.is_apart)

    @property
    def is_second_hand(self) -> bool:
        return self.case.group == SECOND_HAND

    @property
    def has_time(self) -> bool:
        """The step time is both predicted and measured."""
        return not math.isnan(self.time_error)

    @property
    def time_error(self) -> float:
        return self.error("step_time")

    @property
    def predicted_step_time(self) -> float:
        return self.predicted.get("step_time", math.nan)

    @property
    def measured_step_time(self) -> float:
        return self.case.measured("step_time")

    def error(self, metric: str) -> float:
        """Return predicted / measured - 1; nan where one is missing."""
        return self.predicted.get(metric, math.nan) / self.case.measured(metric) - 1.0

    def counts(self, metric: str) -> bool:
        """Return whether the error of a metric counts: it does not include queueing or start-up that the source mentions."""
        return not math.isnan(self.error(metric)) and not (metric == "ttft" and self.case.first_token_note)


TrainingRow: TypeAlias = CaseRow[PlannedCase]
ServingRow: TypeAlias = CaseRow[PlannedServing]
AnyRow: TypeAlias = TrainingRow | ServingRow


def attempted(row: CaseRow[_Planned], predict: Callable[[CaseRow[_Planned]], CaseRow[_Planned]]) -> CaseRow[_Planned]:
    """Return the row with its prediction, or with the reason why there is none."""
    if row.reason:
        return row
    try:
        predicted = predict(row)
    except InputError as error:
        return replace(row, reason=one_line(error, 400))
    except FAILURES as error:
        reason = f"the prediction failed ({type(error).__name__}: {one_line(error, 200)}); please report this case"
        return replace(row, reason=reason, has_failed=True)
    if all(map(math.isfinite, predicted.predicted.values())):
        return predicted
    return replace(row, reason="the prediction is not a finite number; please report this case")


FAILURES = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError, RecursionError)
"""Errors that are bugs: they are reported, and the other cases still count."""


COLUMNS = (
    "id", "predicted_step_time", "measured_step_time", "predicted_memory", "measured_memory", "predicted_fits", "reason", "step_time_low",
    "step_time_high", "source", "chip", "framework", "model", "parameters", "num_chips", "form", "tier", "precision", "experts",
    "dispatcher",
)  # fmt: skip
SERVING_COLUMNS = (
    "id", *(f"{origin}_{metric}" for metric in METRICS for origin in ("predicted", "measured")), "predicted_fits", "reason",
    *(f"{metric}_{end}" for metric in METRICS for end in ("low", "high")), "predicted_max_sequences", "kind", "source", "engine", "chip",
    "framework", "model", "tier", "precision", "concurrency", "experts", "suspect",
)  # fmt: skip
"""Columns of serving runs: seconds, and output tokens a second of all chips."""


def case_columns(rows: Iterable[AnyRow]) -> list[str]:
    """Return the columns of the kinds of runs that are present; those of training runs if there are none."""
    kinds = {row.case.is_serving for row in rows} or {False}
    return list(dict.fromkeys((*(COLUMNS if False in kinds else ()), *(SERVING_COLUMNS if True in kinds else ()))))


def case_rows(rows: Iterable[AnyRow]) -> list[dict[str, Any]]:
    """Return column -> value of each run; nan and None for missing values."""
    table = []
    for row in rows:
        labels = row.labels
        values: dict[str, Any] = {
            "id": row.id,
            "reason": row.reason,
            "predicted_fits": row.predicted_fits,
            "predicted_max_sequences": row.max_sequences,
            **{name: known_label(getattr(labels, name)) for name in RunLabels.__slots__},
            "concurrency": math.nan if labels.concurrency == UNKNOWN else float(labels.concurrency),
        }
        if row.case.is_serving:
            values |= {"kind": row.kind, "tier": row.tier, "suspect": row.case.suspect}
        for metric in (*STEP_METRICS, *METRICS):
            values[f"predicted_{metric}"], values[f"measured_{metric}"] = row.predicted.get(metric, math.nan), row.case.measured(metric)
            values[f"{metric}_low"], values[f"{metric}_high"] = row.intervals.get(metric, (math.nan, math.nan))
        table.append({name: values[name] for name in case_columns([row])})
    return table
