"""Fit of the allocator's reserve factor to measured peaks of memory: the estimate of step times, with one constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perfmodel.cost.assemble import PlanColumns, plan_columns
from perfmodel.cost.estimate import Estimator
from perfmodel.fitting.fit import Array, Mask, UserFit, UserRun, fit_some, moved_constant
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.uncertainty.priors import RESERVE, Behaviour, Constant
from perfmodel.validation.framework_patterns import MemoryFigures
from perfmodel.validation.step_times import estimator_of
from perfmodel.validation.validate import memory_figure

NOISE = 0.10
"""|log(predicted / measured)| of a run with the best factor: peaks of 14 sources of published runs (tests/golden) scatter by .08 to .15."""


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


def fit_memory(runs: Sequence[UserRun], base: ExecutionProfile) -> UserFit | None:
    """Fit the allocator's factor to runs whose peak was measured; None without such a run."""
    return fit_some(LogMemories(runs=runs, base=base), range(len(runs)), noise=NOISE) if runs else None
