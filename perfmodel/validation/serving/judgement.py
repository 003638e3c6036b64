"""Errors of serving predictions: each metric by label, verdicts, reasons of rows without a prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.parallel.interval import METRICS
from perfmodel.validation.run_labels import by_label
from perfmodel.validation.serving.rows import ServingRow
from perfmodel.validation.statistics import ErrorStatistics, error_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingErrors:
    """Errors of each metric over the runs of one label, and the number of completed runs that are predicted not to fit."""

    name: str
    num_rows: int
    num_predicted: int
    metrics: Mapping[str, ErrorStatistics]
    num_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """Result of the validation of serving: every case in file order, and the reasons of cases without a prediction (reason -> count).

    overall, by   errors of the scored rows (primary, not suspect) over all, and by field
    secondary     errors of the other rows that are not suspect
    second_hand   errors of figures that were not published by their author
    """

    rows: tuple[ServingRow, ...]
    overall: ServingErrors
    by: Mapping[str, tuple[ServingErrors, ...]]
    secondary: ServingErrors
    second_hand: ServingErrors
    num_suspect: int
    reasons: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_predicted(self) -> int:
        return sum(row.is_predicted for row in self.rows)


def summarise_serving(rows: Iterable[ServingRow], *, by: Sequence[str] = ()) -> ServingResult:
    rows = tuple(rows)
    scored = [row for row in rows if row.is_scored]
    others = [row for row in rows if row.tier != "primary" and not row.served.suspect and not row.is_second_hand]
    return ServingResult(
        rows=rows,
        overall=serving_errors("all", scored),
        by={field: tuple(serving_errors(*group) for group in by_label(scored, field).items()) for field in by},
        secondary=serving_errors("secondary", others),
        second_hand=serving_errors("second-hand", [row for row in rows if row.is_second_hand]),
        num_suspect=sum(bool(row.served.suspect) and not row.is_second_hand for row in rows),
        reasons=dict(Counter(row.reason for row in rows if not row.is_predicted).most_common()),
    )


def serving_errors(name: str, rows: Iterable[ServingRow]) -> ServingErrors:
    rows = list(rows)
    return ServingErrors(
        name=name,
        num_rows=len(rows),
        num_predicted=sum(row.is_predicted for row in rows),
        metrics={metric: metric_errors(rows, metric) for metric in METRICS},
        num_out=sum(row.predicted_fits is False for row in rows),
    )


def metric_errors(rows: Iterable[ServingRow], metric: str) -> ErrorStatistics:
    counted = [row for row in rows if row.counts(metric)]
    intervals = [(row, row.intervals[metric]) for row in counted if metric in row.intervals]
    return error_statistics(
        [row.error(metric) for row in counted], [low <= row.measured(metric) <= high for row, (low, high) in intervals if low <= high]
    )
