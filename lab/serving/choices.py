"""Regret of the plans and loads that predictions choose under a TPOT limit.

Runs that differ only in plan and load form a group. Under each limit, the choice has the most output tokens per second and chip among
the points that are predicted to meet the limit. Measured figures judge the choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.foundation.grouping import grouped
from perfmodel.validation.rows import ServingRow

TPOT_LIMITS = (0.010, 0.015, 0.020, 0.030, 0.050, 0.100)
LEAST_POINTS = 4
"""Least number of points of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan under one load: TPOT [s], and output tokens per second and chip."""

    group: str
    predicted_tpot: float
    predicted_rate: float
    measured_tpot: float
    measured_rate: float
    chips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFigures:
    """Regrets of choices. regret: throughput lost to the best within the limit, where the choice meets it; broken: share that does not."""

    num_cases: int
    mean_regret: float
    median_regret: float
    broken: float
    same_chips: float
    median_point: float


def points_of(rows: Sequence[ServingRow]) -> list[Point]:
    """Return the points of the scored rows that have both metrics."""
    points = []
    for row in rows:
        if row.kind != "serving" or row.planned is None or not row.is_scored or not {"tpot", "request_latency"} <= set(row.predicted):
            continue
        job, chips = row.planned.job, row.planned.layout.num_chips
        tokens = (job.concurrency or 1) * job.output_len.mean
        key = [getattr(row.labels, name) for name in ("source", "framework", "model", "chip", "precision")]
        key += [str(job.kv_precision), str(job.input_len), str(job.output_len)]
        points.append(
            Point(
                group=json.dumps(key),
                predicted_tpot=row.predicted["tpot"],
                predicted_rate=tokens / row.predicted["request_latency"] / chips,
                measured_tpot=row.case.measured("tpot"),
                measured_rate=tokens / row.case.measured("request_latency") / chips,
                chips=chips,
            )
        )
    return points


def choice_figures(points: Sequence[Point], limits: Sequence[float] = TPOT_LIMITS, *, margin: float = 0.0) -> ChoiceFigures:
    """Return the regrets of choices under the limits. margin: predicted headroom of a choice, as a share of the limit."""
    regrets, broken, same, middle = list[float](), 0, 0, list[float]()
    cases = 0
    for group in grouped(points, lambda point: point.group).values():
        if len(group) < LEAST_POINTS:
            continue
        for limit in limits:
            meet = [point for point in group if point.measured_tpot <= limit]
            if not meet:
                continue
            cases += 1
            best = max(meet, key=lambda point: point.measured_rate)
            chosen = chosen_point(group, limit * (1.0 - margin))
            middle.append(1.0 - float(np.median([point.measured_rate for point in meet])) / best.measured_rate)
            if chosen.measured_tpot > limit:
                broken += 1
                continue
            regrets.append(1.0 - chosen.measured_rate / best.measured_rate)
            same += chosen.chips == best.chips
    return ChoiceFigures(
        num_cases=cases,
        mean_regret=float(np.mean(regrets)) if regrets else math.nan,
        median_regret=float(np.median(regrets)) if regrets else math.nan,
        broken=broken / cases if cases else math.nan,
        same_chips=same / len(regrets) if regrets else math.nan,
        median_point=float(np.mean(middle)) if middle else math.nan,
    )


def chosen_point(points: Sequence[Point], limit: float) -> Point:
    """Return the point of highest throughput that is predicted to meet the limit; the one of least TPOT where none is."""
    meet = [point for point in points if point.predicted_tpot <= limit]
    if not meet:
        return min(points, key=lambda point: point.predicted_tpot)
    return max(meet, key=lambda point: point.predicted_rate)
