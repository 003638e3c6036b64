"""Search for the best uniform plans: ties, baselines, the plan beyond the framework's limits, and the plans at other risks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from perfmodel.cost.estimate import Estimator, evaluate_memory
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import check_headroom, check_risk, fit_probability, memory_rule
from perfmodel.frameworks.ensemble import WeightedProfile
from perfmodel.frameworks.profile import uncertainty_of_memory
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.baselines import baselines
from perfmodel.planner.beyond import beyond_framework
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.result import TIGHT, Baseline, Certainty, Expectation, MemoryBudget, Objective, SearchResult, TrainingSearch
from perfmodel.planner.ties import num_forms, ranking_of
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import OUT_OF_MEMORY, OUT_OF_MEMORY_STATIC, Sweep, sweep
from perfmodel.planner.uniform.tables import KeptTables
from perfmodel.uncertainty.expected import expected_times

#: Number of the best plans that are kept for comparison of ties, in addition to the front of time against memory.
CANDIDATES = 256

#: Number of the best plans that are compared by their expected time over the possible frameworks.
EXPECTED = 64

#: Number of tied plans whose probability of fitting is computed, the simplest first.
MOST_LIKELIHOODS = 32

#: Risks for which a search with a risk reports the fastest plan.
CERTAINTY = (0.2, 0.05, 0.01)


@dataclass(frozen=True, kw_only=True, eq=False)
class UniformPlans:
    """Uniform plans of one job on one cluster, as a `PlanSpace`. For a given number of chips the objectives time and chip-time rank alike.

    memory_headroom   share of the usable memory that plans leave free
    risk          largest probability of not fitting, in place of the headroom; the result then has the fastest plan at lower risks too
    ties          plans within this share of the best are ties, ordered by probability of fitting, then simplicity, then memory;
                  0: the exact order
    attention     kernel; None: the framework's default
    also          baselines, front, beyond; exact ranks need none of them, and each takes time
    ensemble      possible frameworks: with ties, the best of the first `EXPECTED` plans by expected time over these comes first
    kept_tables   tables shared with passes over other spaces of the job
    """

    estimator: Estimator
    space: Space = field(default_factory=Space)
    objective: Objective = Objective.TIME
    memory_headroom: float | None = None
    risk: float | None = None
    ties: float = 0.0
    attention: AttentionKernel | None = None
    also: Collection[str] = ("baselines", "front")
    ensemble: Sequence[WeightedProfile] = ()
    progress: Callable[[float], bool | None] | None = None
    kept_tables: KeptTables = field(default_factory=lambda: KeptTables(keeps_microbatches=True))

    def __post_init__(self) -> None:
        check_headroom(self.memory_headroom)
        if self.risk is not None:
            check_risk(self.risk)
        if not 0.0 <= self.ties < 1.0:
            raise InputError(f"ties={self.ties}: must be a share from 0 to below 1; use 1% or 0.01")

    @property
    def rule(self) -> dict[str, Any]:
        """The condition for plans to fit, as arguments."""
        return {"memory_headroom": self.memory_headroom, "risk": self.risk}

    @property
    def kernel(self) -> AttentionKernel:
        return self.attention or AttentionKernel(self.estimator.profile.kernels.default_attention)

    def evaluate(self, top: int) -> Sweep:
        return sweep(
            self.estimator,
            self.space,
            top=max(top * len(self.space.orders), CANDIDATES if self.ties else 0),
            **self.rule,
            attention=self.attention,
            progress=self.progress,
            kept_tables=self.kept_tables,
            also=[
                *(["memory"] if self.objective is Objective.MEMORY else []),
                *(["front"] if self.ties or "front" in self.also else []),
            ],
        )

    def ranked(self, rows: Sweep, top: int) -> TrainingSearch:
        usual = self.usual if "baselines" in self.also else ()
        known = [prediction for baseline in usual for prediction in baseline.plans if prediction.fits]
        ranking, expectation = _ranking(rows, self.objective, self.ties, known), None
        if self.ensemble and self.ties and ranking and self.objective is not Objective.MEMORY:
            ranking, expectation = _by_expectation(ranking, known, self.estimator, self.ensemble, self.ties)
        times, counts, job, num_chips = rows.best.time.values, rows.counts, self.estimator.job, self.estimator.cluster.num_chips
        least_time = float(times[0]) if len(times) else math.inf
        too_large = counts.num_evaluated - counts.num_feasible - counts.num_tight
        result: TrainingSearch = SearchResult(
            objective=self.objective,
            conditions=MemoryBudget.of(self.estimator.machine.memory, memory_rule(**self.rule)),
            num_evaluated=counts.num_evaluated,
            num_feasible=counts.num_feasible,
            rejected={OUT_OF_MEMORY_STATIC: counts.num_static, OUT_OF_MEMORY: too_large - counts.num_static, TIGHT: counts.num_tight},
            left_out=rows.kept.once("layouts left out", lambda: layouts_left_out(job, num_chips, self.space)),
            interrupted=rows.interrupted,
            plans=tuple(self.predict(plan) for _, plan in ranking[:top]),
            ranking=ranking_of(ranking, self.ties, top, self.predict, expectation=expectation, least_time=least_time),
            least_memory=tuple(self.predict(rows.plan(int(i))) for i in rows.best.least.ids),
            certainty=() if self.risk is None or rows.interrupted else self.certainty(),
        )
        if "beyond" not in self.also or rows.interrupted or not counts.num_evaluated:
            return result
        return replace(result, any_framework=beyond_framework(self, result))

    def front(self, rows: Sweep) -> tuple[Prediction, ...]:
        return tuple(self.predict(rows.plan(int(i))) for i in rows.best.front.ids)

    def baselines(self, result: TrainingSearch) -> tuple[Baseline[Prediction], ...]:
        return self.usual

    @cached_property
    def usual(self) -> tuple[Baseline[Prediction], ...]:
        """The baselines: the preferred plan among ties must not lose to one that fits."""
        return baselines(self)

    @cached_property
    def predict(self) -> Callable[[Plan], Prediction]:
        """Prediction of a plan, made once."""
        return cache(partial(self.estimator.predict, **self.rule))

    def certainty(self) -> tuple[Certainty, ...]:
        """Return the fastest plan at each of the risks `CERTAINTY`; the smaller ones may have none."""
        certainties = []
        for risk in CERTAINTY:
            state = sweep(self.estimator, self.space, top=1, risk=risk, attention=self.kernel, kept_tables=self.kept_tables, also=())
            plans = [state.plan(int(i)) for i in state.best.time.ids[:1]] if state.counts.num_feasible else []
            certainties.append(Certainty(risk=risk, prediction=tuple(self.estimator.predict(plan, risk=risk) for plan in plans)))
        return tuple(certainties)


def _ranking(state: Sweep, objective: Objective, ties: float, known: Iterable[Prediction]) -> list[tuple[float, Plan]]:
    """Return (cost, plan), best first. The preferred tie of the first is moved to the front, unless a baseline that fits costs less.

    The preferred tie is the first, in order of preference, that is as likely to fit as the one of the least memory.
    Of plans with the same cost that differ only in the order of the axes, the first is kept.
    """
    by_memory = objective is Objective.MEMORY
    best, front = state.best.memory if by_memory else state.best.time, state.best.front
    entries = {int(i): (float(cost), float(other)) for i, cost, other in zip(best.ids, best.values, best.companions, strict=True)}
    if ties and entries:
        costs, others = (front.second, front.first) if by_memory else (front.first, front.second)
        limit = float(best.values[0]) * (1.0 + ties)
        entries |= {
            int(i): (float(c), float(o)) for i, c, o in zip(front.ids, costs, others, strict=True) if c <= limit and int(i) not in entries
        }
    distinct: dict[tuple[Plan, float], tuple[float, float, Plan]] = {}
    for i, (cost, other) in sorted(entries.items(), key=lambda item: (item[1][0], item[0])):
        plan = state.plan(i)
        distinct.setdefault((replace(plan, order=state.space.orders[0]), cost), (cost, other, plan))
    rows = list(distinct.values())
    if ties and rows:
        least = rows[0][0]
        at_most = min((best.memory["total"] if by_memory else best.step_time for best in known), default=math.inf)
        tied = [row for row in rows if row[0] <= max(least, min(least * (1.0 + ties), at_most))]
        tied.sort(key=lambda row: (num_forms(row[2]), row[1], row[0]))  # the simpler plan first, then the smaller, or the faster
        preferred = tied[0]
        if not by_memory:
            smallest = min(tied, key=lambda row: row[1])
            least_risk = likelihood(state.estimator, smallest[2])
            likely = (row for row in tied[:MOST_LIKELIHOODS] if row is smallest or likelihood(state.estimator, row[2]) >= least_risk)
            preferred = next(likely, smallest)
        rows.remove(preferred)
        rows.insert(0, preferred)
    return [(cost, plan) for cost, _, plan in rows]


def likelihood(estimator: Estimator, plan: Plan) -> int:
    """Return the probability that the plan fits, in whole percent as tables show it, at most 99 %."""
    uncertainty = uncertainty_of_memory(estimator.profile)
    needs = evaluate_memory(estimator, plan).needs(plan, uncertainty)
    return min(math.floor(100.0 * fit_probability(needs, estimator.machine.memory.usable, uncertainty) + 0.5), 99)


def _by_expectation(
    ranking: list[tuple[float, Plan]], known: Iterable[Prediction], estimator: Estimator, ensemble: Sequence[WeightedProfile], ties: float
) -> tuple[list[tuple[float, Plan]], Expectation | None]:
    """Return the ranking with the plan of least expected time first, among the best and the known ones.

    The plan that was first stays there if its expected time is within `ties` of the least.
    """
    compared = ranking[:EXPECTED]
    ranked = {plan for _, plan in compared}
    compared += [(prediction.step_time, prediction.plan) for prediction in known if prediction.plan not in ranked]
    expected = expected_times(estimator, [plan for _, plan in compared], ensemble)
    best = int(expected.argmin())
    if expected[0] <= expected[best] * (1.0 + ties):
        return ranking, None
    chosen = compared[best]
    return [chosen, *(row for row in ranking if row[1] != chosen[1])], Expectation(best=float(expected[best]), first=float(expected[0]))
