"""Plans that the model cannot distinguish: shared positions, the preferred plan, and nearly equal plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.parallel.algebra.rules import rule_labels
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.layout import DEFAULT_ORDER

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan

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


def preference(plan: Plan, other_cost: float) -> tuple[int, float]:
    """Return the sort key of ties: the simpler plan first, then the smaller (in a search for memory: the faster)."""
    return num_forms(plan), other_cost


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
