"""Smallest changes with which a plan, or a job, fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from perfmodel.cost.estimate import Estimator
from perfmodel.foundation.memory_headroom import MOST_HOST_MEMORY
from perfmodel.parallel.algebra.rules import RuleSet, default_rule_sets
from perfmodel.parallel.framework_ref import FrameworkRef
from perfmodel.parallel.layout import AttentionKernel, Recompute
from perfmodel.parallel.offloads import OFFLOADS
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.stage_cuts import default_stage_layers
from perfmodel.planner.explain import changed_knobs, plan_knobs
from perfmodel.planner.limits import Prober, chip_counts, fewest_chips
from perfmodel.planner.result import FittingChange
from perfmodel.planner.uniform.quickest import best_plan
from perfmodel.planner.uniform.space import Space, runnable_space

Knob = int | str | bool
MakeEstimator = Callable[[int, int], Estimator]

#: Largest number of remedies that are named.
MOST = 3

_MICRO_BATCH = ("micro_batch",)
_RECOMPUTE = ("recompute",)
_SHARDING = ("zero", "dp_replicate", "dp_shard")
_DEGREES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "sequence_parallel", "schedule", "virtual_stages")
_EVERYTHING = (*_MICRO_BATCH, *_RECOMPUTE, *_SHARDING, *_DEGREES)
#: Knobs of a plan that are freed, the smallest change first: none, each group alone, two groups, all.
_FREED: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((),),
    (_MICRO_BATCH, _RECOMPUTE, _SHARDING, _DEGREES),
    ((*_MICRO_BATCH, *_RECOMPUTE), (*_RECOMPUTE, *_SHARDING), (*_MICRO_BATCH, *_SHARDING), (*_SHARDING, *_DEGREES)),
    (_EVERYTHING,),
)
#: Least gain, as a share of the step, of a change in addition to others that already fit.
_LEAST_GAIN = 0.01
#: Least ZeRO stage of data-parallel ranks that an offload needs (DeepSpeed's offload_optimizer and offload_param).
_LEAST_ZERO: Mapping[str, int] = {"optimizer": 1, "parameters": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyConditions:
    """Conditions that a remedy must keep.

    make            makes the estimator for a sequence length and a number of chips
    with_settings   returns the same conditions for the job with more settings; None where one of them is stated already
    small_loss      form of the loss that keeps few logits, if the framework has one; empty: none, or one is stated
    any_framework   plans that the framework cannot run are remedies too
    least_zero      least ZeRO stage of a plan
    """

    estimator: Estimator
    make: MakeEstimator
    with_settings: Callable[[Mapping[str, bool | str]], RemedyConditions | None]
    small_loss: str
    memory_headroom: float | None
    risk: float | None
    any_framework: bool
    least_zero: int = 0

    def space(self, space: Space) -> Space:
        """Return the part of a space that satisfies the conditions."""
        if not self.any_framework:
            space = runnable_space(space, self.estimator.profile, self.estimator.job)
        stages = tuple(stage for stage in space.runs.zero if stage >= self.least_zero)
        return replace(space, runs=replace(space.runs, zero=stages)) if self.least_zero else space

    def best(self, space: Space, attention: AttentionKernel, recompute_operators: tuple[str, ...] | None = None) -> Prediction | None:
        """Return the fastest plan of the space that fits."""
        best = self._fastest(space, attention, recompute_operators)
        if best is not None and best.host_memory > MOST_HOST_MEMORY and "recompute" not in space.fixed:
            fixed = {**space.fixed, "recompute": str(Recompute.FULL)}
            best = self._fastest(replace(space, fixed=fixed), attention, recompute_operators)
        return best

    def _fastest(self, space: Space, attention: AttentionKernel, recompute_operators: tuple[str, ...] | None) -> Prediction | None:
        best = best_plan(
            self.estimator,
            self.space(space),
            memory_headroom=self.memory_headroom,
            risk=self.risk,
            attention=attention,
            recompute_operators=recompute_operators,
        )
        return None if best is None else self.predict(best[1])

    def predict(self, plan: Plan) -> Prediction:
        return self.estimator.predict(plan, memory_headroom=self.memory_headroom, risk=self.risk)

    def accepts(self, prediction: Prediction) -> bool:
        """Whether a plan fits, in the host's memory too, and the framework can run it."""
        if prediction.host_memory > MOST_HOST_MEMORY:
            return False
        return prediction.fits and prediction.plan.zero >= self.least_zero and (self.any_framework or not prediction.not_runnable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switches:
    """Settings that a job may have in addition: a loss that keeps few logits, an offload, both, or none.

    conditions   conditions of the job with these settings
    changes      the settings as flags
    """

    conditions: RemedyConditions
    changes: Mapping[str, Knob]


def _switches(conditions: RemedyConditions) -> list[_Switches]:
    """Return the additional settings that the framework offers, the fewest first."""
    stated = FrameworkRef.parse(conditions.estimator.profile.name).settings
    options = []
    for loss in ("", conditions.small_loss) if conditions.small_loss else ("",):
        for offload in ("", *conditions.estimator.profile.runs.offloads):
            names = offload.split(",") if offload else []
            settings: dict[str, bool | str] = {OFFLOADS[name]: True for name in names} | ({"loss": loss} if loss else {})
            switched = conditions.with_settings(settings) if settings else conditions
            if switched is None:
                continue
            stages = [_LEAST_ZERO.get(name, 0) for name in names]
            if conditions.estimator.cluster.num_chips == 1:
                stages = [stage for stage in stages if stage > 1]
            changes: dict[str, Knob] = {"setting": f"loss={loss}"} if loss else {}
            if names:
                changes["offload"] = ",".join(name for name, setting in OFFLOADS.items() if name in names or stated.get(setting))
            options.append(_Switches(conditions=replace(switched, least_zero=max(stages, default=0)), changes=changes))
    return sorted(options, key=lambda switches: len(switches.changes))


def remedies_of_plan(conditions: RemedyConditions, plan: Plan) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which the plan fits: the fewest changes first, then the fastest; then more chips."""
    if plan.assignment is not None:
        return ()
    remedies = _changes_that_fit(_switches(conditions), plan)[:MOST]
    if len(remedies) < MOST:
        fixed = {knob: value for knob, value in plan_knobs(plan).items() if knob not in ("rules", "dp_replicate", "dp_shard")}
        space = Space(fixed=fixed, orders=(plan.order,), rules=_rules(plan), stage_layers=plan.stage_layers)
        remedies += more_chips(conditions, space, plan.attention, plan)
    return tuple(remedies)


def _changes_that_fit(switches: list[_Switches], plan: Plan) -> list[FittingChange]:
    """Return changes of the plan's knobs and settings on the same chips, the fewest first, then the fastest."""

    @cache
    def may_fit(index: int) -> bool:
        """Whether any plan on these chips fits with these settings."""
        return next(_freed(switches[index], plan, _EVERYTHING), None) is not None

    remedies: list[FittingChange] = []
    most_changes = len(_FREED) - 1 + max(len(option.changes) for option in switches)
    for count in range(1, most_changes + 1):
        better = [
            remedy
            for index, option in enumerate(switches)
            if 0 <= count - len(option.changes) < len(_FREED)
            for freed in _FREED[count - len(option.changes)]
            if not freed or may_fit(index)
            for remedy in _freed(option, plan, freed)
        ]
        for remedy in sorted(better, key=_least_change):
            if not any(_is_needless(remedy, other) for other in remedies):
                remedies.append(remedy)
        remedies.sort(key=_least_change)
        if len(remedies) >= MOST and len(remedies[MOST - 1].changes) <= count + 1:
            break
    return remedies


def _least_change(remedy: FittingChange) -> tuple[int, float]:
    return len(remedy.changes), remedy.prediction.step_time


def _is_needless(remedy: FittingChange, other: FittingChange) -> bool:
    """Whether the changes of another remedy are a subset of this remedy's, and this remedy is hardly faster."""
    is_faster = remedy.prediction.step_time < other.prediction.step_time * (1.0 - _LEAST_GAIN)
    return other.changes.items() <= remedy.changes.items() and not is_faster


def _freed(switches: _Switches, plan: Plan, freed: tuple[str, ...]) -> Iterator[FittingChange]:
    """Yield the fastest plan that fits with these settings and only the `freed` knobs changed; the plan itself if none is freed."""
    conditions = switches.conditions
    plan = replace(plan, profile=conditions.estimator.profile.name)
    prediction: Prediction | None
    if freed:
        fixed = {knob: value for knob, value in plan_knobs(plan).items() if knob not in (*freed, "rules")}
        layers = () if "pp" in freed else plan.stage_layers
        space = Space(fixed=fixed, orders=(plan.order,), rules=_rules(plan), stage_layers=layers)
        prediction = conditions.best(space, plan.attention, plan.recompute_operators)
        if prediction is not None and "pp" in freed:
            prediction = _with_default_stages(conditions, prediction)
    else:
        prediction = conditions.predict(plan)
    if prediction is not None and conditions.accepts(prediction):
        yield FittingChange(changes={**switches.changes, **changed_knobs(plan, prediction.plan)}, prediction=prediction)


def _with_default_stages(conditions: RemedyConditions, prediction: Prediction) -> Prediction | None:
    """Return the plan with the default layers of each stage, since no flag sets others; None where it does not fit."""
    plan = prediction.plan
    layers = default_stage_layers(plan.job, plan.layout.pp, plan.virtual_stages)
    if plan.stage_layers == layers:
        return prediction
    by_default = conditions.predict(replace(plan, stage_layers=layers))
    return by_default if conditions.accepts(by_default) else None


def _rules(plan: Plan) -> tuple[RuleSet, ...]:
    return default_rule_sets() if plan.rules in default_rule_sets() else (plan.rules,)


def remedies_of_search(conditions: RemedyConditions, space: Space, attention: AttentionKernel) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which some plan fits: a knob freed, a loss that keeps few logits, an offload, more chips."""
    fitting: list[FittingChange] = []
    for knob in space.fixed:
        free = replace(
            space,
            fixed={name: value for name, value in space.fixed.items() if name != knob},
            orders=space.orders[:1],
            lists=(),
        )
        prediction = conditions.best(free, attention)
        if prediction is not None:
            changes = {name: value for name, value in _given(space, prediction.plan).items() if name == knob}
            fitting.append(FittingChange(changes=changes, prediction=prediction))
    fitting.sort(key=_least_change)
    switched = _switched(_switches(conditions), space, attention)
    fitting = [*fitting[: MOST - 1 - len(switched)], *switched, *more_chips(conditions, space, attention, None)]
    if fitting or not space.fixed:
        return tuple(fitting)
    free = replace(space, fixed={}, maximum={}, orders=space.orders[:1], lists=())
    prediction = conditions.best(free, attention)
    remedies = (
        [FittingChange(changes={}, prediction=prediction)] if prediction is not None else more_chips(conditions, free, attention, None)
    )
    return tuple(replace(remedy, changes={**remedy.changes, **_given(space, remedy.prediction.plan)}) for remedy in remedies)


def _switched(switches: list[_Switches], space: Space, attention: AttentionKernel) -> list[FittingChange]:
    """Return the fewest settings with which some plan of the space fits, then the fastest."""
    for count in (1, 2):
        predictions = [(option, option.conditions.best(space, attention)) for option in switches if len(option.changes) == count]
        fitting = [FittingChange(changes=option.changes, prediction=fastest) for option, fastest in predictions if fastest is not None]
        if fitting:
            return [min(fitting, key=_least_change)]
    return []


def _given(space: Space, plan: Plan) -> dict[str, Knob]:
    """Return the given knobs with the values of this plan."""
    knobs = plan_knobs(plan) | {"dp": plan.layout.data_parallel}
    return {knob: knobs[knob] for knob in space.fixed if knob in knobs}


def more_chips(conditions: RemedyConditions, space: Space, attention: AttentionKernel, plan: Plan | None) -> list[FittingChange]:
    """Return the fewest chips with which some plan of the space fits, as in `perfmodel limits`; empty where there are none."""
    estimator, job = conditions.estimator, conditions.estimator.job
    candidates = [count for count in chip_counts(estimator) if count > estimator.cluster.num_chips]
    if not candidates:
        return []
    space = conditions.space(space)
    prober = Prober(
        make=conditions.make,
        seq_len=job.seq_len,
        chips=estimator.cluster.num_chips,
        global_batch=job.global_batch,
        space=replace(space, orders=space.orders[:1], lists=()),
        attention=attention,
        headroom=conditions.memory_headroom,
        risk=conditions.risk,
    )
    given = math.prod(int(space.fixed.get(axis, 1)) for axis in ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp"))
    if all(axis in space.fixed for axis in ("pp", "cp", "tp")) and (
        "dp" in space.fixed or {"dp_replicate", "dp_shard"} <= space.fixed.keys()
    ):
        candidates = [count for count in candidates if count == given]  # all degrees are fixed: their product is the number of chips
        if not candidates:
            return []
    limit = fewest_chips(prober, candidates)
    if not limit.prediction:
        return []
    prediction = limit.prediction[0]
    changes: dict[str, Knob] = {"chips": limit.value}
    return [FittingChange(changes=changes | (changed_knobs(plan, prediction.plan) if plan is not None else {}), prediction=prediction)]
