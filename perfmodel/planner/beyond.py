"""What the plans that the assumed framework cannot run would gain."""

from __future__ import annotations

import math
from dataclasses import replace

from perfmodel.cost.estimate import Estimator
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.runs import ANYTHING
from perfmodel.planner.result import Objective
from perfmodel.planner.ties import TIES
from perfmodel.planner.uniform.space import Space, unlimited_space
from perfmodel.planner.uniform.sweep import sweep


def beyond_framework(
    estimator: Estimator,
    space: Space,
    *,
    best: tuple[Prediction, ...],
    objective: Objective,
    memory_headroom: float | None,
    risk: float | None,
    attention: AttentionKernel,
) -> tuple[Prediction, ...]:
    """Return the best plan of the space without the framework's limits, if it fits and beats `best` by more than a tie.

    Searches one order of the axes, that of `best`, and leaves out the layouts whose passes alone take longer than `best`.
    """
    if space.runs == ANYTHING:
        return ()
    by_memory = objective is Objective.MEMORY
    orders = (best[0].plan.order,) if best else space.orders[:1]
    whole = replace(unlimited_space(space), orders=orders, lists=())
    slowest = best[0].step_time if best and not by_memory else math.inf
    found = sweep(estimator, whole, top=1, memory_headroom=memory_headroom, risk=risk, attention=attention, slowest=slowest, needless=0.0)
    if not found.num_feasible:
        return ()
    ids = found.best_memory.ids if by_memory else found.best_time.ids
    other = estimator.predict(found.plan(int(ids[0])), memory_headroom=memory_headroom, risk=risk)
    if not other.not_runnable:
        return ()
    if best and _cost(other, by_memory=by_memory) > _cost(best[0], by_memory=by_memory) * (1.0 - TIES):
        return ()
    return (other,)


def _cost(prediction: Prediction, *, by_memory: bool) -> float:
    return prediction.memory["total"] if by_memory else prediction.step_time
