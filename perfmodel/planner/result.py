"""Results of searches, of every kind of plan: ranked plans, counts and reasons of rejected plans, baselines, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.frames import data_frame
from perfmodel.foundation.units import format_time
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction, predictions_html, predictions_text
from perfmodel.planner.rows import service_rows, training_rows

if TYPE_CHECKING:
    from perfmodel.cost.machine import ChipMemory
    from perfmodel.cost.serving.load import ServedLoad
    from perfmodel.cost.serving.times import Array
    from perfmodel.foundation.frames import DataFrame
    from perfmodel.foundation.memory_headroom import MemoryRule
    from perfmodel.parallel.serving_plan import ServiceLayout, ServingPlan
    from perfmodel.parallel.serving_prediction import ServingPrediction

PlanT = TypeVar("PlanT")
PointT = TypeVar("PointT")
ObjectiveT = TypeVar("ObjectiveT", bound="PlanObjective")
ConditionsT = TypeVar("ConditionsT")

TIGHT = "tight: within the memory, but with less than the headroom left, or too likely not to fit"


class PlanObjective(Protocol):
    """Objective of a search for plans of one kind."""

    def cost(self, plan: Any, /) -> float:
        """Return the quantity that the search minimises."""


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

    def cost(self, prediction: Prediction) -> float:
        """Return the quantity that ranks training plans on given chips. [s or byte]"""
        return prediction.memory["total"] if self is Objective.MEMORY else prediction.step_time


class ServingObjective(StrEnum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    COST = "cost"

    def cost(self, plan: RankedPlan) -> float:
        """Return the quantity that a search minimises. All chips are paid for, so the cost of a token follows from tokens per second."""
        return plan.prediction.request_latency.mean if self is ServingObjective.LATENCY else -plan.tokens_per_second_per_chip


# --- conditions of plans ------------------------------------------------------------------------------------------------


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


LIMITED = ("ttft", "tpot", "request_latency")
"""Times that may have a limit."""

LIMIT_HEADROOM = 0.015
"""Share of a limit by which a chosen plan's prediction must stay below it.

A search chooses the plan that is predicted fastest for its load, so its prediction errs to the fast side. Without headroom 11 % of the
choices among published runs break the limit that they were chosen under, with this 9 %, and the others yield half a percent less
(docs/accuracy-serving.md has larger and smaller values).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Limits that every plan must meet; None: no limit. [s]

    ttft, tpot, request_latency
    is_p99   for ttft and tpot the 99th percentile over requests, by the closed forms, else the mean
    headroom share of each limit by which a prediction must stay below it
    """

    ttft: float | None = None
    tpot: float | None = None
    request_latency: float | None = None
    is_p99: bool = False
    headroom: float = LIMIT_HEADROOM

    def __post_init__(self) -> None:
        if not 0.0 <= self.headroom < 1.0:
            raise bad_field("limit_headroom", self.headroom, "must be a share from 0 to below 1", "write 0.02 for 2 % below each limit")
        for name, value in self.given().items():
            if not 0.0 < value < 1e9:
                raise bad_field(name, value, "must be a positive time", "write 300 ms")

    def given(self) -> dict[str, float]:
        """Return limit -> seconds, for the limits that are set."""
        values = {name: getattr(self, name) for name in LIMITED}
        return {name: value for name, value in values.items() if value is not None}

    def aims(self) -> dict[str, float]:
        """Return limit -> largest prediction [s]: the limit less its headroom."""
        return {name: value * (1.0 - self.headroom) for name, value in self.given().items()}

    def times_of(self, load: ServedLoad) -> dict[str, Array]:
        """Return the times of a load that the limits apply to."""
        ttft, tpot = (load.ttft_p99, load.tpot_p99) if self.is_p99 else (load.ttft, load.tpot)
        return {"ttft": ttft, "tpot": tpot, "request_latency": load.request_latency}

    def seen(self, prediction: ServingPrediction) -> dict[str, float]:
        """Return the times of a prediction that the limits apply to."""
        times = {"ttft": prediction.ttft, "tpot": prediction.tpot}
        limited = {name: time.p99 if self.is_p99 and time.p99 is not None else time.mean for name, time in times.items()}
        return {**limited, "request_latency": prediction.request_latency.mean}

    def __str__(self) -> str:
        of = " (p99)" if self.is_p99 else ""
        return ", ".join(f"{name} {format_time(value)}{of if name != 'request_latency' else ''}" for name, value in self.given().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConditions:
    """Conditions of plans of a service.

    num_chips          given chips
    is_load_searched   no load was given: each plan was tried under many, and is ranked at its best
    price_per_hour     of a chip; 0: not known       [USD/h]
    """

    limits: ServingLimits
    num_chips: int
    is_load_searched: bool
    price_per_hour: float


# --- ranked plans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan at its load, and why it is not the best.

    prediction       at that load: its job has the concurrency, the formats of weights and cache
    tokens_per_second_per_chip   output tokens, over all given chips, including idle ones
    cost_per_million             output tokens; None without a known price     [USD]
    idle_chips       chips without a replica
    meets            all limits
    reason           why it is worse than the best; empty for the best
    """

    prediction: ServingPrediction
    tokens_per_second_per_chip: float
    cost_per_million: float | None
    idle_chips: int
    meets: bool = True
    reason: str = ""

    @property
    def plan(self) -> ServingPlan:
        return self.prediction.plan

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Intervals of the prediction; tokens per second per chip count idle chips too."""
        serving = self.plan.num_chips / (self.plan.num_chips + self.idle_chips)
        share = {name: serving if name == "tokens_per_second" else 1.0 for name in self.prediction.intervals}
        return {name: (low * share[name], high * share[name]) for name, (low, high) in self.prediction.intervals.items()}


def ranked_plan(prediction: ServingPrediction, *, num_chips: int, price: float, meets: bool = True) -> RankedPlan:
    """Return a predicted plan on `num_chips` chips, all of which are paid for: [USD/h] each; 0: not known."""
    plan = prediction.plan
    per_chip = prediction.tokens_per_second_per_chip * plan.num_chips / num_chips
    return RankedPlan(
        prediction=prediction,
        tokens_per_second_per_chip=per_chip,
        cost_per_million=1e6 * price / 3600.0 / per_chip if price > 0 and per_chip > 0 else None,
        idle_chips=num_chips - plan.num_chips,
        meets=meets,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan at a load on the Pareto front of tokens per chip and tokens per user.

    concurrency   requests in flight, of all replicas together; meets: the given limits
    ttft, tpot    means [s]
    """

    layout: ServiceLayout
    quantization: str
    kv_precision: str
    concurrency: int
    tokens_per_second_per_user: float
    tokens_per_second_per_chip: float
    ttft: float
    tpot: float
    meets: bool


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
    """Order of the plans of a search. Plans of a service have places alone.

    places        positions of the plans: those within `ties` of the best share the first, and so on
    ties          share within which plans are ties
    kinds         the best plans, with nearly equal plans grouped
    expectation   where the preferred plan is not the one of the least predicted time
    least_time    of any training plan that fits (infinite where none does)   [s]
    values        of the plans, for an objective of a whole run: its cost [USD], its energy [J] or its time with failures and
                  checkpoints [day]; else empty
    """

    places: tuple[int, ...]
    ties: float = 0.0
    kinds: tuple[AlikePlans, ...] = ()
    expectation: Expectation | None = None
    least_time: float = math.inf
    values: tuple[float, ...] = ()


# --- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline(Generic[PlanT]):
    """A usual plan without a search, shown even if it is worse or does not fit.

    plans    empty if there is no such plan
    reason   why there is none, or why it cannot be chosen
    """

    name: str
    meaning: str
    plans: tuple[PlanT, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(Generic[PlanT, PointT, ObjectiveT, ConditionsT]):
    """Result of a search for plans: training plans, with their predictions and `MemoryBudget`, or plans of a service at their loads.

    conditions      of plans
    num_evaluated   plans of the space, each with its time and memory; plans of a service each at its load
    num_feasible    plans that fit with the headroom or at the risk, and keep the limits of a service
    rejected        reason -> plans; with num_feasible these are all evaluated plans
    left_out        reason -> layouts outside the space: impossible, excluded by a knob, or not run by the framework or engine
    search_time     CPU seconds of the search itself (it runs on one core)
    plans           the preferred plan, then the others by the objective, best first
    pareto          front among plans that fit: of time and memory, fastest first; of tokens per user and per chip over all loads, without
                    limits, most tokens per user first
    least_memory    the training plan with the least memory (empty for an empty space)
    certainty       the fastest plans at other risks, if a risk was requested
    remedies        where no plan fits, the smallest changes with which one would
    any_framework   the best plan that fits and that the assumed framework cannot run; empty unless it is better
    disaggregated   the best plans of two pools, if requested; they are `plans` too if no other meets the limits
    """

    objective: ObjectiveT
    conditions: ConditionsT
    num_evaluated: int
    num_feasible: int
    rejected: Mapping[str, int]
    left_out: Mapping[str, int]
    plans: tuple[PlanT, ...]
    ranking: PlanRanking
    search_time: float = 0.0
    interrupted: bool = False
    pareto: tuple[PointT, ...] = ()
    baselines: tuple[Baseline[PlanT], ...] = ()
    least_memory: tuple[PlanT, ...] = ()
    certainty: tuple[Certainty, ...] = ()
    remedies: tuple[FittingChange, ...] = ()
    any_framework: tuple[PlanT, ...] = ()
    disaggregated: tuple[PlanT, ...] = ()

    @property
    def best(self) -> PlanT:
        """The preferred plan."""
        best = [*self.plans[:1], *self.disaggregated[:1]]
        if not best:
            raise InputError("best: no plan fits; see least_memory and rejected")
        return min(best, key=self.objective.cost)

    @property
    def num_tight(self) -> int:
        """Number of plans that fit only without the headroom, or at a larger risk."""
        return self.rejected.get(TIGHT, 0)

    def to_frame(self) -> DataFrame:
        """Return the table of `--csv`, in SI units: a row for each plan, best first; of training plans also one for each baseline."""
        if isinstance(self.conditions, ServingConditions):
            return data_frame(service_rows(cast("ServingSearch", self)))
        return data_frame(training_rows(cast("TrainingSearch", self)))

    def __str__(self) -> str:
        head = f"{self.num_evaluated:,} plans evaluated, {self.num_feasible:,} fit"
        return f"{head}; the best by {self.objective}:\n{predictions_text(self._trained)}" if self._trained else head

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        return predictions_html(self._trained) if self._trained or not self.plans else None

    @property
    def _trained(self) -> list[Prediction]:
        return [plan for plan in self.plans if isinstance(plan, Prediction)]


TrainingSearch: TypeAlias = SearchResult[Prediction, Prediction, Objective, MemoryBudget]
ServingSearch: TypeAlias = SearchResult[RankedPlan, FrontPoint, ServingObjective, ServingConditions]
