"""Search for plans on clusters of several kinds of chips.

Every plan of the space is evaluated with all chips of one kind, once per kind. The best of these are predicted on the mixed cluster, with
the layers of their stages distributed by speed. The best of those are refined by moves of single layers. If the space has more plans than
are kept, the result is the best of the predicted ones and has a note on that.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import permutations

import numpy as np

from perfmodel.cost.mixed import MixedEstimator, balanced_plan, mixed_step_time
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import Verdict, memory_rule
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.result import AlikePlans, MemoryBudget, Objective, PlanRanking, SearchResult
from perfmodel.planner.search import alike_kinds
from perfmodel.planner.ties import shared_places
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import OUT_OF_MEMORY, TIGHT, sweep
from perfmodel.search.select import front_of

#: Number of the best plans per kind of chip that are predicted on the mixed cluster.
CANDIDATES = 128

#: Number of the best plans whose layers are moved one by one.
REFINED = 3


def search_mixed(
    estimator: MixedEstimator,
    space: Space,
    *,
    objective: Objective | str = Objective.TIME,
    top: int = 10,
    memory_headroom: float | None = None,
    risk: float | None = None,
    ties: float = 0.0,
    attention: AttentionKernel | None = None,
    progress: Callable[[float], bool | None] | None = None,
) -> SearchResult:
    """Return the best plans on a cluster of several kinds of chips; arguments as in `search_plans`."""
    objective = Objective(objective)
    begin = clock.process_time()

    def predict(plan: Plan) -> Prediction:
        return estimator.predict(plan, memory_headroom=memory_headroom, risk=risk)

    group = math.gcd(*(pool.cluster.num_chips for pool in estimator.pools))  # all ranks of a tp and cp group have one kind of chip
    bounds = {name: min(group, space.maximum.get(name, group)) for name in ("tp", "cp") if name not in space.fixed}
    inner = tuple(order for order in space.orders if {*order[:2]} == {"tp", "cp"})
    space = replace(space, maximum={**space.maximum, **bounds}, orders=inner or space.orders)
    predictions: dict[Plan, Prediction] = {}
    number, interrupted, attention = 0, False, attention or AttentionKernel(estimator.profile.kernels.default_attention)

    def candidates(space: Space) -> Iterator[Plan]:
        nonlocal number, interrupted
        for pool in estimator.pools:
            kind, chips = pool.cluster, estimator.cluster.num_chips  # all chips as chips of one kind, in nodes that divide them
            alike = replace(pool, cluster=replace(kind, num_chips=chips, chips_per_node=math.gcd(chips, kind.chips_per_node)))
            state = sweep(alike, space, top=CANDIDATES, memory_headroom=memory_headroom, risk=risk, attention=attention, progress=progress)
            number, interrupted = max(number, state.counts.num_evaluated), interrupted or state.interrupted
            for plan_id in dict.fromkeys(int(i) for kept in (state.best.time, state.best.front, state.best.least) for i in kept.ids):
                # equal plans of two kinds of chips differ in the names of cluster and calibration alone
                yield replace(state.plan(plan_id), cluster=estimator.cluster.name, calibration=estimator.machine.basis.calibration)

    # the plans with the least memory may have a cp and tp group on two kinds of chips
    spaces = [space] if "cp" in space.fixed else [space, replace(space, fixed={**space.fixed, "cp": 1})]
    for subspace in spaces:
        for plan in candidates(subspace) if not predictions else ():
            if plan not in predictions:
                with suppress(InputError):  # ranks of one group on chips of two kinds
                    predictions[plan] = predict(balanced_plan(estimator, plan))

    def cost(prediction: Prediction) -> float:
        return prediction.memory["total"] if objective is Objective.MEMORY else prediction.step_time

    predicted = list({prediction.plan: prediction for prediction in predictions.values()}.values())
    fitting = sorted((prediction for prediction in predicted if prediction.fits), key=cost)
    if objective is not Objective.MEMORY:
        refined = [*(_refined(estimator, prediction, predict) for prediction in fitting[:REFINED]), *fitting[REFINED:]]
        fitting = sorted({prediction.plan: prediction for prediction in refined}.values(), key=cost)  # two may be refined to one plan
    if fitting and len(predicted) < number:
        note = f"of {number:,} plans the best {CANDIDATES} of each kind of chip alone were predicted on the mixed cluster"
        fitting[0] = replace(fitting[0], warnings=(*fitting[0].warnings, note))
    by_plan = {prediction.plan: prediction for prediction in fitting}
    places = shared_places([cost(prediction) for prediction in fitting], ties)
    kinds = alike_kinds([(cost(prediction), prediction.plan) for prediction in fitting], places, ties)
    front = front_of(np.array([best.step_time for best in fitting]), np.array([best.memory["total"] for best in fitting]))
    tight = sum(prediction.verdict is Verdict.TIGHT for prediction in predicted)
    rejected = {OUT_OF_MEMORY: len(predicted) - len(fitting) - tight, TIGHT: tight}
    fullest = min(estimator.pools, key=lambda pool: pool.machine.memory.usable).machine
    return SearchResult(
        objective=objective,
        num_evaluated=len(predicted),
        num_feasible=len(fitting),
        rejected={reason: count for reason, count in rejected.items() if count},
        left_out=layouts_left_out(estimator.job, estimator.cluster.num_chips, space),
        search_time=clock.process_time() - begin,
        plans=tuple(fitting[:top]),
        ranking=PlanRanking(
            places=places[:top],
            ties=ties,
            kinds=tuple(AlikePlans(position=position, prediction=by_plan[plan], alike=alike) for position, plan, alike in kinds[:top]),
        ),
        least_time=min((prediction.step_time for prediction in fitting), default=math.inf),
        pareto=tuple(fitting[index] for index in front),
        least_memory=tuple(sorted(predicted, key=lambda prediction: prediction.memory["total"])[:1]),
        baselines=(),
        num_tight=tight,
        memory=MemoryBudget.of(fullest.memory, memory_rule(memory_headroom, risk)),
        interrupted=interrupted,
    )


def _refined(estimator: MixedEstimator, prediction: Prediction, predict: Callable[[Plan], Prediction]) -> Prediction:
    """Return the prediction after moves of one layer between ranks, as long as one shortens the step and the plan fits."""
    p = prediction.plan.layout.pp
    while True:
        moves: list[Plan] = []
        for source, target in permutations(range(p), 2):
            # from a rank's longest virtual stage to another rank's shortest
            layers = list(prediction.plan.stage_layers)
            longest = max(range(source, len(layers), p), key=layers.__getitem__)
            if layers[longest]:
                layers[longest] -= 1
                layers[min(range(target, len(layers), p), key=layers.__getitem__)] += 1
                moves.append(replace(prediction.plan, stage_layers=tuple(layers)))
        times = sorted((mixed_step_time(estimator, plan), i) for i, plan in enumerate(moves))
        quicker = (predict(moves[i]) for time, i in times if time < prediction.step_time)
        better = next((candidate for candidate in quicker if candidate.fits), None)
        if better is None:
            return prediction
        prediction = better
