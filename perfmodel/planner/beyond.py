"""Best plan that the assumed framework cannot run, and its gain."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.frameworks.runnable import ANYTHING
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.result import Objective, TrainingSearch
from perfmodel.planner.ties import TIES
from perfmodel.planner.uniform.quickest import best_plan
from perfmodel.planner.uniform.space import Space, unlimited_space

if TYPE_CHECKING:
    from perfmodel.planner.uniform.search import UniformPlans


def beyond_framework(plans: UniformPlans, result: TrainingSearch) -> tuple[Prediction, ...]:
    """Return the best plan of the space without the framework's limits, if it fits and beats the result by more than a tie.

    Searches one order of the axes, that of the best plan, for better plans only.
    """
    space, cost = plans.space, plans.objective.cost
    if space.runs == ANYTHING:
        return ()
    best, by_memory = result.plans[:1], plans.objective is Objective.MEMORY
    orders = (best[0].plan.order,) if best else space.orders[:1]
    one = replace(space, orders=orders, lists=())

    def search(part: Space, at_most: float, beyond: Space | None = None) -> tuple[float, Plan] | None:
        return best_plan(
            plans.estimator,
            part,
            by_memory=by_memory,
            at_most=at_most * (1.0 + 1e-9),
            beyond=beyond,
            **plans.rule,
            attention=plans.kernel,
            kept_tables=plans.kept_tables,
        )

    # plans that are better by less than a tie are skipped
    limit = cost(best[0]) * (1.0 - TIES) if best else math.inf
    candidate = search(unlimited_space(one), limit, beyond=one)
    if candidate is None:
        return ()
    other = plans.estimator.predict(candidate[1], **plans.rule)
    if not other.not_runnable or (best and cost(other) > limit):
        return ()
    # least cost of the plans that fit: of memory a lower bound
    least = result.ranking.least_time if not by_memory else cost(best[0]) / (1.0 + plans.ties) if best else math.inf
    if cost(other) >= least:
        # the best is not the cheapest plan: a runnable plan of this order may be cheaper still
        usual = search(one, cost(other))
        if usual is not None and usual[0] < cost(other):
            return ()
    return (other,)
