"""The best plans of a space, with baselines, the front and the reasons."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterable
from dataclasses import replace

from perfmodel.cost.estimate import Estimator
from perfmodel.errors import InputError
from perfmodel.memory_room import DEFAULT_HEADROOM, check_headroom
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.baselines import baselines
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.result import Objective, SearchResult
from perfmodel.planner.space import Space
from perfmodel.planner.sweep import OUT_OF_MEMORY, OUT_OF_MEMORY_STATIC, TIGHT, Sweep, sweep

__all__ = ["OUT_OF_MEMORY", "OUT_OF_MEMORY_STATIC", "TIGHT", "Sweep", "search_plans", "sweep"]


def search_plans(
    estimator: Estimator,
    space: Space | None = None,
    *,
    objective: Objective | str = Objective.TIME,
    top: int = 10,
    memory_headroom: float = DEFAULT_HEADROOM,
    attention: AttentionKernel | None = None,
    with_baselines: bool = True,
    progress: Callable[[float], bool | None] | None = None,
) -> SearchResult:
    """The best plans of the space. For a given number of chips the objectives time and chip-time rank alike."""
    try:
        objective = Objective(objective)
    except ValueError:
        raise InputError(f"objective={objective}: not known; use {', '.join(Objective)}") from None
    if top < 1:
        raise InputError(f"top={top}: must be at least 1; ask for the ten best with 10")
    check_headroom(memory_headroom)
    space = space or Space()
    begin = clock.process_time()
    kept = top * len(space.orders)
    state = sweep(estimator, space, top=kept, memory_headroom=memory_headroom, attention=attention, progress=progress)
    elapsed = clock.process_time() - begin
    chosen = state.best_memory if objective is Objective.MEMORY else state.best_time

    def predict(ids: Iterable[int]) -> tuple[Prediction, ...]:
        return tuple(estimator.predict(state.plan(int(i)), memory_headroom=memory_headroom) for i in ids)

    def distinct_plans() -> tuple[Prediction, ...]:
        """The best; of plans that differ in the order of the axes alone and cost the same, the first."""
        found: dict[tuple[Plan, float], Prediction] = {}
        for i in chosen.ids:
            prediction = estimator.predict(state.plan(int(i)), memory_headroom=memory_headroom)
            found.setdefault((replace(prediction.plan, order=space.orders[0]), prediction.step_time), prediction)
            if len(found) == top:
                break
        return tuple(found.values())

    too_large = state.num_evaluated - state.num_feasible - state.num_tight
    rejected = {OUT_OF_MEMORY_STATIC: state.num_static, OUT_OF_MEMORY: too_large - state.num_static, TIGHT: state.num_tight}
    return SearchResult(
        objective=objective,
        num_evaluated=state.num_evaluated,
        num_feasible=state.num_feasible,
        rejected={reason: count for reason, count in rejected.items() if count},
        left_out=layouts_left_out(estimator.job, estimator.cluster.num_chips, space),
        search_time=elapsed,
        plans=distinct_plans(),
        pareto=predict(state.front.ids),
        least_memory=predict(state.least.ids),
        baselines=baselines(estimator, memory_headroom=memory_headroom, attention=state.attention) if with_baselines else (),
        num_tight=state.num_tight,
        memory_capacity=estimator.machine.memory_capacity,
        memory_usable=estimator.machine.memory_usable,
        memory_headroom=memory_headroom,
        interrupted=state.interrupted,
    )
