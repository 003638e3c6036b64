"""Plans that the model cannot distinguish: shared positions, the preferred plan, and nearly equal plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.parallel.algebra.rules import rule_labels
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.planner.result import AlikePlans, Expectation, PlanRanking

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.parallel.prediction import Prediction

#: Plans within this share of each other are ties. Among published runs that differ only in their plan, the one predicted to be
#: fastest is 1.2 % slower than the measured best on average (docs/accuracy.md, "Choice of plan"): closer plans cannot be
#: distinguished.
TIES = 0.01


def num_forms(plan: Plan) -> int:
    """Return the complexity of a plan's setup: axes in use, interleaving, recomputation, an order of axes that is not the default.

    Sequence parallelism comes with tp and does not count.
    """
    axes = sum(plan.layout.degree(axis) > 1 for axis in DEFAULT_ORDER)
    extras = (plan.virtual_stages > 1, plan.recompute is not Recompute.NONE, plan.order != DEFAULT_ORDER)
    return axes + sum(extras)


def shared_places(costs: Sequence[float], ties: float) -> tuple[int, ...]:
    """Return the position of each cost (in any order): costs within `ties` of the least of their group share its position."""
    places = [0] * len(costs)
    leader, position = -1.0, 0
    for rank, index in enumerate(sorted(range(len(costs)), key=lambda i: costs[i]), 1):
        if position == 0 or costs[index] > leader * (1.0 + ties):
            leader, position = costs[index], rank
        places[index] = position
    return tuple(places)


def kind_of(plan: Plan) -> tuple[object, ...]:
    """Return the key of nearly equal plans, which may differ in the split of the data axes, ZeRO, virtual stages and order."""
    layout = plan.layout
    schedule = plan.schedule if layout.pp > 1 else ""
    rules = (plan.sequence_parallel, rule_labels(plan.rules))
    return (layout.tp, layout.cp, layout.pp, layout.data_parallel, plan.micro_batch, plan.recompute, rules, schedule)


def ranking_of(
    ranked: Sequence[tuple[float, Plan]],
    ties: float,
    top: int,
    predict: Callable[[Plan], Prediction],
    *,
    places: tuple[int, ...] = (),
    expectation: Expectation | None = None,
    least_time: float = math.inf,
) -> PlanRanking:
    """Return the order of the first `top` plans, and the first `top` plans that are not nearly the same with nearly the same cost.

    A plan that differs from a better one only in the order of the axes has no row: no column would distinguish the two.

    ranked   (cost, plan), best first
    places   of the plans; those of their costs by default
    """
    places = places or shared_places([cost for cost, _ in ranked], ties)
    if expectation is not None:
        places = (1, *places[1:])
    kinds: list[tuple[int, float, Plan, list[Plan]]] = []
    seen: set[Plan] = set()
    for position, (cost, plan) in zip(places, ranked, strict=True):
        in_usual_order = replace(plan, order=DEFAULT_ORDER)
        is_worse_order = bool(ties) and in_usual_order in seen
        seen.add(in_usual_order)
        like = [row for row in kinds if ties and kind_of(row[2]) == kind_of(plan) and cost <= row[1] * (1.0 + ties)]
        if like:
            like[0][3].append(plan)
        elif not is_worse_order:
            kinds.append((position, cost, plan, []))
    return PlanRanking(
        places=places[:top],
        ties=ties,
        kinds=tuple(AlikePlans(position=at, prediction=predict(plan), alike=tuple(alike)) for at, _, plan, alike in kinds[:top]),
        expectation=expectation,
        least_time=least_time,
    )
