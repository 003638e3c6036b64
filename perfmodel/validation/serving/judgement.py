"""Errors of serving predictions: each metric by label, verdicts, reasons of rows without a prediction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from perfmodel.frameworks.serving_intervals import METRICS
from perfmodel.validation.serving.rows import ServingRow, label_order


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricErrors:
    """Statistics of |predicted / measured - 1|.

    bias      the median of predicted / measured - 1
    coverage  share of the measured values that lie in their 80 % interval
    """

    count: int
    median: float
    p90: float
    mean: float
    bias: float
    coverage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingErrors:
    """Errors of each metric over the runs of one label, and how many completed runs are predicted not to fit."""

    name: str
    num_rows: int
    num_predicted: int
    metrics: Mapping[str, MetricErrors]
    num_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """Every case of serving in the order of the files; errors of the scored rows (primary, not suspect) over all and by field, those of the
    others that are not suspect, the second-hand ones, and why cases were not predicted (reason -> count)."""

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
    reasons: dict[str, int] = {}
    for row in rows:
        if not row.is_predicted:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    scored = [row for row in rows if row.is_scored]
    others = [row for row in rows if row.tier != "primary" and not row.served.suspect and not row.is_second_hand]
    return ServingResult(
        rows=rows,
        overall=serving_errors("all", scored),
        by={field: serving_errors_by(scored, field) for field in by},
        secondary=serving_errors("secondary", others),
        second_hand=serving_errors("second-hand", [row for row in rows if row.is_second_hand]),
        num_suspect=sum(bool(row.served.suspect) and not row.is_second_hand for row in rows),
        reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])),
    )


def serving_errors_by(rows: Iterable[ServingRow], field: str) -> tuple[ServingErrors, ...]:
    groups: dict[str, list[ServingRow]] = {}
    for row in rows:
        groups.setdefault(row.labels.get(field, "?"), []).append(row)
    return tuple(serving_errors(name, groups[name]) for name in sorted(groups, key=label_order))


def serving_errors(name: str, rows: Iterable[ServingRow]) -> ServingErrors:
    rows = list(rows)
    return ServingErrors(
        name=name,
        num_rows=len(rows),
        num_predicted=sum(row.is_predicted for row in rows),
        metrics={metric: metric_errors(rows, metric) for metric in METRICS},
        num_out=sum(row.predicted_fits is False for row in rows),
    )


def metric_errors(rows: Iterable[ServingRow], metric: str) -> MetricErrors:
    counted = [row for row in rows if row.counts(metric)]
    held = [
        low <= row.measured(metric) <= high
        for row in counted
        for low, high in [row.intervals.get(metric, (math.nan, math.nan))]
        if low <= high
    ]
    return error_statistics([row.error(metric) for row in counted], held)


def error_statistics(errors: Sequence[float], held: Sequence[bool] = ()) -> MetricErrors:
    """errors: predicted / measured - 1; held: whether an interval holds the measured value."""
    coverage = sum(held) / len(held) if held else math.nan
    if not errors:
        return MetricErrors(count=0, median=math.nan, p90=math.nan, mean=math.nan, bias=math.nan, coverage=coverage)
    absolute = np.abs(errors)
    return MetricErrors(
        count=len(errors),
        median=float(np.median(absolute)),
        p90=float(np.quantile(absolute, 0.9)),
        mean=float(absolute.mean()),
        bias=median(errors),
        coverage=coverage,
    )
