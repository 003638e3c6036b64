"""Maximum a posteriori fit of a few framework parameters to runs, and the posterior of each.

Step times determine the parameters of time; peaks of memory determine one, the allocator's reserve factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assemble import PlanColumns, plan_columns
from perfmodel.cost.estimate import Estimator
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import Provenance
from perfmodel.uncertainty.priors import ELEMENTWISE, RESERVE, SCATTER, Behaviour, Constant, behaviours_of, moved_fields, noise_of
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.framework_patterns import MemoryFigures
from perfmodel.validation.run_machine import calibration_of_run
from perfmodel.validation.step_times import StepTimes, estimator_of
from perfmodel.validation.validate import memory_figure

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Check = Callable[["Sequence[UserRun]", Array], None]

TOLERANCE = 2.0
"""In standard deviations of the noise: a run that is further off counts less than its square."""

_SCATTER_RUNS = 4.0
"""Weight of the prior `SCATTER`, in runs."""

_TRAFFIC = (1.001, 6.0)
"""Elementwise traffic at which programs are compiled; steps between are interpolated, exactly except for the corners where overlap begins.
At 1 a framework's norms are one fused kernel, which `compile=false` does not decompose (`frameworks/settings.py`): off the line.
"""

_ROUNDS, _HALVINGS, _REWEIGHTINGS = 6, 4, 30
_CONVERGED = 1e-3
_LEAST_GAIN, _LEAST_GAIN_SHARE = 0.2, 0.002
"""A smaller gain, in twice the log-likelihood or as a share of it, ends the descent."""

_INSENSITIVE = 0.02
"""Share of the noise: a constant whose standard deviation changes every run by less stays fixed."""

_STEP = 0.1
"""Step of a difference quotient, in standard deviations of the constant."""

_PEAK_NOISE = 0.10
"""|log(predicted / measured)| of a run with the best factor: peaks of 14 sources of published runs (tests/golden) scatter by .08 to .15."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRun:
    """A measured step of the user's.

    id           its name in the file, else the file and the line
    profile      name of the profile that predicts it
    measured     median of the steps after warm-up; nan: only its memory was measured  [s]
    memory       peak of the fullest rank; nan: not measured  [byte]
    memory_kind  reserved (held by the allocator) or allocated (in tensors); "": as its framework reports it
    assumed      inputs that were not given
    """

    id: str
    planned: PlannedCase
    measured: float
    profile: str = ""
    memory: float = math.nan
    memory_kind: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class LogTimes:
    """log(predicted time) of runs as a function of the parameters, and its derivatives.

    Programs are compiled at two values of elementwise traffic only; steps at other values are interpolated.
    """

    runs: Sequence[UserRun]
    base: ExecutionProfile
    behaviours: Sequence[Behaviour]
    constants: tuple[Constant, ...] = ()
    times: StepTimes = field(init=False)
    _endpoints_key: Any = None
    _endpoints: tuple[Array, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.times = StepTimes(runs=self.runs, load=lambda name: self.base)
        self.constants = self.constants or tuple(behaviour.constant(self.base) for behaviour in self.behaviours)

    @property
    def start(self) -> dict[str, float]:
        """Parameter values of the base profile."""
        return {constant.name: constant.prior for constant in self.constants}

    @property
    def log_measured(self) -> Array:
        return np.log([run.measured for run in self.runs])

    def at(self, values: Mapping[str, float], chosen: Sequence[int] | None = None) -> Array:
        """Return log(predicted) of all runs, or of the chosen ones."""
        chosen = range(len(self.runs)) if chosen is None else chosen
        below, above, share = self._between(values, chosen)
        return np.log(np.maximum(below + (above - below) * share, below * 0.1))

    def slopes(self, values: Mapping[str, float], chosen: Sequence[int] | None = None, wanted: Mask | None = None) -> Array:
        """Return the derivative of each run's log(predicted) by each constant, per standard deviation of its prior  [runs, constants].

        wanted   constants to differentiate; 0 for the others
        """
        chosen = range(len(self.runs)) if chosen is None else chosen
        below, above, share = self._between(values, chosen)
        near, nearest_times = (_TRAFFIC[0], below) if share < 0.5 else (_TRAFFIC[1], above)
        planned, columns = [self.runs[index].planned for index in chosen], []
        for index, (behaviour, constant) in enumerate(zip(self.behaviours, self.constants, strict=True)):
            is_wanted = wanted is None or wanted[index]
            if not is_wanted or not any(behaviour.touches(run.plan, run.matmul_dtype) for run in planned):
                columns.append(np.zeros(len(chosen)))
                continue
            moved, spreads = moved_constant(constant, values[behaviour.name])
            if behaviour.name == ELEMENTWISE:
                moved_times = below + (above - below) * _share(moved)
                columns.append(np.log(moved_times / (below + (above - below) * share)) / spreads)
            else:
                moved_times = self.times.predict(chosen, self._fields({**values, behaviour.name: moved, ELEMENTWISE: near}))
                columns.append(np.log(moved_times / nearest_times) / spreads)
        return np.stack(columns, axis=1)

    def _between(self, values: Mapping[str, float], chosen: Sequence[int]) -> tuple[Array, Array, float]:
        """Return the times at the two traffics, and the interpolation weight of the values."""
        key = (tuple(chosen), tuple((name, value) for name, value in values.items() if name != ELEMENTWISE))
        if key != self._endpoints_key:
            below, above = (self.times.predict(chosen, self._fields({**values, ELEMENTWISE: traffic})) for traffic in _TRAFFIC)
            self._endpoints_key, self._endpoints = key, (below, above)
        return *self._endpoints, _share(values[ELEMENTWISE])

    def _fields(self, values: Mapping[str, float]) -> dict[str, float]:
        return moved_fields(self.behaviours, self.base, values)


@dataclass(slots=True, kw_only=True)
class LogMemories:
    """log(predicted peak) of runs as a function of the allocator's factor, as `LogTimes` is of step times.

    A figure of tensors alone (`allocated`) does not depend on the factor: it is compared, and adds no information about it.
    """

    runs: Sequence[UserRun]
    base: ExecutionProfile
    behaviours: Sequence[Behaviour] = (RESERVE,)
    _columns: dict[int, tuple[Estimator, PlanColumns]] = field(default_factory=dict)

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (RESERVE.constant(self.base),)

    @property
    def start(self) -> dict[str, float]:
        return {RESERVE.name: self.constants[0].prior}

    @property
    def log_measured(self) -> Array:
        return np.log([run.memory for run in self.runs])

    def at(self, values: Mapping[str, float], chosen: Sequence[int] | None = None) -> Array:
        peaks = []  # that the frameworks would report  [byte]
        for index in range(len(self.runs)) if chosen is None else chosen:
            run, planned = self.runs[index], self.runs[index].planned
            if index not in self._columns:
                estimator = estimator_of(run, self.base)
                self._columns[index] = estimator, plan_columns(estimator, [planned.plan])
            estimator, columns = self._columns[index]
            estimator = replace(estimator, profile=estimator.profile.having(reserve_factor=values[RESERVE.name]))
            if run.memory_kind:
                figures = MemoryFigures(memory_kind=run.memory_kind, memory_rank="fullest")
                planned = replace(planned, framework=replace(planned.framework, figures=figures))
            peaks.append(memory_figure(estimator, planned, columns.of(estimator)))
        return np.log(peaks)

    def slopes(self, values: Mapping[str, float], chosen: Sequence[int] | None = None, wanted: Mask | None = None) -> Array:
        moved, spreads = moved_constant(self.constants[0], values[RESERVE.name])
        return np.asarray((self.at({RESERVE.name: moved}, chosen) - self.at(values, chosen)) / spreads)[:, None]


LogFigures: TypeAlias = LogTimes | LogMemories


def _share(traffic: float) -> float:
    low, high = _TRAFFIC
    return (traffic - low) / (high - low)


def moved_constant(constant: Constant, value: float) -> tuple[float, float]:
    """Return the constant moved by a step within its bounds, and the step in standard deviations."""
    current = constant.spreads(value)
    step = _STEP if constant.value(current + _STEP) < constant.upper else -_STEP
    moved = constant.value(current + step)
    return moved, (constant.spreads(moved) - current) or math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """Posterior of the constants after a fit, to first order.

    slopes      of each run's log(predicted time) by each constant, per standard deviation of its prior  [runs, constants]
    weights     of each run: 1, less for an outlier
    covariance  of the constants, in standard deviations of their priors: 1 on the diagonal without information  [constants, constants]
    """

    slopes: Array
    weights: Array
    covariance: Array

    def variance(self, slopes: Array) -> Array:
        """Return the variance of log(predicted time) of plans with these slopes, from the constants  [plans]."""
        return np.asarray(np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UserFit:
    """Result of a fit of a profile to runs.

    values      fitted parameters, by name
    noise       standard deviation of log(predicted / measured) of a further run with these parameters
    before      log(predicted / measured) of each run with the base profile
    after       the same with the fitted profile
    left_out    the same, each run predicted from the others
    """

    base: ExecutionProfile
    behaviours: tuple[Behaviour, ...]
    constants: tuple[Constant, ...]
    values: Mapping[str, float]
    posterior: Posterior
    noise: float
    before: Array
    after: Array
    left_out: Array

    @property
    def profile(self) -> ExecutionProfile:
        return self.base.having(**moved_fields(self.behaviours, self.base, self.values))  # type: ignore[arg-type]

    def spread(self, slopes: Array) -> Array:
        """Return the standard deviation of log(predicted / measured) of plans with these slopes  [plans, constants]."""
        return np.sqrt(self.posterior.variance(slopes) + self.noise**2)


def fit_own(runs: Sequence[UserRun], base: ExecutionProfile, *, check: Check = lambda runs, errors: None) -> UserFit:
    """Fit the parameters of one framework to its runs; the base profile sets the priors.

    check   called with the errors of the base before the fit
    """
    is_measured = any(calibration_of_run(run.planned.hardware).provenance is not Provenance.SPEC_SHEET for run in runs)
    log_times = LogTimes(runs=runs, base=base, behaviours=behaviours_of(measured=is_measured))
    check(runs, log_times.at(log_times.start) - log_times.log_measured)
    return fit_some(log_times, range(len(runs)))


def fit_memory(runs: Sequence[UserRun], base: ExecutionProfile) -> UserFit | None:
    """Fit the allocator's factor to runs whose peak was measured; None without such a run."""
    return fit_some(LogMemories(runs=runs, base=base), range(len(runs)), noise=_PEAK_NOISE) if runs else None


def mean_error(log_errors: Array) -> float:
    """Mean of |predicted / measured - 1|; nan without a run."""
    return float(np.abs(np.expm1(log_errors)).mean()) if len(log_errors) else math.nan


def fit_some(figures: LogFigures, chosen: Sequence[int], *, noise: float | None = None) -> UserFit:
    """Fit the constants to the chosen runs.

    noise   |log(predicted / measured)| with the best constants; None: that of step times
    """
    noise = noise or noise_of(len(chosen))
    log_measured = figures.log_measured[list(chosen)]
    values, posterior = most_likely(figures, log_measured, chosen, noise=noise)
    after = figures.at(values, chosen) - log_measured
    # leave-one-out errors to first order: e_i / (1 - h_i), with the leverage h_i of the run
    leverage = posterior.variance(posterior.slopes) * posterior.weights / noise**2
    left_out = after / np.maximum(1.0 - leverage, 1e-3)
    # scatter of a further run: its prior, and the scatter of left-out runs beyond the variance of the constants
    beyond = np.maximum(left_out**2 * posterior.weights - posterior.variance(posterior.slopes), 0.0)
    return UserFit(
        base=figures.base,
        behaviours=tuple(figures.behaviours),
        constants=figures.constants,
        values=values,
        posterior=posterior,
        noise=math.sqrt((_SCATTER_RUNS * SCATTER**2 + float(beyond.sum())) / (_SCATTER_RUNS + len(left_out))),
        before=figures.at(figures.start, chosen) - log_measured,
        after=after,
        left_out=left_out,
    )


def most_likely(figures: LogFigures, log_measured: Array, chosen: Sequence[int], *, noise: float) -> tuple[dict[str, float], Posterior]:
    """Return the maximum a posteriori values of the constants given the chosen runs, and their posterior.

    Minimises  sum_i 2 t^2 (sqrt(1 + (e_i / t s)^2) - 1) + sum_j z_j^2  by Gauss-Newton steps within the bounds, halved while it grows:
    e_i  log(predicted / measured) of run i;  s  noise;  t  TOLERANCE;  z_j  distance of constant j from its prior in standard deviations.
    """
    constants = figures.constants
    lowest = np.array([constant.spreads(constant.lower) for constant in constants])
    highest = np.array([constant.spreads(constant.upper) for constant in constants])

    def values(z: Array) -> dict[str, float]:
        return {constant.name: constant.value(float(x)) for constant, x in zip(constants, z, strict=True)}

    def errors(z: Array) -> Array:
        return figures.at(values(z), chosen) - log_measured

    z = np.clip(np.zeros(len(constants)), lowest, highest)
    current_errors, moves = errors(z), np.ones(len(constants), dtype=bool)
    for _ in range(_ROUNDS):
        slopes = figures.slopes(values(z), chosen, moves)
        # insensitive constants get their slopes again after the descent
        moves = np.abs(slopes).max(axis=0, initial=0.0) > _INSENSITIVE * noise
        step, loss_before = _gauss_newton_step(slopes, current_errors, z, (lowest, highest), noise), _loss(current_errors, z, noise)
        for _ in range(_HALVINGS):
            moved = np.clip(z + step, lowest, highest)
            moved_errors = errors(moved)
            if _loss(moved_errors, moved, noise) < loss_before:
                break
            step = step / 2.0
        else:
            break
        z, current_errors = moved, moved_errors
        if loss_before - _loss(current_errors, z, noise) < max(_LEAST_GAIN, _LEAST_GAIN_SHARE * loss_before):
            break
    slopes = np.where(moves, slopes, figures.slopes(values(z), chosen, ~moves))
    weights = _weights(current_errors, noise)
    information = np.eye(len(z)) + slopes.T @ (slopes * weights[:, None]) / noise**2
    covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
    return values(z), Posterior(slopes=slopes, weights=weights, covariance=covariance)


def _weights(errors: Array, noise: float) -> Array:
    """Return the weights: 1 for a run within the tolerance, less beyond it."""
    return np.asarray(1.0 / np.sqrt(1.0 + (errors / (noise * TOLERANCE)) ** 2))


def _loss(errors: Array, z: Array, noise: float) -> float:
    return float(2 * TOLERANCE**2 * (1.0 / _weights(errors, noise) - 1.0).sum() + z @ z)


def _gauss_newton_step(slopes: Array, errors: Array, z: Array, bounds: tuple[Array, Array], noise: float) -> Array:
    """Return the Gauss-Newton step: to the minimum of the loss with linear predictions, by iteratively reweighted least squares."""
    lowest, highest = bounds
    candidate = z
    for _ in range(_REWEIGHTINGS):
        left = errors + slopes @ (candidate - z)
        weighted = slopes * _weights(left, noise)[:, None] / noise**2
        information = np.eye(len(z)) + slopes.T @ weighted
        uphill = candidate + weighted.T @ left
        free = ~(((candidate <= lowest) & (uphill > 0)) | ((candidate >= highest) & (uphill < 0)))
        step = np.zeros(len(z))
        step[free] = -np.linalg.solve(information[np.ix_(free, free)], uphill[free])
        moved = np.clip(candidate + step, lowest, highest)
        if np.abs(moved - candidate).max() < _CONVERGED:
            return moved - z
        candidate = moved
    return candidate - z
