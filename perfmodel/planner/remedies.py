"""The smallest changes with which a plan, or a job, fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from perfmodel.cost.estimate import Estimator
from perfmodel.parallel.algebra.rules import RuleSet, default_rule_sets
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.offloads import OFFLOADS
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import LOSS_MOMENT, Prediction
from perfmodel.parallel.stage_cuts import default_stage_layers
from perfmodel.planner.explain import changed_knobs, plan_knobs
from perfmodel.planner.limits import Prober, chip_counts, fewest_chips
from perfmodel.planner.result import FittingChange
from perfmodel.planner.uniform.quickest import best_plan
from perfmodel.planner.uniform.space import Space, runnable_space

Knob = int | str | bool
MakeEstimator = Callable[[int, int], Estimator]

#: Remedies that are named at most.
MOST = 3

_MICRO_BATCH = ("micro_batch",)
_RECOMPUTE = ("recompute",)
_SHARDING = ("zero", "dp_replicate", "dp_shard")
_DEGREES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "sequence_parallel", "schedule", "virtual_stages")
#: Offloads that need sharded parameters.
_OF_ZERO_3 = ("parameters",)
#: What of a plan is freed, the smallest change first: each part alone, then together.
_STEPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (_MICRO_BATCH, _RECOMPUTE, _SHARDING, _DEGREES),
    ((*_MICRO_BATCH, *_RECOMPUTE), (*_RECOMPUTE, *_SHARDING), (*_MICRO_BATCH, *_SHARDING), (*_SHARDING, *_DEGREES)),
    ((*_MICRO_BATCH, *_RECOMPUTE, *_SHARDING, *_DEGREES),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Conditions that a remedy must keep.

    make            the estimator of so many tokens a sequence on so many chips
    with_setting    the estimator of the job with a setting more; None where another one contradicts it
    small_loss      form of the loss that keeps few logits and that the framework has; empty: none, or one is stated
    any_framework   plans that the framework cannot run are remedies too
    """

    estimator: Estimator
    make: MakeEstimator
    with_setting: Callable[[str, bool | str], Estimator | None]
    small_loss: str
    memory_headroom: float | None
    risk: float | None
    any_framework: bool

    def best(self, space: Space, attention: AttentionKernel, recompute_operators: tuple[str, ...] | None = None) -> Prediction | None:
        """Return the fastest plan of the space that fits."""
        if not self.any_framework:
            space = runnable_space(space, self.estimator.profile, self.estimator.job)
        found = best_plan(
            self.estimator,
            space,
            memory_headroom=self.memory_headroom,
            risk=self.risk,
            attention=attention,
            recompute_operators=recompute_operators,
        )
        return None if found is None else self.predict(found[1])

    def predict(self, plan: Plan) -> Prediction:
        return self.estimator.predict(plan, memory_headroom=self.memory_headroom, risk=self.risk)

    def with_small_loss(self) -> Estimator | None:
        """Return the estimator of the job with a loss that keeps few logits."""
        return self.with_setting("loss", self.small_loss) if self.small_loss else None

    @property
    def loss_flag(self) -> dict[str, Knob]:
        return {"setting": f"loss={self.small_loss}"}

    def accepts(self, prediction: Prediction) -> bool:
        """Whether a plan fits and the framework can run it."""
        return prediction.fits and (self.any_framework or not prediction.not_runnable)


def remedies_of_plan(asked: Asked, plan: Plan) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which the plan fits: of its knobs as few as possible, of these the fastest; then more chips."""
    if plan.assignment is not None:
        return ()
    found: dict[tuple[tuple[str, Knob], ...], FittingChange] = {}
    for step in _STEPS:
        offloaded = _offloaded(asked, plan) if step is _STEPS[0] else ()
        better = sorted((*_freed(asked, plan, step), *offloaded), key=lambda remedy: remedy.prediction.step_time)
        for remedy in better:
            found.setdefault(tuple(sorted(remedy.changes.items())), remedy)
        if len(found) >= MOST:
            break
    if not found or asked.predict(plan).memory_moment == LOSS_MOMENT:
        small_loss = _with_small_loss(asked, plan)
        if small_loss is not None:
            found[tuple(sorted(small_loss.changes.items()))] = small_loss
    remedies = sorted(found.values(), key=lambda remedy: (len(remedy.changes), remedy.prediction.step_time))[:MOST]
    if len(remedies) < MOST:
        fixed = {knob: value for knob, value in plan_knobs(plan).items() if knob not in ("rules", "dp_replicate", "dp_shard")}
        space = Space(fixed=fixed, orders=(plan.order,), rules=_rules(plan), stage_layers=plan.stage_layers)
        remedies += more_chips(asked, space, plan.attention, plan)
    return tuple(remedies)


def _freed(asked: Asked, plan: Plan, step: tuple[tuple[str, ...], ...]) -> Iterator[FittingChange]:
    for freed in step:
        fixed = {knob: value for knob, value in plan_knobs(plan).items() if knob not in (*freed, "rules")}
        layers = () if "pp" in freed else plan.stage_layers
        space = Space(fixed=fixed, orders=(plan.order,), rules=_rules(plan), stage_layers=layers)
        prediction = asked.best(space, plan.attention, plan.recompute_operators)
        if prediction is not None and "pp" in freed:
            prediction = _with_default_stages(asked, prediction)
        if prediction is not None:
            yield FittingChange(changes=changed_knobs(plan, prediction.plan), prediction=prediction)


def _offloaded(asked: Asked, plan: Plan) -> Iterator[FittingChange]:
    """Yield the plan with one thing more in the host's memory, of those for which the framework has a switch."""
    profile = asked.estimator.profile
    for name in profile.runs.offloads:
        if name in _OF_ZERO_3 and plan.zero != 3:
            continue
        estimator = asked.with_setting(OFFLOADS[name], True)
        if estimator is None:
            continue
        changed = replace(plan, profile=estimator.profile.name)
        prediction = replace(asked, estimator=estimator).predict(changed)
        if asked.accepts(prediction):
            yield FittingChange(changes={"offload": name}, prediction=prediction)


def _with_small_loss(asked: Asked, plan: Plan) -> FittingChange | None:
    """Return the plan with a loss that keeps few logits: alone, or with as few other knobs as possible, of these the fastest."""
    estimator = asked.with_small_loss()
    if estimator is None:
        return None
    small, changed = replace(asked, estimator=estimator), replace(plan, profile=estimator.profile.name)
    prediction = small.predict(changed)
    if small.accepts(prediction):
        return FittingChange(changes=asked.loss_flag, prediction=prediction)
    for step in _STEPS:
        if remedies := list(_freed(small, changed, step)):
            fastest = min(remedies, key=lambda remedy: remedy.prediction.step_time)
            return replace(fastest, changes={**asked.loss_flag, **fastest.changes})
    return None


def _with_default_stages(asked: Asked, prediction: Prediction) -> Prediction | None:
    """Return it with the layers of each stage that a plan has by default, for no flag states others; None where it does not fit so."""
    plan = prediction.plan
    layers = default_stage_layers(plan.job, plan.layout.pp, plan.virtual_stages)
    if plan.stage_layers == layers:
        return prediction
    found = asked.predict(replace(plan, stage_layers=layers))
    return found if asked.accepts(found) else None


def _rules(plan: Plan) -> tuple[RuleSet, ...]:
    return default_rule_sets() if plan.rules in default_rule_sets() else (plan.rules,)


def remedies_of_search(asked: Asked, space: Space, attention: AttentionKernel) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which some plan fits: a knob freed, a loss that keeps few logits, more chips."""
    found: list[FittingChange] = []
    for knob in space.fixed:
        free = replace(
            space,
            fixed={name: value for name, value in space.fixed.items() if name != knob},
            orders=space.orders[:1],
            lists=(),
        )
        prediction = asked.best(free, attention)
        if prediction is not None:
            changes = {name: value for name, value in _given(space, prediction.plan).items() if name == knob}
            found.append(FittingChange(changes=changes, prediction=prediction))
    found.sort(key=lambda remedy: remedy.prediction.step_time)
    estimator = asked.with_small_loss()
    prediction = replace(asked, estimator=estimator).best(space, attention) if estimator is not None else None
    small_loss = [FittingChange(changes=asked.loss_flag, prediction=prediction)] if prediction is not None else []
    found = [*found[: MOST - 1 - len(small_loss)], *small_loss, *more_chips(asked, space, attention, None)]
    if found or not space.fixed:
        return tuple(found)
    free = replace(space, fixed={}, maximum={}, orders=space.orders[:1], lists=())
    prediction = asked.best(free, attention)
    remedies = [FittingChange(changes={}, prediction=prediction)] if prediction is not None else more_chips(asked, free, attention, None)
    return tuple(replace(each, changes={**each.changes, **_given(space, each.prediction.plan)}) for each in remedies)


def _given(space: Space, plan: Plan) -> dict[str, Knob]:
    """Return the knobs that were given, with the values of this plan."""
    knobs = plan_knobs(plan) | {"dp": plan.layout.data_parallel}
    return {knob: knobs[knob] for knob in space.fixed if knob in knobs}


def more_chips(asked: Asked, space: Space, attention: AttentionKernel, plan: Plan | None) -> list[FittingChange]:
    """Return the fewest chips with which some plan of the space fits, as `perfmodel limits` finds them; empty where there are none."""
    estimator, job = asked.estimator, asked.estimator.job
    candidates = [count for count in chip_counts(estimator) if count > estimator.cluster.num_chips]
    if not candidates:
        return []
    if not asked.any_framework:
        space = runnable_space(space, estimator.profile, job)
    prober = Prober(
        make=asked.make,
        seq_len=job.seq_len,
        chips=estimator.cluster.num_chips,
        global_batch=job.global_batch,
        space=replace(space, orders=space.orders[:1], lists=()),
        attention=attention,
        headroom=asked.memory_headroom,
        risk=asked.risk,
    )
    given = math.prod(int(space.fixed.get(axis, 1)) for axis in ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp"))
    if all(axis in space.fixed for axis in ("pp", "cp", "tp")) and (
        "dp" in space.fixed or {"dp_replicate", "dp_shard"} <= space.fixed.keys()
    ):
        candidates = [count for count in candidates if count == given]  # all degrees are given: their product is the number of chips
        if not candidates:
            return []
    limit = fewest_chips(prober, candidates)
    if not limit.prediction:
        return []
    prediction = limit.prediction[0]
    changes: dict[str, Knob] = {"chips": limit.value}
    return [FittingChange(changes=changes | (changed_knobs(plan, prediction.plan) if plan is not None else {}), prediction=prediction)]
