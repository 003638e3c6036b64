"""Search for the best plans of a space, with baselines, the Pareto front and reasons for rejected plans."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from perfmodel.cost.estimate import Estimator, evaluate_memory
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import check_headroom, check_risk, fit_probability, memory_rule
from perfmodel.frameworks.ensemble import WeightedProfile
from perfmodel.frameworks.memory_uncertainty import uncertainty_of_memory
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.baselines import baselines
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.result import AlikePlans, Baseline, Certainty, Expectation, MemoryBudget, Objective, PlanRanking, SearchResult
from perfmodel.planner.ties import kind_of, preference, shared_places
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import OUT_OF_MEMORY, OUT_OF_MEMORY_STATIC, TIGHT, Sweep, sweep
from perfmodel.planner.uniform.tables import KeptTables
from perfmodel.uncertainty.expected import expected_times

__all__ = ["OUT_OF_MEMORY", "OUT_OF_MEMORY_STATIC", "TIGHT", "Sweep", "search_plans", "sweep"]


#: Number of the best plans that are kept for comparison of ties, in addition to the front of time against memory.
CANDIDATES = 256

#: Number of the best plans that are compared by their expected time over the possible frameworks.
EXPECTED = 64

#: Number of tied plans whose probability of fitting is computed, the simplest first.
MOST_LIKELIHOODS = 32

#: Risks for which a search with a risk reports the fastest plan.
CERTAINTY = (0.2, 0.05, 0.01)


def search_plans(
    estimator: Estimator,
    space: Space | None = None,
    *,
    objective: Objective | str = Objective.TIME,
    top: int = 10,
    memory_headroom: float | None = None,
    risk: float | None = None,
    ties: float = 0.0,
    attention: AttentionKernel | None = None,
    also: Collection[str] = ("baselines", "front"),
    ensemble: Sequence[WeightedProfile] = (),
    progress: Callable[[float], bool | None] | None = None,
    kept_tables: KeptTables | None = None,
) -> SearchResult:
    """Return the best plans of the space. For a given number of chips the objectives time and chip-time rank alike.

    risk   largest probability of not fitting, in place of the headroom; the result then reports the fastest plan at lower risks too
    ties   plans within this share of the best are ties, ordered by probability of fitting, then simplicity, then memory;
           0: the exact order
    kept_tables   tables shared with passes over other spaces of the job
    also   baselines, front (of time and memory): predictions that take about a third of a search of thousands of plans
    likely possible frameworks: with ties, the best of the first `EXPECTED` plans by expected time over these comes first
    """
    try:
        objective = Objective(objective)
    except ValueError:
        raise InputError(f"objective={objective}: not known; use {', '.join(Objective)}") from None
    if top < 1:
        raise InputError(f"top={top}: must be at least 1; ask for the ten best with 10")
    check_headroom(memory_headroom)
    if risk is not None:
        check_risk(risk)
    if not 0.0 <= ties < 1.0:
        raise InputError(f"ties={ties}: must be a share from 0 to below 1; use 1% or 0.01")
    space = space or Space()
    begin = clock.process_time()
    kept = max(top * len(space.orders), CANDIDATES if ties else 0)
    tables = kept_tables or KeptTables(keeps_microbatches=risk is not None)
    state = sweep(
        estimator,
        space,
        top=kept,
        memory_headroom=memory_headroom,
        risk=risk,
        attention=attention,
        progress=progress,
        kept_tables=tables,
        also=[*(["memory"] if objective is Objective.MEMORY else []), *(["front"] if ties or "front" in also else [])],
    )
    elapsed = clock.process_time() - begin
    known: tuple[Baseline, ...] = ()
    if "baselines" in also:
        known = baselines(estimator, space, memory_headroom=memory_headroom, risk=risk, attention=state.attention)
    fitting = [baseline.prediction[0] for baseline in known if baseline.fits]
    ranking = _ranking(state, objective, ties, fitting)
    expectation = None
    if ensemble and ties and ranking and objective is not Objective.MEMORY:
        ranking, expectation = _by_expectation(ranking, fitting, estimator, ensemble, ties)

    predicted: dict[Plan, Prediction] = {}

    def predict(plans: Iterable[Plan]) -> tuple[Prediction, ...]:
        plans = tuple(plans)
        for plan in plans:
            if plan not in predicted:
                predicted[plan] = estimator.predict(plan, memory_headroom=memory_headroom, risk=risk)
        return tuple(predicted[plan] for plan in plans)

    best = ranking[:top]
    places = shared_places([cost for cost, _ in ranking], ties)
    if expectation is not None:
        places = (1, *places[1:])
    kinds = alike_kinds(ranking, places, ties)[:top]
    counts = state.counts
    too_large = counts.num_evaluated - counts.num_feasible - counts.num_tight
    rejected = {OUT_OF_MEMORY_STATIC: counts.num_static, OUT_OF_MEMORY: too_large - counts.num_static, TIGHT: counts.num_tight}
    return SearchResult(
        objective=objective,
        num_evaluated=counts.num_evaluated,
        num_feasible=counts.num_feasible,
        rejected={reason: count for reason, count in rejected.items() if count},
        left_out=state.kept.once("layouts left out", lambda: layouts_left_out(estimator.job, estimator.cluster.num_chips, space)),
        search_time=elapsed,
        plans=predict(plan for _, plan in best),
        ranking=PlanRanking(
            places=places[:top],
            ties=ties,
            kinds=tuple(
                AlikePlans(position=position, prediction=prediction, alike=alike)
                for (position, _, alike), prediction in zip(kinds, predict(plan for _, plan, _ in kinds), strict=True)
            ),
            expectation=expectation,
        ),
        least_time=float(state.best.time.values[0]) if len(state.best.time.values) else math.inf,
        pareto=predict(state.plan(int(i)) for i in state.best.front.ids) if "front" in also else (),
        least_memory=predict(state.plan(int(i)) for i in state.best.least.ids),
        baselines=known,
        num_tight=counts.num_tight,
        memory=MemoryBudget.of(estimator.machine.memory, memory_rule(memory_headroom, risk)),
        certainty=() if risk is None or state.interrupted else _certainty(estimator, space, attention=state.attention, kept_tables=tables),
        interrupted=state.interrupted,
    )


def _certainty(estimator: Estimator, space: Space, *, attention: AttentionKernel, kept_tables: KeptTables) -> tuple[Certainty, ...]:
    """Return the fastest plan at each of the risks `CERTAINTY`; the smaller ones may have none."""
    certainties = []
    for risk in CERTAINTY:
        state = sweep(estimator, space, top=1, risk=risk, attention=attention, kept_tables=kept_tables, also=())
        plans = [state.plan(int(i)) for i in state.best.time.ids[:1]] if state.counts.num_feasible else []
        certainties.append(Certainty(risk=risk, prediction=tuple(estimator.predict(plan, risk=risk) for plan in plans)))
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
        tied.sort(key=lambda row: (preference(row[2], row[1]), row[0]))
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


def alike_kinds(ranking: list[tuple[float, Plan]], places: tuple[int, ...], ties: float) -> list[tuple[int, Plan, tuple[Plan, ...]]]:
    """Return (position, plan, alike plans), in the order of the ranking. Alike plans are nearly the same plan with nearly the same cost.

    A plan that differs from a better one only in the order of the axes has no row: no column would distinguish the two.
    """
    kinds: list[tuple[int, float, Plan, list[Plan]]] = []
    seen: set[Plan] = set()
    for position, (cost, plan) in zip(places, ranking, strict=True):
        in_usual_order = replace(plan, order=DEFAULT_ORDER)
        is_worse_order = bool(ties) and in_usual_order in seen
        seen.add(in_usual_order)
        like = [row for row in kinds if ties and kind_of(row[2]) == kind_of(plan) and cost <= row[1] * (1.0 + ties)]
        if like:
            like[0][3].append(plan)
        elif not is_worse_order:
            kinds.append((position, cost, plan, []))
    return [(position, plan, tuple(alike)) for position, _, plan, alike in kinds]
