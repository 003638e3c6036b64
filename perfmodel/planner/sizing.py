"""Clusters and numbers of chips for a training run: the Pareto front of time and cost, under a deadline and a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.training_run import TrainingRun
from perfmodel.foundation.frames import data_frame
from perfmodel.foundation.units import format_count
from perfmodel.hardware.cluster_text import chips_text, short_name
from perfmodel.parallel.prediction import NotPredicted, Prediction
from perfmodel.parallel.rows import not_predicted_row, prediction_row
from perfmodel.parallel.training_run import SECONDS_OF_A_DAY
from perfmodel.search.select import front_of

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRun:
    """The best plan on one cluster with one number of chips, the same by time and by cost, and its run."""

    prediction: Prediction
    run: TrainingRun

    @property
    def cluster(self) -> str:
        return self.prediction.plan.cluster

    @property
    def num_chips(self) -> int:
        return self.prediction.plan.num_chips

    @property
    def wall_time(self) -> float:
        """Wall time with failures and checkpoints. [s]"""
        return self.run.wall_days * SECONDS_OF_A_DAY

    def __str__(self) -> str:
        return f"{chips_text(self.num_chips)} of {short_name(self.cluster)}: {self.run.wall_days:,.1f} days, {self.run.cost:,.0f} USD"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sizing:
    """Runs on several clusters and numbers of chips.

    deadline     largest wall time of a run; infinite: none given   [s]
    budget       largest cost of a run; infinite: none given        [USD]
    runs         one per cluster and number of chips, the fastest first
    front        runs that no other one dominates in time and cost, the fastest first
    not_sized    clusters and numbers of chips without a run, and why
    notes        defaults that were chosen
    """

    deadline: float
    budget: float
    runs: tuple[SizedRun, ...]
    front: tuple[SizedRun, ...]
    not_sized: tuple[NotPredicted, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def cheapest(self) -> SizedRun | None:
        """The cheapest run that meets the deadline; None where no deadline is given or no run meets it."""
        met = [candidate for candidate in self.front if candidate.wall_time <= self.deadline < math.inf]
        return met[-1] if met else None

    @property
    def fastest(self) -> SizedRun | None:
        """The fastest run within the budget; None where no budget is given or no run is within it."""
        return next((candidate for candidate in self.front if candidate.run.cost <= self.budget < math.inf), None)

    @property
    def best(self) -> SizedRun | None:
        """The cheapest run that meets the deadline within the budget, without a deadline the fastest; None where there is none."""
        met = [candidate for candidate in self.front if self.meets(candidate)]
        return (met[-1] if self.deadline < math.inf else met[0]) if met else None

    @property
    def nearest(self) -> SizedRun:
        """The run that exceeds deadline and budget by the least factor, the larger of the two."""
        return min(self.front, key=lambda candidate: max(candidate.wall_time / self.deadline, candidate.run.cost / self.budget))

    @property
    def reason(self) -> str:
        """Why no run meets deadline and budget, in one sentence with the nearest run; empty if one does."""
        if self.best is not None:
            return ""
        limits = f" in {self.deadline / SECONDS_OF_A_DAY:,.4g} days" if self.deadline < math.inf else ""
        limits += f" for {self.budget:,.0f} USD" if self.budget < math.inf else ""
        tokens = format_count(self.nearest.run.tokens)
        return f"none of {len(self.runs):,} runs trains {tokens} tokens{limits}; the nearest is {self.nearest}"

    def meets(self, candidate: SizedRun) -> bool:
        """Whether a run ends by the deadline and costs no more than the budget."""
        return candidate.wall_time <= self.deadline and candidate.run.cost <= self.budget

    def mark(self, candidate: SizedRun) -> str:
        """Return the mark of a run in tables: `cheapest`, `fastest`, `yes` for others on the front, else nothing."""
        marks = [name for name, marked in (("cheapest", self.cheapest), ("fastest", self.fastest)) if candidate is marked]
        return ", ".join(marks) or ("yes" if candidate in self.front else "")

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per run, the fastest first, then one with its reason per cluster without a run. Days, hours, J, kg, USD."""
        sized = [
            {"front": self.mark(candidate), "meets": self.meets(candidate)} | prediction_row(candidate.prediction) | candidate.run.to_dict()
            for candidate in self.runs
        ]
        return [*sized, *map(not_predicted_row, self.not_sized)]

    def to_frame(self) -> DataFrame:
        """Return `rows` as a data frame."""
        return data_frame(self.rows())

    def __str__(self) -> str:
        return "\n".join([f"{len(self.runs):,} runs; the front of time and cost:", *map(str, self.front)])

    __repr__ = __str__


def size_runs(runs: Sequence[SizedRun], *, deadline: float = math.inf, budget: float = math.inf) -> Sizing:
    """Return the runs in order, with their front of time and cost."""
    ordered = tuple(sorted(runs, key=lambda candidate: (candidate.wall_time, candidate.run.cost)))
    times, costs = np.array([sized.wall_time for sized in ordered]), np.array([sized.run.cost for sized in ordered])
    return Sizing(deadline=deadline, budget=budget, runs=ordered, front=tuple(ordered[index] for index in front_of(times, costs)))
