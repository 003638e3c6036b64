"""Clusters and numbers of chips for a training run: the front of time against cost, under a deadline and a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.training_run import TrainingRun
from perfmodel.foundation.frames import data_frame
from perfmodel.foundation.units import format_count
from perfmodel.hardware.chip_cluster import chips_text, short_name
from perfmodel.parallel.prediction import NotPredicted, Prediction
from perfmodel.parallel.rows import not_predicted_row, prediction_row
from perfmodel.parallel.training_run import SECONDS_OF_A_DAY
from perfmodel.search.select import front_of

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRun:
    """The best plan on one cluster with one number of chips, the same by time and by cost, and the run with it."""

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
        """With failures and checkpoints. [s]"""
        return self.run.wall_days * SECONDS_OF_A_DAY

    def __str__(self) -> str:
        return f"{chips_text(self.num_chips)} of {short_name(self.cluster)}: {self.run.wall_days:,.1f} days, {self.run.cost:,.0f} USD"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sizing:
    """Runs on several clusters and numbers of chips.

    deadline     wall time that a run may take; infinite: none given   [s]
    budget       cost that a run may have; infinite: none given        [USD]
    runs         of each cluster and number of chips, the fastest first
    front        runs that no other one beats in time and cost, the fastest first
    not_sized    clusters and numbers of chips without a run, and why
    notes        what was chosen where it was not given
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
        met = [each for each in self.front if each.wall_time <= self.deadline < math.inf]
        return met[-1] if met else None

    @property
    def fastest(self) -> SizedRun | None:
        """The fastest run within the budget; None where no budget is given or no run is within it."""
        return next((each for each in self.front if each.run.cost <= self.budget < math.inf), None)

    @property
    def best(self) -> SizedRun | None:
        """The cheapest run that meets the deadline within the budget, without a deadline the fastest; None where there is none."""
        met = [each for each in self.front if self.meets(each)]
        return (met[-1] if self.deadline < math.inf else met[0]) if met else None

    @property
    def nearest(self) -> SizedRun:
        """The run that exceeds deadline and budget by the least factor, the larger of the two."""
        return min(self.front, key=lambda each: max(each.wall_time / self.deadline, each.run.cost / self.budget))

    @property
    def reason(self) -> str:
        """One sentence where no run meets deadline and budget, with the nearest that does; else empty."""
        if self.best is not None:
            return ""
        limits = f" in {self.deadline / SECONDS_OF_A_DAY:,.4g} days" if self.deadline < math.inf else ""
        limits += f" for {self.budget:,.0f} USD" if self.budget < math.inf else ""
        tokens = format_count(self.nearest.run.tokens)
        return f"none of {len(self.runs):,} runs trains {tokens} tokens{limits}; the nearest is {self.nearest}"

    def meets(self, each: SizedRun) -> bool:
        """Whether a run ends by the deadline and costs no more than the budget."""
        return each.wall_time <= self.deadline and each.run.cost <= self.budget

    def mark(self, each: SizedRun) -> str:
        """Return how tables mark a run: `cheapest`, `fastest`, `yes` for others on the front, else nothing."""
        marks = [name for name, marked in (("cheapest", self.cheapest), ("fastest", self.fastest)) if each is marked]
        return ", ".join(marks) or ("yes" if each in self.front else "")

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each run, the fastest first, then one with its reason for each cluster without. Days, hours, J, kg, USD."""
        sized = [
            {"front": self.mark(each), "meets": self.meets(each)} | prediction_row(each.prediction) | each.run.to_dict()
            for each in self.runs
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
    ordered = tuple(sorted(runs, key=lambda each: (each.wall_time, each.run.cost)))
    times, costs = (np.array(values) for values in ([each.wall_time for each in ordered], [each.run.cost for each in ordered]))
    return Sizing(deadline=deadline, budget=budget, runs=ordered, front=tuple(ordered[place] for place in front_of(times, costs)))
