"""The fit itself: a handful of habits, maximum a posteriori, and what the runs say of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import Provenance
from perfmodel.uncertainty.priors import ELEMENTWISE, SCATTER, Behaviour, Constant, behaviours_of, moved_fields, noise_of
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.run_machine import calibration_of_run
from perfmodel.validation.step_times import StepTimes

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Check = Callable[["Sequence[OwnRun]", Array], None]

TOLERANCE = 2.0
"""In noises: a run that is further off counts less than its square."""

_SCATTER_RUNS = 4.0
"""How many runs the expectation `SCATTER` counts for."""

_TRAFFIC = (1.001, 6.0)
"""Elementwise traffic that programs are compiled at: steps between lie on the line, to within the corners where overlap begins. At 1 a
framework's norms are one kernel of its own, which `compile=false` does not write out (`frameworks/settings.py`): off the line."""

_ROUNDS, _HALVINGS, _REWEIGHTINGS = 6, 4, 30
_STILL = 1e-3
_NEARLY, _NEARLY_SHARE = 0.2, 0.002
"""Less gain than this, in twice the logarithm of the likelihood or as a share of it, ends the descent."""

_HARDLY = 0.02
"""Of a noise: a constant that a spread moves no run by more is left where it is."""

_STEP = 0.1
"""Of a difference quotient, in spreads of the constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """A measured step of one's own.

    id        what to call it: its name in the file, else the file and its line
    profile   the profile that it is predicted with, by name
    measured  median of the steps after warm-up; nan: only its memory was measured  [s]
    memory    peak of the fullest rank; nan: not measured  [byte]
    memory_kind  what that counts: reserved (held by the allocator) or allocated (in tensors); "": as its framework reports it
    assumed   inputs that nobody said
    """

    id: str
    planned: PlannedCase
    measured: float
    profile: str = ""
    memory: float = math.nan
    memory_kind: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


class LogFigures(Protocol):
    """Predicted and measured figures of runs, as logarithms, and how the predicted ones move with constants of the profile.

    start   the constants of the base, by name
    """

    @property
    def base(self) -> ExecutionProfile: ...
    @property
    def behaviours(self) -> Sequence[Behaviour]: ...
    @property
    def constants(self) -> tuple[Constant, ...]: ...
    @property
    def start(self) -> dict[str, float]: ...
    @property
    def log_measured(self) -> Array: ...

    def at(self, values: Mapping[str, float], chosen: Sequence[int] | None = None) -> Array:
        """log(predicted) of all runs, or of some."""
        ...

    def slopes(self, values: Mapping[str, float], chosen: Sequence[int] | None = None, wanted: Mask | None = None) -> Array:
        """Derivative of each run's log(predicted) by each constant, per standard deviation of its prior  [runs, constants].

        wanted   constants; 0 for the others
        """
        ...


@dataclass(slots=True, kw_only=True)
class LogTimes:
    """log(predicted time) of runs at values of the habits, and how it moves with each.

    Programs are compiled at two values of elementwise traffic and no others; steps at other values lie on the line between.
    """

    runs: Sequence[OwnRun]
    base: ExecutionProfile
    behaviours: Sequence[Behaviour]
    constants: tuple[Constant, ...] = ()
    times: StepTimes = field(init=False)
    _asked: Any = None
    _told: tuple[Array, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.times = StepTimes(runs=self.runs, load=lambda name: self.base)
        self.constants = self.constants or tuple(behaviour.constant(self.base) for behaviour in self.behaviours)

    @property
    def start(self) -> dict[str, float]:
        """The habits of the base."""
        return {constant.name: constant.prior for constant in self.constants}

    @property
    def log_measured(self) -> Array:
        return np.log([run.measured for run in self.runs])

    def at(self, values: Mapping[str, float], chosen: Sequence[int] | None = None) -> Array:
        chosen = range(len(self.runs)) if chosen is None else chosen
        below, above, share = self._between(values, chosen)
        return np.log(np.maximum(below + (above - below) * share, below * 0.1))

    def slopes(self, values: Mapping[str, float], chosen: Sequence[int] | None = None, wanted: Mask | None = None) -> Array:
        chosen = range(len(self.runs)) if chosen is None else chosen
        below, above, share = self._between(values, chosen)
        near, here = (_TRAFFIC[0], below) if share < 0.5 else (_TRAFFIC[1], above)
        columns = []
        for index, (behaviour, constant) in enumerate(zip(self.behaviours, self.constants, strict=True)):
            if (wanted is not None and not wanted[index]) or not any(self._touches(behaviour, each) for each in chosen):
                columns.append(np.zeros(len(chosen)))
                continue
            moved, taken = moved_constant(constant, values[behaviour.name])
            if behaviour.name == ELEMENTWISE:
                there = below + (above - below) * _share(moved)
                columns.append(np.log(there / (below + (above - below) * share)) / taken)
            else:
                there = self.times.predict(chosen, self._fields({**values, behaviour.name: moved, ELEMENTWISE: near}))
                columns.append(np.log(there / here) / taken)
        return np.stack(columns, axis=1)

    def _touches(self, behaviour: Behaviour, index: int) -> bool:
        planned = self.runs[index].planned
        return behaviour.touches(planned.plan, planned.matmul_dtype)

    def _between(self, values: Mapping[str, float], chosen: Sequence[int]) -> tuple[Array, Array, float]:
        """Times at the two traffics, and where between them the values are."""
        key = (tuple(chosen), tuple((name, value) for name, value in values.items() if name != ELEMENTWISE))
        if key != self._asked:
            below, above = (self.times.predict(chosen, self._fields({**values, ELEMENTWISE: each})) for each in _TRAFFIC)
            self._asked, self._told = key, (below, above)
        return *self._told, _share(values[ELEMENTWISE])

    def _fields(self, values: Mapping[str, float]) -> dict[str, float]:
        return moved_fields(self.behaviours, self.base, values)


def _share(traffic: float) -> float:
    low, high = _TRAFFIC
    return (traffic - low) / (high - low)


def moved_constant(constant: Constant, value: float) -> tuple[float, float]:
    """The constant moved to where the bounds leave room, and by how many spreads."""
    here = constant.spreads(value)
    step = _STEP if constant.value(here + _STEP) < constant.upper else -_STEP
    moved = constant.value(here + step)
    return moved, (constant.spreads(moved) - here) or math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """Posterior of the constants after a fit, to first order.

    slopes      of each run's log(predicted time) in each constant, a spread of its prior  [runs, constants]
    weights     of each run: 1, less for one that lies far off
    covariance  of the constants, in spreads of their priors: 1 on the diagonal where the runs say nothing  [constants, constants]
    """

    slopes: Array
    weights: Array
    covariance: Array

    def variance(self, slopes: Array) -> Array:
        """Variance of log(predicted time) of plans with these slopes, from the constants  [plans]."""
        return np.asarray(np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnFit:
    """Result of a fit of a profile to runs.

    values      of the habits, by name          noise  |log(predicted / measured)| of a further run with these habits
    before      log(predicted / measured) of each run with the base profile       after  the same as fitted
    left_out    the same by the other runs alone
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
        """Standard deviation of log(predicted / measured) of plans with these slopes  [plans, constants]."""
        return np.sqrt(self.posterior.variance(slopes) + self.noise**2)


def fit_own(runs: Sequence[OwnRun], base: ExecutionProfile, *, check: Check = lambda runs, errors: None) -> OwnFit:
    """Habits of one framework from its runs, `base` where these say nothing. check: sees the errors of the base before the fit."""
    is_measured = any(calibration_of_run(run.planned.hardware).provenance is not Provenance.SPEC_SHEET for run in runs)
    log_times = LogTimes(runs=runs, base=base, behaviours=behaviours_of(measured=is_measured))
    check(runs, log_times.at(log_times.start) - log_times.log_measured)
    return fit_some(log_times, range(len(runs)))


def mean_error(log_errors: Array) -> float:
    """Mean of |predicted / measured - 1|; nan without a run."""
    return float(np.abs(np.expm1(log_errors)).mean()) if len(log_errors) else math.nan


def fit_some(figures: LogFigures, chosen: Sequence[int], *, noise: float | None = None) -> OwnFit:
    """The same from some of the runs. noise: |log(predicted / measured)| with the best constants; None: that of step times."""
    noise = noise or noise_of(len(chosen))
    log_measured = figures.log_measured[list(chosen)]
    values, known = most_likely(figures, log_measured, chosen, noise=noise)
    after = figures.at(values, chosen) - log_measured
    left_out = _left_out(after, known, noise)
    return OwnFit(
        base=figures.base,
        behaviours=tuple(figures.behaviours),
        constants=figures.constants,
        values=values,
        posterior=known,
        noise=_scatter(left_out, known),
        before=figures.at(figures.start, chosen) - log_measured,
        after=after,
        left_out=left_out,
    )


def most_likely(figures: LogFigures, log_measured: Array, chosen: Sequence[int], *, noise: float) -> tuple[dict[str, float], Posterior]:
    """The values for which the chosen runs and the priors are likeliest together, and what is then known of them.

    Minimises  sum_i 2 t^2 (sqrt(1 + (e_i / t s)^2) - 1) + sum_j z_j^2  by Gauss-Newton steps within the bounds, halved while they lead up:
    e_i  log(predicted / measured) of run i;  s  noise;  t  TOLERANCE;  z_j  spreads of constant j from its prior.
    """
    constants = figures.constants
    lowest = np.array([constant.spreads(constant.lower) for constant in constants])
    highest = np.array([constant.spreads(constant.upper) for constant in constants])

    def values(z: Array) -> dict[str, float]:
        return {constant.name: constant.value(float(x)) for constant, x in zip(constants, z, strict=True)}

    def errors(z: Array) -> Array:
        return figures.at(values(z), chosen) - log_measured

    z = np.clip(np.zeros(len(constants)), lowest, highest)
    here, moves = errors(z), np.ones(len(constants), dtype=bool)
    for _ in range(_ROUNDS):
        slopes = figures.slopes(values(z), chosen, moves)
        moves = np.abs(slopes).max(axis=0, initial=0.0) > _HARDLY * noise  # what moves nothing now is looked at again in the end
        step, was = _straight_ahead(slopes, here, z, (lowest, highest), noise), _loss(here, z, noise)
        for _ in range(_HALVINGS):
            moved = np.clip(z + step, lowest, highest)
            there = errors(moved)
            if _loss(there, moved, noise) < was:
                break
            step = step / 2.0
        else:
            break
        z, here = moved, there
        if was - _loss(here, z, noise) < max(_NEARLY, _NEARLY_SHARE * was):
            break
    slopes = np.where(moves, slopes, figures.slopes(values(z), chosen, ~moves))
    weights = _weights(here, noise)
    information = np.eye(len(z)) + slopes.T @ (slopes * weights[:, None]) / noise**2
    covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
    return values(z), Posterior(slopes=slopes, weights=weights, covariance=covariance)


def _weights(errors: Array, noise: float) -> Array:
    """1 for a run within the tolerance, less beyond it."""
    return np.asarray(1.0 / np.sqrt(1.0 + (errors / (noise * TOLERANCE)) ** 2))


def _loss(errors: Array, z: Array, noise: float) -> float:
    return float(2 * TOLERANCE**2 * (1.0 / _weights(errors, noise) - 1.0).sum() + z @ z)


def _straight_ahead(slopes: Array, errors: Array, z: Array, bounds: tuple[Array, Array], noise: float) -> Array:
    """The step to where the loss would be least if runs moved as `slopes` say, by weights that follow the errors."""
    lowest, highest = bounds
    there = z
    for _ in range(_REWEIGHTINGS):
        left = errors + slopes @ (there - z)
        weighted = slopes * _weights(left, noise)[:, None] / noise**2
        information = np.eye(len(z)) + slopes.T @ weighted
        uphill = there + weighted.T @ left
        free = ~(((there <= lowest) & (uphill > 0)) | ((there >= highest) & (uphill < 0)))
        step = np.zeros(len(z))
        step[free] = -np.linalg.solve(information[np.ix_(free, free)], uphill[free])
        moved = np.clip(there + step, lowest, highest)
        if np.abs(moved - there).max() < _STILL:
            return moved - z
        there = moved
    return there - z


def _left_out(errors: Array, known: Posterior, noise: float) -> Array:
    """Errors of each run by the fit without it, to first order: e_i / (1 - h_i), h_i what the run itself adds to its prediction."""
    own = known.variance(known.slopes) * known.weights / noise**2
    return errors / np.maximum(1.0 - own, 1e-3)


def _scatter(left_out: Array, known: Posterior) -> float:
    """Scatter of a further run: its prior, and the scatter of left-out runs beyond the variance of the constants."""
    beyond = np.maximum(left_out**2 * known.weights - known.variance(known.slopes), 0.0)
    return math.sqrt((_SCATTER_RUNS * SCATTER**2 + float(beyond.sum())) / (_SCATTER_RUNS + len(left_out)))
