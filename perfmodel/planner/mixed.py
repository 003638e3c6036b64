"""Search for plans on clusters of several kinds of chips.

Every plan of the space is evaluated with all chips of one kind, once per kind. The best of these are predicted on the mixed cluster, with
the layers of their stages distributed by speed. The best of those are refined by moves of single layers. If the space has more plans than
are kept, the result is the best of the predicted ones and has a note on that.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.mixed import MixedEstimator, balanced_plan, mixed_estimator, mixed_step_time
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import Verdict, memory_rule
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.result import TIGHT, Baseline, MemoryBudget, Objective, SearchResult, TrainingSearch
from perfmodel.planner.ties import ranking_of
from perfmodel.planner.uniform.search import UniformPlans
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import OUT_OF_MEMORY, Sweep, sweep
from perfmodel.search.select import front_of

#: Number of the best plans per kind of chip that are predicted on the mixed cluster.
CANDIDATES = 128

#: Number of the best plans whose layers are moved one by one.
REFINED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedRows:
    """Predicted plans, and those of them that fit, best first, with moved layers."""

    predicted: list[Prediction]
    fitting: list[Prediction]
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedPlans:
    """Uniform plans on a cluster of several kinds of chips, as a `PlanSpace`; it has no baselines."""

    uniform: UniformPlans

    @property
    def estimator(self) -> MixedEstimator:
        return mixed_estimator(self.uniform.estimator)

    @property
    def also(self) -> Collection[str]:
        return ("front",)

    @property
    def space(self) -> Space:
        """The space, with all ranks of a tp and cp group on one kind of chip."""
        space = self.uniform.space
        group = math.gcd(*(pool.cluster.num_chips for pool in self.estimator.pools))
        bounds = {name: min(group, space.maximum.get(name, group)) for name in ("tp", "cp") if name not in space.fixed}
        inner = tuple(order for order in space.orders if {*order[:2]} == {"tp", "cp"})
        return replace(space, maximum={**space.maximum, **bounds}, orders=inner or space.orders)

    def predict(self, plan: Plan) -> Prediction:
        return self.estimator.predict(plan, **self.uniform.rule)

    def evaluate(self, top: int) -> MixedRows:
        cost, predictions = self.uniform.objective.cost, dict[Plan, Prediction]()
        number, interrupted, space = 0, False, self.space
        calibration = self.estimator.machine.basis.calibration
        # the plans with the least memory may have a cp and tp group on two kinds of chips
        for subspace in [space] if "cp" in space.fixed else [space, replace(space, fixed={**space.fixed, "cp": 1})]:
            for pool in self.estimator.pools if not predictions else ():
                state = self._alike(pool, subspace)
                number, interrupted = max(number, state.counts.num_evaluated), interrupted or state.interrupted
                for plan_id in dict.fromkeys(int(i) for kept in (state.best.time, state.best.front, state.best.least) for i in kept.ids):
                    # equal plans of two kinds of chips differ in the names of cluster and calibration alone
                    plan = replace(state.plan(plan_id), cluster=self.estimator.cluster.name, calibration=calibration)
                    if plan not in predictions:
                        with suppress(InputError):  # ranks of one group on chips of two kinds
                            predictions[plan] = self.predict(balanced_plan(self.estimator, plan))
        predicted = list({prediction.plan: prediction for prediction in predictions.values()}.values())
        fitting = sorted((prediction for prediction in predicted if prediction.fits), key=cost)
        if self.uniform.objective is not Objective.MEMORY:
            refined = [*(_refined(self, prediction) for prediction in fitting[:REFINED]), *fitting[REFINED:]]
            fitting = sorted({prediction.plan: prediction for prediction in refined}.values(), key=cost)  # two may be refined to one plan
        if fitting and len(predicted) < number:
            note = f"of {number:,} plans the best {CANDIDATES} of each kind of chip alone were predicted on the mixed cluster"
            fitting[0] = replace(fitting[0], warnings=(*fitting[0].warnings, note))
        return MixedRows(predicted=predicted, fitting=fitting, interrupted=interrupted)

    def _alike(self, pool: Estimator, space: Space) -> Sweep:
        """Evaluate the space with all chips as chips of one kind, in nodes that divide them."""
        kind, chips = pool.cluster, self.estimator.cluster.num_chips
        alike = replace(pool, cluster=replace(kind, num_chips=chips, chips_per_node=math.gcd(chips, kind.chips_per_node)))
        uniform = self.uniform
        return sweep(alike, space, top=CANDIDATES, **uniform.rule, attention=uniform.kernel, progress=uniform.progress)

    def ranked(self, rows: MixedRows, top: int) -> TrainingSearch:
        predicted, best, uniform = rows.predicted, rows.fitting, self.uniform
        tight = sum(prediction.verdict is Verdict.TIGHT for prediction in predicted)
        by_plan = {prediction.plan: prediction for prediction in best}
        costs = [(uniform.objective.cost(prediction), plan) for plan, prediction in by_plan.items()]
        least_time = min((prediction.step_time for prediction in best), default=math.inf)
        fullest = min(self.estimator.pools, key=lambda pool: pool.machine.memory.usable).machine
        return SearchResult(
            objective=uniform.objective,
            conditions=MemoryBudget.of(fullest.memory, memory_rule(**uniform.rule)),
            num_evaluated=len(predicted),
            num_feasible=len(best),
            rejected={OUT_OF_MEMORY: len(predicted) - len(best) - tight, TIGHT: tight},
            left_out=layouts_left_out(self.estimator.job, self.estimator.cluster.num_chips, self.space),
            interrupted=rows.interrupted,
            plans=tuple(best[:top]),
            ranking=ranking_of(costs, uniform.ties, top, by_plan.__getitem__, least_time=least_time),
            least_memory=tuple(sorted(predicted, key=Objective.MEMORY.cost)[:1]),
        )

    def front(self, rows: MixedRows) -> tuple[Prediction, ...]:
        times, sizes = (np.array([cost(plan) for plan in rows.fitting]) for cost in (Objective.TIME.cost, Objective.MEMORY.cost))
        return tuple(rows.fitting[index] for index in front_of(times, sizes))

    def baselines(self, result: TrainingSearch) -> tuple[Baseline[Prediction], ...]:
        return ()


def _refined(space: MixedPlans, prediction: Prediction) -> Prediction:
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
        times = sorted((mixed_step_time(space.estimator, plan), i) for i, plan in enumerate(moves))
        quicker = (space.predict(moves[i]) for time, i in times if time < prediction.step_time)
        better = next((candidate for candidate in quicker if candidate.fits), None)
        if better is None:
            return prediction
        prediction = better
