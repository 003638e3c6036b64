"""The smallest changes with which a plan, or a job, fits."""

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

#: Remedies that are named at most.
MOST = 3

_MICRO_BATCH = ("micro_batch",)
_RECOMPUTE = ("recompute",)
_SHARDING = ("zero", "dp_replicate", "dp_shard")
_DEGREES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "sequence_parallel", "schedule", "virtual_stages")
_EVERYTHING = (*_MICRO_BATCH, *_RECOMPUTE, *_SHARDING, *_DEGREES)
#: What of a plan is freed, the smallest change first: nothing, each part alone, two parts, all.
_FREED: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((),),
    (_MICRO_BATCH, _RECOMPUTE, _SHARDING, _DEGREES),
    ((*_MICRO_BATCH, *_RECOMPUTE), (*_RECOMPUTE, *_SHARDING), (*_MICRO_BATCH, *_SHARDING), (*_SHARDING, *_DEGREES)),
    (_EVERYTHING,),
)
#: A change in addition to others that already fit gains at least this share of the step.
_LEAST_GAIN = 0.01
#: Least ZeRO stage of data-parallel ranks that an offload needs (DeepSpeed's offload_optimizer and offload_param).
_LEAST_ZERO: Mapping[str, int] = {"optimizer": 1, "parameters": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Conditions that a remedy must keep.

    make            the estimator of so many tokens a sequence on so many chips
    with_settings   these conditions of the job with more settings; None where one of them is stated already
    small_loss      form of the loss that keeps few logits and that the framework has; empty: none, or one is stated
    any_framework   plans that the framework cannot run are remedies too
    least_zero      least ZeRO stage of a plan
    """

    estimator: Estimator
    make: MakeEstimator
    with_settings: Callable[[Mapping[str, bool | str]], Asked | None]
    small_loss: str
    memory_headroom: float | None
    risk: float | None
    any_framework: bool
    least_zero: int = 0

    def space(self, space: Space) -> Space:
        """Return the part of a space in which remedies are."""
        if not self.any_framework:
            space = runnable_space(space, self.estimator.profile, self.estimator.job)
        stages = tuple(stage for stage in space.runs.zero if stage >= self.least_zero)
        return replace(space, runs=replace(space.runs, zero=stages)) if self.least_zero else space

    def best(self, space: Space, attention: AttentionKernel, recompute_operators: tuple[str, ...] | None = None) -> Prediction | None:
        """Return the fastest plan of the space that fits."""
        found = self._fastest(space, attention, recompute_operators)
        if found is not None and found.host_memory > MOST_HOST_MEMORY and "recompute" not in space.fixed:
            fixed = {**space.fixed, "recompute": str(Recompute.FULL)}
            found = self._fastest(replace(space, fixed=fixed), attention, recompute_operators)
        return found

    def _fastest(self, space: Space, attention: AttentionKernel, recompute_operators: tuple[str, ...] | None) -> Prediction | None:
        found = best_plan(
            self.estimator,
            self.space(space),
            memory_headroom=self.memory_headroom,
            risk=self.risk,
            attention=attention,
            recompute_operators=recompute_operators,
        )
        return None if found is None else self.predict(found[1])

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

    asked     conditions of the job with them
    changes   the settings as flags
    """

    asked: Asked
    changes: Mapping[str, Knob]


def _switches(asked: Asked) -> list[_Switches]:
    """Return the settings that the framework can be asked for, the fewest first."""
    stated = FrameworkRef.parse(asked.estimator.profile.name).settings
    found = []
    for loss in ("", asked.small_loss) if asked.small_loss else ("",):
        for offload in ("", *asked.estimator.profile.runs.offloads):
            names = offload.split(",") if offload else []
            settings: dict[str, bool | str] = {OFFLOADS[name]: True for name in names} | ({"loss": loss} if loss else {})
            switched = asked.with_settings(settings) if settings else asked
            if switched is None:
                continue
            stages = [_LEAST_ZERO.get(name, 0) for name in names]
            if asked.estimator.cluster.num_chips == 1:
                stages = [stage for stage in stages if stage > 1]
            changes: dict[str, Knob] = {"setting": f"loss={loss}"} if loss else {}
            if names:
                changes["offload"] = ",".join(name for name, setting in OFFLOADS.items() if name in names or stated.get(setting))
            found.append(_Switches(asked=replace(switched, least_zero=max(stages, default=0)), changes=changes))
    return sorted(found, key=lambda switches: len(switches.changes))


def remedies_of_plan(asked: Asked, plan: Plan) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which the plan fits: as few as possible, of these the fastest; then more chips."""
    if plan.assignment is not None:
        return ()
    found = _changes_that_fit(_switches(asked), plan)[:MOST]
    if len(found) < MOST:
        fixed = {knob: value for knob, value in plan_knobs(plan).items() if knob not in ("rules", "dp_replicate", "dp_shard")}
        space = Space(fixed=fixed, orders=(plan.order,), rules=_rules(plan), stage_layers=plan.stage_layers)
        found += more_chips(asked, space, plan.attention, plan)
    return tuple(found)


def _changes_that_fit(switches: list[_Switches], plan: Plan) -> list[FittingChange]:
    """Return changes of the plan's knobs and of its settings on the same chips, the fewest first, of these the fastest first."""

    @cache
    def may_fit(index: int) -> bool:
        """Whether any plan of these chips fits with these settings."""
        return next(_freed(switches[index], plan, _EVERYTHING), None) is not None

    found: list[FittingChange] = []
    most_changes = len(_FREED) - 1 + max(len(each.changes) for each in switches)
    for count in range(1, most_changes + 1):
        better = [
            remedy
            for index, each in enumerate(switches)
            if 0 <= count - len(each.changes) < len(_FREED)
            for freed in _FREED[count - len(each.changes)]
            if not freed or may_fit(index)
            for remedy in _freed(each, plan, freed)
        ]
        for remedy in sorted(better, key=_least_change):
            if not any(_is_needless(remedy, other) for other in found):
                found.append(remedy)
        found.sort(key=_least_change)
        if len(found) >= MOST and len(found[MOST - 1].changes) <= count + 1:
            break
    return found


def _least_change(remedy: FittingChange) -> tuple[int, float]:
    return len(remedy.changes), remedy.prediction.step_time


def _is_needless(remedy: FittingChange, other: FittingChange) -> bool:
    """Whether the changes of another remedy are among those of this one, which is hardly faster."""
    is_faster = remedy.prediction.step_time < other.prediction.step_time * (1.0 - _LEAST_GAIN)
    return other.changes.items() <= remedy.changes.items() and not is_faster


def _freed(switches: _Switches, plan: Plan, freed: tuple[str, ...]) -> Iterator[FittingChange]:
    """Yield the fastest plan that fits with these settings, all knobs but the freed ones as they are; the plan itself if none is freed."""
    asked = switches.asked
    plan = replace(plan, profile=asked.estimator.profile.name)
    prediction: Prediction | None
    if freed:
        fixed = {knob: value for knob, value in plan_knobs(plan).items() if knob not in (*freed, "rules")}
        layers = () if "pp" in freed else plan.stage_layers
        space = Space(fixed=fixed, orders=(plan.order,), rules=_rules(plan), stage_layers=layers)
        prediction = asked.best(space, plan.attention, plan.recompute_operators)
        if prediction is not None and "pp" in freed:
            prediction = _with_default_stages(asked, prediction)
    else:
        prediction = asked.predict(plan)
    if prediction is not None and asked.accepts(prediction):
        yield FittingChange(changes={**switches.changes, **changed_knobs(plan, prediction.plan)}, prediction=prediction)


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
    """Return up to `MOST` changes with which some plan fits: a knob freed, a loss that keeps few logits, an offload, more chips."""
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
    found.sort(key=_least_change)
    switched = _switched(_switches(asked), space, attention)
    found = [*found[: MOST - 1 - len(switched)], *switched, *more_chips(asked, space, attention, None)]
    if found or not space.fixed:
        return tuple(found)
    free = replace(space, fixed={}, maximum={}, orders=space.orders[:1], lists=())
    prediction = asked.best(free, attention)
    remedies = [FittingChange(changes={}, prediction=prediction)] if prediction is not None else more_chips(asked, free, attention, None)
    return tuple(replace(each, changes={**each.changes, **_given(space, each.prediction.plan)}) for each in remedies)


def _switched(switches: list[_Switches], space: Space, attention: AttentionKernel) -> list[FittingChange]:
    """Return the fewest settings with which some plan of the space fits, of these the fastest."""
    for count in (1, 2):
        predictions = [(each, each.asked.best(space, attention)) for each in switches if len(each.changes) == count]
        found = [FittingChange(changes=each.changes, prediction=fastest) for each, fastest in predictions if fastest is not None]
        if found:
            return [min(found, key=_least_change)]
    return []


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
    space = asked.space(space)
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
