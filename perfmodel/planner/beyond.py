"""Best plan that the assumed framework cannot run, and its gain."""

from __future__ import annotations

import math
from dataclasses import replace

from perfmodel.cost.estimate import Estimator
from perfmodel.frameworks.runnable import ANYTHING
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.result import Objective
from perfmodel.planner.ties import TIES
from perfmodel.planner.uniform.quickest import best_plan
from perfmodel.planner.uniform.space import Space, unlimited_space
from perfmodel.planner.uniform.tables import KeptTables


def beyond_framework(
    estimator: Estimator,
    space: Space,
    *,
    best: tuple[Prediction, ...],
    least: float,
    objective: Objective,
    memory_headroom: float | None,
    risk: float | None,
    attention: AttentionKernel,
    kept_tables: KeptTables | None = None,
) -> tuple[Prediction, ...]:
    """Return the best plan of the space without the framework's limits, if it fits and beats `best` by more than a tie.

    Searches one order of the axes, that of `best`, for better plans only.

    least         least cost of the plans of the space that fit
    kept_tables   tables of the search of the space
    """
    if space.runs == ANYTHING:
        return ()
    by_memory = objective is Objective.MEMORY
    orders = (best[0].plan.order,) if best else space.orders[:1]
    one = replace(space, orders=orders, lists=())

    def search(part: Space, at_most: float, beyond: Space | None = None) -> tuple[float, Plan] | None:
        return best_plan(
            estimator,
            part,
            by_memory=by_memory,
            at_most=at_most * (1.0 + 1e-9),
            beyond=beyond,
            memory_headroom=memory_headroom,
            risk=risk,
            attention=attention,
            kept_tables=kept_tables,
        )

    # plans that are better by less than a tie are skipped
    limit = _cost(best[0], by_memory=by_memory) * (1.0 - TIES) if best else math.inf
    candidate = search(unlimited_space(one), limit, beyond=one)
    if candidate is None:
        return ()
    other = estimator.predict(candidate[1], memory_headroom=memory_headroom, risk=risk)
    cost = _cost(other, by_memory=by_memory)
    if not other.not_runnable or (best and cost > limit):
        return ()
    if cost >= least:
        # the best is not the cheapest plan: a runnable plan of this order may be cheaper still
        usual = search(one, cost)
        if usual is not None and usual[0] < cost:
            return ()
    return (other,)


def _cost(prediction: Prediction, *, by_memory: bool) -> float:
    return prediction.memory["total"] if by_memory else prediction.step_time
