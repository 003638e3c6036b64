"""Step times of runs that are planned once and predicted repeatedly with other constants of their framework, for fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assemble import PlanColumns, plan_columns, step_columns
from perfmodel.cost.estimate import Estimator, make_estimator, with_kept_programs
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.plain import picked
from perfmodel.frameworks.options import GROUP_OF
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.settings import with_settings
from perfmodel.validation.case_plan import PlannedCase, load_profile_once
from perfmodel.validation.run_machine import cluster_of_run, machine_of_run

Array = NDArray[np.float64]


class PlannedRun(Protocol):
    """Input of a fit: a planned run. profile: name of the profile that predicts it."""

    @property
    def planned(self) -> PlannedCase: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def profile(self) -> str: ...


def estimator_of(run: PlannedRun, profile: ExecutionProfile) -> Estimator:
    """Return the estimator of the run's plan, and of its memory, with that profile."""
    return estimator_with(run, with_settings(profile, run.settings))


def estimator_with(run: PlannedRun, profile: ExecutionProfile) -> Estimator:
    """Return the estimator of the run's plan, with a profile that has the run's settings."""
    hardware = run.planned.hardware
    return make_estimator(run.planned.plan.job, cluster_of_run(hardware), machine_of_run(hardware, run.planned.matmul_dtype), profile)


_MOST_COLUMNS = 4096
"""Limit of cached columns, about 25 kB each."""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Predictor of runs with changed constants. Runs that differ in columns only are evaluated together.

    load       loader of a profile by name
    _columns   columns by programs, hardware, rates and runs: most constants of a fit do not change them
    """

    runs: Sequence[PlannedRun]
    load: Callable[[str], ExecutionProfile] = load_profile_once
    _columns: dict[Any, PlanColumns] = field(default_factory=dict)

    def predict(self, chosen: Sequence[int], values: Mapping[str, float]) -> Array:
        """Return the step time of each chosen run. `values`: profile fields by name; all others stay as shipped. [s]"""
        unknown = [name for name in values if name not in GROUP_OF]
        if unknown:
            raise InputError(f"constant={unknown[0]}: no option of an execution profile; name one")

        def estimator_key(position: int) -> tuple[Any, ...]:
            run = self.runs[chosen[position]]
            job, behaviours = run.planned.plan.job, (run.profile, repr(sorted(run.settings.items(), key=str)))
            return job.transformer, job.seq_len, job.precision, job.optimizer, behaviours, run.planned.hardware, run.planned.matmul_dtype

        def columns_key(position: int) -> tuple[Any, ...]:
            plan = self.runs[chosen[position]].planned.plan
            alike = picked(plan, "sharding attention recompute recompute_operators zero schedule order sequence_parallel")
            return (*alike.values(), plan.layout.pp > 1)

        moved, times = dict(values), np.empty(len(chosen))
        for same_job in grouped(range(len(chosen)), estimator_key).values():
            run = self.runs[chosen[same_job[0]]]
            profile = with_settings(self.load(run.profile).having(**moved), run.settings)
            estimator = with_kept_programs(estimator_with(run, profile))
            estimator = replace(estimator, programs=replace(estimator.programs, recomputes=()))
            for positions in grouped(same_job, columns_key).values():
                together = tuple(chosen[position] for position in positions)
                plans = [self.runs[index].planned.plan for index in together]
                kept_by = (estimator.programs.compiled, run.planned.hardware, run.planned.matmul_dtype, estimator.profile.rates, together)
                columns = self._columns.get(kept_by)
                if columns is None:
                    if len(self._columns) >= _MOST_COLUMNS:
                        self._columns.clear()
                    columns = self._columns[kept_by] = plan_columns(estimator, plans)
                times[positions] = step_columns(estimator, plans, columns.of(estimator)).step_time
        return times
