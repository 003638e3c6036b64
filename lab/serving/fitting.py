"""Engine constants fitted to published runs: a few host times and the lockstep of requests, from all runs of an engine together.

Nothing is fitted to a model, a chip or a row. A left-out fit is Gauss-Newton steps from the fit of all runs, on the remaining runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.splits import leave_one_out
from perfmodel.calibrate.fits import rounded
from perfmodel.foundation.errors import PerfModelError
from perfmodel.foundation.grouping import grouped
from perfmodel.frameworks.engine import Engine
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.validation.rows import ServingRow
from perfmodel.validation.validate import metrics_of

Array = NDArray[np.float64]
PredictAs = Callable[["ServingRow", Engine], ServingPrediction]

#: Fitted numbers: start, lower and upper bound. [s, -]
NUMBERS: Mapping[str, tuple[float, float, float]] = {
    "step_time": (1e-3, 1e-5, 2e-2),
    "sequence_time": (2e-5, 1e-7, 5e-4),
    "request_time": (3e-2, 1e-3, 1.0),
    "lockstep": (0.3, 0.02, 1.0),
    "border_steps": (0.5, 0.05, 10.0),
    "launch_time": (2e-5, 1e-6, 1e-4),
    "rank_skew_time": (5e-6, 1e-7, 2e-4),
    "few_rows_fraction": (0.1, 0.01, 1.0),
    "decode_attention_fraction": (1.0, 0.05, 2.0),
}
#: Standard deviation of the prior of a number's logarithm about its start; it regularises numbers that runs hardly determine.
_PRIOR_SPREAD = math.log(5.0)
_PRIOR_WEIGHT = 0.3
#: Weight of each metric; TTFT has an additional error (queues, clients, start-up).
_WEIGHTS: Mapping[str, float] = {"ttft": 0.5, "tpot": 1.0, "request_latency": 1.0, "tokens_per_second": 1.0}
_SCALE = 0.1
"""Errors far beyond it hardly count (Cauchy): early releases of the support of a model run at half the speed of later ones."""
_STEP = 0.1
DIGITS = 3
"""Significant digits of a written number."""
LEAST_RUNS = 8
"""Least number of runs that an engine is fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One measured figure of one run."""

    row: int
    metric: str
    measured: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumber:
    """A fitted number. low, high: 80 % range of the fits without one model, at least the standard error of the fit."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """Fit of an engine, linearised at its numbers.

    names, logs   the fitted numbers and their logarithms
    predicted     log of each target's prediction with them
    slopes        its derivatives by those logarithms
    is_borrowed   the numbers are those of another engine: none of these runs was fitted
    """

    engine: Engine
    rows: tuple[ServingRow, ...]
    targets: tuple[Target, ...]
    names: tuple[str, ...]
    logs: Array
    predicted: Array
    slopes: Array
    is_borrowed: bool = False

    @property
    def residuals(self) -> Array:
        """log(predicted / measured)."""
        return self.predicted - np.log([target.measured for target in self.targets])

    @property
    def weights(self) -> Array:
        return np.array([target.weight for target in self.targets])

    @property
    def prior(self) -> Array:
        """Information matrix of the prior of the logarithms."""
        return np.eye(len(self.names)) * (_PRIOR_WEIGHT / _PRIOR_SPREAD) ** 2

    def numbers(self) -> dict[str, float]:
        return {name: float(np.exp(log)) for name, log in zip(self.names, self.logs, strict=True)}


def numbers_of(engine: Engine, rows: Sequence[ServingRow]) -> tuple[str, ...]:
    """Return the numbers that the runs determine; static batches determine neither the request time nor the lockstep."""
    has_load = any(row.kind == "serving" for row in rows)
    names = ["step_time", "sequence_time"]
    if has_load:
        names += ["request_time", "lockstep", "border_steps"]
    if sum(row.planned is not None and (row.planned.layout.to_dict()["tp"] or 1) > 1 for row in rows) >= LEAST_RUNS:
        names += ["rank_skew_time"]
    if not engine.host.has_graphs:
        names += ["launch_time"]
    if not engine.kernels.tunes_products:
        names += ["few_rows_fraction"]
    if not engine.kernels.shares_key_values:
        names += ["decode_attention_fraction"]
    return tuple(names)


def with_numbers(engine: Engine, names: Sequence[str], logs: Array | Sequence[float]) -> Engine:
    return engine.having(**{name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)})  # type: ignore[arg-type]


def targets_of(rows: Sequence[ServingRow]) -> tuple[Target, ...]:
    """Return every scored figure; runs of one model on one chip together weigh the square root of their number."""
    keys = [(row.labels.model, row.labels.chip) for row in rows]
    counts, targets = Counter(keys), []
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        weight = counts[key] ** -0.25
        for metric, of_metric in _WEIGHTS.items():
            if row.counts(metric) and not (row.kind == "static_batch" and metric == "tokens_per_second"):
                targets.append(Target(row=index, metric=metric, measured=row.case.measured(metric), weight=weight * of_metric))
    return tuple(targets)


def predicted_logs(rows: Sequence[ServingRow], targets: Sequence[Target], engine: Engine, predict: PredictAs) -> Array:
    """Return the logarithm of the prediction of each target; nan where there is none."""
    metrics: list[dict[str, float]] = []
    for row in rows:
        try:
            metrics.append(metrics_of(row.run, predict(row, engine)))
        except PerfModelError:
            metrics.append({})
    values = np.array([metrics[target.row].get(target.metric, math.nan) for target in targets], dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.log(values))


def fit_engine(engine: Engine, rows: Sequence[ServingRow], predict: PredictAs, *, most: int = 90, final: int = 300) -> EngineFit | None:
    """Fit the numbers of an engine to its scored runs; None where these are too few.

    Takes robust Gauss-Newton steps on at most `most` evenly spaced runs, and a last one on `final`.
    """
    rows = [row for row in rows if row.is_scored]
    if len(rows) < LEAST_RUNS:
        return None
    names = numbers_of(engine, rows)
    logs = np.log([NUMBERS[name][0] for name in names])
    for number in (most, most, most, final):
        fit = linearised(engine, _spread_evenly(rows, number), names, logs, predict)
        logs = left_out_logs(fit, range(len(fit.targets)), {})
    return linearised(engine, _spread_evenly(rows, final), names, logs, predict)


def _spread_evenly(rows: Sequence[ServingRow], most: int) -> list[ServingRow]:
    places = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)
    return [rows[index] for index in sorted(set(places.tolist()))]


def linearised(engine: Engine, rows: Sequence[ServingRow], names: tuple[str, ...], logs: Array, predict: PredictAs) -> EngineFit:
    """Return the predictions of all runs at these numbers, and their derivatives."""
    targets = targets_of(rows)
    at = predicted_logs(rows, targets, with_numbers(engine, names, logs), predict)
    slopes = np.zeros((len(targets), len(names)))
    for index, name in enumerate(names):
        moved = logs.copy()
        step = _STEP if math.exp(logs[index] + _STEP) <= NUMBERS[name][2] else -_STEP
        moved[index] += step
        slopes[:, index] = (predicted_logs(rows, targets, with_numbers(engine, names, moved), predict) - at) / step
    return EngineFit(
        engine=with_numbers(engine, names, logs),
        rows=tuple(rows),
        targets=targets,
        names=names,
        logs=logs,
        predicted=at,
        slopes=np.nan_to_num(slopes),
    )


def left_out_logs(fit: EngineFit, seen: Sequence[int], elsewhere: Mapping[str, float]) -> Array:
    """Return the logarithms of the numbers by the seen targets; those of other engines where these are of too few runs.

    elsewhere   number -> value by the runs of other engines
    """
    start, lower, upper = np.log([NUMBERS[name] for name in fit.names]).T
    if len({fit.targets[i].row for i in seen}) < LEAST_RUNS:
        return np.array([math.log(elsewhere.get(name, NUMBERS[name][0])) for name in fit.names])
    logs = fit.logs.copy()
    residuals, weights, known = fit.residuals, fit.weights, [i for i in seen if np.isfinite(fit.predicted[i])]
    for _ in range(3):
        now = residuals + fit.slopes @ (logs - fit.logs)
        robust = (1.0 + (now * weights / _SCALE) ** 2) ** -0.5
        scale = (weights * robust)[known]
        matrix = fit.slopes[known] * scale[:, None]
        step = np.linalg.solve(matrix.T @ matrix + fit.prior, -(matrix.T @ (now[known] * scale)) - fit.prior @ (logs - start))
        logs = np.clip(logs + np.clip(step, -1.0, 1.0), lower, upper)
    return logs


def left_out_residuals(fit: EngineFit, by: str, elsewhere: Mapping[str, float]) -> tuple[Array, list[Array]]:
    """Return log(predicted / measured) of each target with its own label left out of the fit, and the numbers of each such fit."""
    if fit.is_borrowed:
        return fit.residuals, []
    residuals, fits = fit.residuals.copy(), []
    for split in leave_one_out([str(getattr(fit.rows[target.row].labels, by)) for target in fit.targets]):
        logs = left_out_logs(fit, split.seen, elsewhere)
        fits.append(logs)
        residuals[split.held_out] += (fit.slopes @ (logs - fit.logs))[split.held_out]
    return residuals, fits


def elsewhere(fits: Mapping[str, EngineFit], name: str) -> dict[str, float]:
    """Return the geometric mean of each number over the other engines that determine it."""
    numbers = [number for other, fit in fits.items() if other != name for number in zip(fit.names, fit.logs.tolist(), strict=True)]
    logs = grouped(numbers, lambda number: number[0])
    return {number: math.exp(float(np.mean([log for _, log in values]))) for number, values in logs.items()}


def left_out_of(fits: Mapping[str, EngineFit], by: str) -> Iterator[tuple[ServingRow, str, float]]:
    """Yield the run, metric and log(predicted / measured) of each target, with its own label left out of the fit of its engine."""
    for name, fit in fits.items():
        residuals, _ = left_out_residuals(fit, by, elsewhere(fits, name))
        for target, residual in zip(fit.targets, residuals.tolist(), strict=True):
            yield fit.rows[target.row], target.metric, residual


def with_ranges(fit: EngineFit, others: Sequence[Array]) -> tuple[EngineNumber, ...]:
    """others: the numbers of fits with one model left out each."""
    spread = np.array(others) if len(others) > 1 else fit.logs[None, :]
    low, high = np.quantile(spread, 0.1, axis=0), np.quantile(spread, 0.9, axis=0)
    half_width = 1.28 * _standard_errors(fit)
    return tuple(
        EngineNumber(
            name=name,
            value=rounded(math.exp(fit.logs[i]), DIGITS),
            low=rounded(max(math.exp(min(low[i], fit.logs[i] - half_width[i])), NUMBERS[name][1]), DIGITS),
            high=rounded(min(math.exp(max(high[i], fit.logs[i] + half_width[i])), NUMBERS[name][2]), DIGITS),
        )
        for i, name in enumerate(fit.names)
    )


def _standard_errors(fit: EngineFit) -> Array:
    """Return the standard errors of the logarithms, from the scatter of the residuals and the curvature."""
    known = np.isfinite(fit.predicted)
    weights = fit.weights[known]
    matrix = fit.slopes[known] * weights[:, None]
    scatter = float(np.median(np.abs(fit.residuals[known] * weights)) * 1.48) if known.any() else 0.0
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(matrix.T @ matrix + fit.prior))) * scatter)
