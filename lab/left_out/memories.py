"""Memory constants of frameworks: allocator memory in addition to tensors, fitted to the figures that runs report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.cases import planned_cases
from lab.fit_profiles import FittedConstants, fit_constants
from perfmodel.cost.assemble import PlanColumns, plan_columns
from perfmodel.cost.estimate import Estimator
from perfmodel.uncertainty.priors import Constant
from perfmodel.uncertainty.residuals import shape_of
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import Case
from perfmodel.validation.validate import CasePredictor, memory_figure

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Memory constants of one profile.

    constants  fitted to the reported memory of its runs
    lends_to   profiles without reported memory that use these numbers too
    """

    constants: tuple[Constant, ...]
    lends_to: tuple[str, ...] = ()


#: A caching allocator reserves 1 to 1.5 times the transient memory; some tens of collectives wait on a launch queue of 1,024 kernels.
#: These are wide ranges: where a profile has hundreds of runs, the runs determine the value.
MEMORY_FITS: Mapping[str, MemoryFit] = MappingProxyType(
    {
        "nanotron": MemoryFit(
            constants=(
                Constant(name="reserve_factor", prior=1.15, spread=0.1, lower=1.0, upper=2.0),
                Constant(name="delayed_collectives", prior=50.0, spread=1.0, lower=1.0, upper=1024.0),
                Constant(name="waiting_gradient_fraction", prior=0.5, spread=0.3, lower=0.0, upper=1.0, is_ratio=False),
            ),
        ),
        "torchtitan": MemoryFit(constants=(Constant(name="reserve_factor", prior=1.15, spread=0.1, lower=1.0, upper=2.0),)),
        "megatron": MemoryFit(
            constants=(Constant(name="workspace_bytes", prior=64e6, spread=0.5, lower=1e6, upper=1e9),),
            lends_to=("llama-3", "megatron-rocm", "nemo"),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """A run with the memory that it reported. [byte]"""

    planned: PlannedCase
    measured: float

    @property
    def model(self) -> str:
        return shape_of(self.planned.plan.job.transformer)

    @property
    def chip(self) -> str:
        return self.planned.hardware.chip


def runs_with_memory(cases: Iterable[Case]) -> list[RunMemory]:
    """Return the runs with a reported memory, of profiles that are fitted to it."""
    has_memory = planned_cases(cases, lambda case: not (case.reason or case.has_experts or math.isnan(case.measured("memory"))))
    return [
        RunMemory(planned=planned, measured=case.measured("memory"))
        for case, planned in has_memory
        if planned.framework.profile in MEMORY_FITS and not planned.framework.borrows and "recompute" not in planned.assumed
    ]


@dataclass(slots=True, kw_only=True)
class Memories:
    """Memory of runs with constants of their profiles replaced.

    known   constants fitted to step times, by profile, in place of the shipped ones: the host's run-ahead affects memory too
    """

    runs: Sequence[RunMemory]
    known: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    predictor: CasePredictor = field(default_factory=lambda: CasePredictor(has_intervals=False))
    _columns: dict[int, tuple[RunMemory, PlanColumns]] = field(default_factory=dict)

    def of(self, name: str) -> list[RunMemory]:
        return [run for run in self.runs if run.planned.framework.profile == name]

    def estimator(self, run: RunMemory, values: Mapping[str, float]) -> Estimator:
        estimator = self.predictor.estimator(run.planned)
        moved: dict[str, Any] = {**self.known.get(run.planned.framework.profile, {}), **values}
        return replace(estimator, profile=estimator.profile.having(**moved))

    def figures(self, runs: Sequence[RunMemory], values: Mapping[str, float]) -> Array:
        """Return the memory that the framework would report, for each run. [byte]

        The columns of a plan are cached: the fitted constants do not change them.
        """
        figures = []
        for run in runs:
            estimator = self.estimator(run, values)
            if id(run) not in self._columns:
                self._columns[id(run)] = run, plan_columns(estimator, [run.planned.plan])
            figures.append(memory_figure(estimator, run.planned, self._columns[id(run)][1].of(estimator)))
        return np.array(figures)

    def fitted(self, name: str) -> FittedConstants:
        runs, fit = self.of(name), MEMORY_FITS[name]
        measured = np.array([run.measured for run in runs])
        return fit_constants(lambda values: np.log(self.figures(runs, values) / measured), fit.constants, num_runs=len(runs))
