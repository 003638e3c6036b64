"""Search results: best plans, baselines, Pareto front, and reasons of rejected plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.frames import data_frame
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction, predictions_html, predictions_text
from perfmodel.planner.rows import search_rows

if TYPE_CHECKING:
    from perfmodel.cost.machine import ChipMemory
    from perfmodel.foundation.frames import DataFrame
    from perfmodel.foundation.memory_headroom import MemoryRule


class Objective(StrEnum):
    TIME = "time"
    MEMORY = "memory"
    CHIP_TIME = "chip-time"
    COST = "cost"
    ENERGY = "energy"
    GOODPUT_TIME = "goodput-time"

    @property
    def is_of_run(self) -> bool:
        """Whether it is a total of the whole run. On given chips each of these increases with the step time, which ranks the plans."""
        return self in (Objective.COST, Objective.ENERGY, Objective.GOODPUT_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A well-known plan, shown even if it is slower or does not fit. `reason` is why there is none (prediction empty)."""

    name: str
    prediction: tuple[Prediction, ...]
    reason: str

    @property
    def fits(self) -> bool:
        return bool(self.prediction) and self.prediction[0].fits


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    """Changed knobs (and `chips`) with which a plan fits, and the prediction with them."""

    changes: Mapping[str, int | str | bool]
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikePlans:
    """A plan and alike plans: nearly the same and as good (see `perfmodel.planner.ties`).

    position   shared by ties
    value      as `PlanRanking.values`; None for an objective of a step
    """

    position: int
    prediction: Prediction
    alike: tuple[Plan, ...]
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """The fastest plan whose probability of not fitting is at most `risk`; none where no plan is that safe."""

    risk: float
    prediction: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Expected times over the possible frameworks: of the best plan, and of the plan that is first by its prediction. [s]"""

    best: float
    first: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRanking:
    """Order of the plans of a search.

    places        positions of the plans: those within `ties` of the best share the first, and so on
    ties          share within which plans are ties
    kinds         the best plans, with nearly equal plans grouped
    expectation   where the preferred plan is not the one of the least predicted time
    values        of the plans, for an objective of a whole run: its cost [USD], its energy [J] or its time with failures and
                  checkpoints [day]; else empty
    """

    places: tuple[int, ...]
    ties: float
    kinds: tuple[AlikePlans, ...]
    expectation: Expectation | None = None
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of a chip [byte], and the condition for plans to fit.

    headroom   share of the usable memory that stays free
    risk       largest probability that a plan does not fit; None: any
    """

    capacity: float
    usable: float
    headroom: float
    risk: float | None

    @classmethod
    def of(cls, memory: ChipMemory, rule: MemoryRule) -> MemoryBudget:
        risk = rule.risk if rule.risk < 1.0 else None
        return cls(capacity=memory.capacity, usable=memory.usable, headroom=rule.headroom, risk=risk)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult:
    """Result of a search.

    num_evaluated   plans of the written space, each with its time and memory
    num_feasible    plans that fit with the headroom, or at the risk; num_tight: plans that fit only without it
    rejected        reason -> plans; with num_feasible these are all evaluated plans
    left_out        reason -> layouts (degrees whose product is the number of chips) outside the space
    search_time     CPU seconds of the search itself (it runs on one core)
    plans           the preferred plan, then the others by the objective, best first
    least_time      of any plan that fits (infinite where none does)   [s]
    pareto          front of time against memory among plans that fit, fastest first
    certainty       the fastest plans at other risks, if a risk was requested
    least_memory    the plan with the least memory (empty for an empty space)
    remedies        where no plan fits, the smallest changes with which one would
    any_framework   the best plan that fits and that the assumed framework cannot run; empty unless it is better
    """

    objective: Objective
    num_evaluated: int
    num_feasible: int
    num_tight: int
    rejected: Mapping[str, int]
    left_out: Mapping[str, int]
    search_time: float
    interrupted: bool
    plans: tuple[Prediction, ...]
    ranking: PlanRanking
    least_time: float
    pareto: tuple[Prediction, ...]
    least_memory: tuple[Prediction, ...]
    baselines: tuple[Baseline, ...]
    memory: MemoryBudget
    certainty: tuple[Certainty, ...] = ()
    any_framework: tuple[Prediction, ...] = ()
    remedies: tuple[FittingChange, ...] = ()

    @property
    def best(self) -> Prediction:
        """The preferred plan."""
        if not self.plans:
            raise InputError("best: no plan fits; see least_memory and rejected")
        return self.plans[0]

    def to_frame(self) -> DataFrame:
        """Return the table of `search --csv`, in SI units: a row for each plan, best first, then one for each baseline."""
        return data_frame(search_rows(self))

    def __str__(self) -> str:
        head = f"{self.num_evaluated:,} plans evaluated, {self.num_feasible:,} fit"
        return f"{head}; the best by {self.objective}:\n{predictions_text(self.plans)}" if self.plans else head

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return predictions_html(self.plans)
