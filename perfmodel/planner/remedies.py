"""Smallest changes with which a plan, a job or a service fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, groupby, islice, product
from typing import Any

from perfmodel.cost.estimate import Estimator
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import MOST_HOST_MEMORY
from perfmodel.frameworks.engine import Engine
from perfmodel.frameworks.engine_formats import formats_on
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.choices import OFFLOADS, AttentionKernel, Recompute
from perfmodel.parallel.framework_ref import FrameworkRef
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.request import Service
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.parallel.stage_cuts import default_stage_layers
from perfmodel.planner.explain import changed_knobs, plan_knobs, space_around
from perfmodel.planner.limits import Prober, chip_counts, fewest_chips
from perfmodel.planner.result import FittingChange
from perfmodel.planner.uniform.quickest import best_plan
from perfmodel.planner.uniform.space import Space, runnable_space
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization
from perfmodel.workload.serving import Lengths, ServingJob

Knob = int | str | bool

#: Largest number of remedies that are named.
MOST = 3

_MICRO_BATCH = ("micro_batch",)
_RECOMPUTE = ("recompute",)
_SHARDING = ("zero", "dp_replicate", "dp_shard")
_DEGREES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "sequence_parallel", "schedule", "virtual_stages", "ep", "etp", "dispatcher")
_EVERYTHING = (*_MICRO_BATCH, *_RECOMPUTE, *_SHARDING, *_DEGREES)
#: Knobs of a plan that are freed, the smallest change first: none, each group alone, two groups, all.
_FREED: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((),),
    (_MICRO_BATCH, _RECOMPUTE, _SHARDING, _DEGREES),
    ((*_MICRO_BATCH, *_RECOMPUTE), (*_RECOMPUTE, *_SHARDING), (*_MICRO_BATCH, *_SHARDING), (*_SHARDING, *_DEGREES)),
    (_EVERYTHING,),
)
#: Flag -> kind of change, where several flags are one change.
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("zero", "dp_shard"), "sharding"),
    **dict.fromkeys(("schedule", "virtual_stages"), "schedule"),
    **dict.fromkeys(("etp", "dispatcher"), "ep"),
    "sequence_parallel": "tp",
}
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
    changes         settings of the job in addition to its own, as flags
    """

    estimator: Estimator
    make: Callable[[int, int], Estimator]
    with_settings: Callable[[Mapping[str, bool | str]], RemedyConditions | None]
    small_loss: str
    memory_headroom: float | None
    risk: float | None
    any_framework: bool
    least_zero: int = 0
    changes: Mapping[str, Knob] = field(default_factory=dict)

    def space(self, space: Space) -> Space:
        """Return the part of a space that satisfies the conditions."""
        if not self.any_framework:
            space = runnable_space(space, self.estimator.profile, self.estimator.job)
        stages = tuple(stage for stage in space.runs.sharding.zero if stage >= self.least_zero)
        return replace(space, runs=space.runs.having(zero=stages)) if self.least_zero else space

    def best(self, space: Space, attention: AttentionKernel, recompute_operators: tuple[str, ...] | None = None) -> Prediction | None:
        """Return the fastest plan of the space that fits."""
        rule: dict[str, Any] = {"memory_headroom": self.memory_headroom, "risk": self.risk}
        best = best_plan(self.estimator, self.space(space), **rule, attention=attention, recompute_operators=recompute_operators)
        prediction = None if best is None else self.predict(best[1])
        if prediction is not None and prediction.conditions.host_memory > MOST_HOST_MEMORY and "recompute" not in space.fixed:
            fixed = {**space.fixed, "recompute": str(Recompute.FULL)}
            return self.best(replace(space, fixed=fixed), attention, recompute_operators)
        return prediction

    def predict(self, plan: Plan) -> Prediction:
        return self.estimator.predict(plan, memory_headroom=self.memory_headroom, risk=self.risk)

    def accepts(self, prediction: Prediction) -> bool:
        """Whether a plan fits, in the host's memory too, and the framework can run it."""
        if prediction.conditions.host_memory > MOST_HOST_MEMORY:
            return False
        return prediction.fits and prediction.plan.zero >= self.least_zero and (self.any_framework or not prediction.not_runnable)


def _with_settings(conditions: RemedyConditions) -> list[RemedyConditions]:
    """Return the conditions with each set of settings that the framework offers: none, a loss that keeps few logits, an offload, both."""
    profile = conditions.estimator.profile
    stated = FrameworkRef.parse(profile.name).settings
    options = []
    for loss, offload in product(dict.fromkeys(("", conditions.small_loss)), ("", *profile.runs.offloads)):
        names = offload.split(",") if offload else []
        settings: dict[str, bool | str] = {OFFLOADS[name]: True for name in names} | ({"loss": loss} if loss else {})
        option = conditions.with_settings(settings) if settings else conditions
        if option is None:
            continue
        stages = [_LEAST_ZERO.get(name, 0) for name in names]
        if conditions.estimator.cluster.num_chips == 1:
            stages = [stage for stage in stages if stage > 1]
        changes: dict[str, Knob] = {"setting": f"loss={loss}"} if loss else {}
        if names:
            changes["offload"] = ",".join(name for name, setting in OFFLOADS.items() if name in names or stated.get(setting))
        options.append(replace(option, least_zero=max(stages, default=0), changes=changes))
    return sorted(options, key=lambda option: len(option.changes))


def remedies_of_plan(conditions: RemedyConditions, plan: Plan) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which the plan fits: the fewest changes first, then the fastest; then more chips."""
    if plan.assignment is not None:
        return ()
    remedies = _changes_that_fit(_with_settings(conditions), plan)[:MOST]
    fewest, larger = math.inf, list[FittingChange]()
    for freed in (("dp_replicate", "dp_shard"), (*_SHARDING, *_RECOMPUTE), *([] if remedies else [_EVERYTHING])):
        if len(remedies) + len(larger) < MOST:
            options = more_chips(conditions, _space_around(plan, freed), plan.attention, partial(changed_knobs, plan))
            larger += [remedy for remedy in options if remedy.prediction.plan.num_chips < fewest]
            fewest = min([fewest, *(remedy.prediction.plan.num_chips for remedy in options)])
    return (*remedies, *larger)


def _changes_that_fit(options: Sequence[RemedyConditions], plan: Plan) -> list[FittingChange]:
    """Return changes of the plan's knobs and settings on the same chips, the fewest first, then the fastest."""

    @cache
    def may_fit(index: int) -> bool:
        """Whether any plan on these chips fits with these settings."""
        return _freed(options[index], plan, _EVERYTHING) is not None

    remedies: list[FittingChange] = []
    most_changes = len(_FREED) - 1 + max(len(option.changes) for option in options)
    for count in range(1, most_changes + 1):
        better = [
            remedy
            for index, option in enumerate(options)
            if 0 <= count - len(option.changes) < len(_FREED)
            for freed in _FREED[count - len(option.changes)]
            if (not freed or may_fit(index)) and (remedy := _freed(option, plan, freed)) is not None
        ]
        for remedy in sorted(better, key=_least_change):
            if not any(is_needless(remedy, other, _LEAST_GAIN) for other in remedies):
                remedies.append(remedy)
        remedies.sort(key=_least_change)
        if len(remedies) >= MOST and _size(remedies[MOST - 1]) <= count:
            break
    return remedies


def _least_change(remedy: FittingChange) -> tuple[int, float]:
    return _size(remedy), remedy.prediction.step_time


def _size(remedy: FittingChange) -> int:
    """Return the number of changes. Flags of one kind are one; the number of replicas follows from the other degrees."""
    return len({_KINDS.get(flag, flag) for flag in remedy.changes} - {"dp_replicate"})


def is_needless(change: Any, other: Any, least_gain: float) -> bool:
    """Whether the changes of another record (of `FittingChange` or advice) are a subset of its changes, and it is hardly faster."""
    is_faster = change.prediction.step_time < other.prediction.step_time * (1.0 - least_gain)
    return other.changes.items() <= change.changes.items() and not is_faster


def _freed(conditions: RemedyConditions, plan: Plan, freed: tuple[str, ...]) -> FittingChange | None:
    """Return the fastest plan that fits with only the `freed` knobs changed; the plan itself if none is freed. None if none fits."""
    plan = replace(plan, profile=conditions.estimator.profile.name)
    if not freed:
        prediction = conditions.predict(plan)
    elif (best := conditions.best(_space_around(plan, freed), plan.attention, plan.recompute_operators)) is None:
        return None
    else:
        # no flag sets other layers of the stages than the default ones
        chosen = best.plan
        layers = default_stage_layers(chosen.job, chosen.layout.pp, chosen.virtual_stages, chosen.schedule.placement)
        is_free = "pp" in freed and best.plan.stage_layers != layers
        prediction = conditions.predict(replace(best.plan, stage_layers=layers)) if is_free else best
    if not conditions.accepts(prediction):
        return None
    return FittingChange(changes={**conditions.changes, **changed_knobs(plan, prediction.plan)}, prediction=prediction)


def _space_around(plan: Plan, freed: tuple[str, ...]) -> Space:
    """Return the space of the plan with some of its knobs free."""
    space = space_around(plan, {knob: value for knob, value in plan_knobs(plan).items() if knob not in (*freed, "rules")})
    return replace(space, stage_layers=()) if "pp" in freed else space


def remedies_of_search(conditions: RemedyConditions, space: Space, attention: AttentionKernel) -> tuple[FittingChange, ...]:
    """Return up to `MOST` changes with which some plan fits: a knob freed, a loss that keeps few logits, an offload, more chips."""

    def best(space: Space, named: Collection[str] = (), conditions: RemedyConditions = conditions) -> list[FittingChange]:
        prediction = conditions.best(space, attention)
        changes = {} if prediction is None else {**conditions.changes, **_values(prediction.plan, named)}
        return [] if prediction is None else [FittingChange(changes=changes, prediction=prediction)]

    one_order, given = replace(space, orders=space.orders[:1], lists=()), space.fixed
    others = {knob: {name: value for name, value in given.items() if name != knob} for knob in given}
    freed = sorted(chain(*(best(replace(one_order, fixed=fixed), (knob,)) for knob, fixed in others.items())), key=_least_change)
    switched: list[FittingChange] = []
    for _, options in groupby(_with_settings(conditions)[1:], key=lambda option: len(option.changes)):
        switched = switched or sorted(chain(*(best(space, (), option) for option in options)), key=_least_change)[:1]
    fitting = [*freed[: MOST - 1 - len(switched)], *switched, *more_chips(conditions, space, attention)]
    if fitting or not given:
        return tuple(fitting)
    free = replace(one_order, fixed={}, maximum={})
    return tuple(best(free, given) or more_chips(conditions, free, attention, lambda plan: _values(plan, given)))


def _values(plan: Plan, named: Collection[str]) -> dict[str, Knob]:
    """Return the values of the named knobs in a plan."""
    knobs = plan_knobs(plan) | {"dp": plan.layout.data_parallel}
    return {knob: knobs[knob] for knob in named if knob in knobs}


def more_chips(
    conditions: RemedyConditions, space: Space, attention: AttentionKernel, changes: Callable[[Plan], Mapping[str, Knob]] = lambda plan: {}
) -> list[FittingChange]:
    """Return the fewest chips with which some plan of the space fits, as in `perfmodel limits`; empty where there are none.

    changes   changes of a plan in addition to the chips
    """
    estimator, fixed = conditions.estimator, space.fixed
    # the text of a mixed cluster states the number of its chips: no flag changes it
    counts = [] if estimator.cluster.pools else chip_counts(estimator)
    candidates = [count for count in counts if count > estimator.cluster.num_chips]
    if fixed.keys() >= {"pp", "cp", "tp"} and ("dp" in fixed or fixed.keys() >= {"dp_replicate", "dp_shard"}):
        given = math.prod(int(fixed.get(axis, 1)) for axis in ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp"))
        candidates = [count for count in candidates if count == given]  # all degrees are fixed: their product is the number of chips
    if not candidates:
        return []
    prober = Prober(
        make=conditions.make,
        seq_len=estimator.job.seq_len,
        chips=estimator.cluster.num_chips,
        global_batch=estimator.job.global_batch,
        space=replace(conditions.space(space), orders=space.orders[:1], lists=()),
        attention=attention,
        headroom=conditions.memory_headroom,
        risk=conditions.risk,
    )
    limit = fewest_chips(prober, candidates)
    return [FittingChange(changes={"chips": limit.value, **changes(plan.plan)}, prediction=plan) for plan in limit.prediction]


# --- Services ------------------------------------------------------------------------------------------------------

_TP = (2, 4, 8, 16, 32, 64)
_MAX_BATCHES = (512, 256, 128, 64, 32, 16, 8, 4)
_CHIPS = tuple(2**power for power in range(13))
_LEAST_LENGTH = 128


def remedies_of_service(
    service: Service,
    prediction: ServingPrediction,
    *,
    engine: Engine,
    cluster: Cluster,
    predict: Callable[[Service], ServingPrediction],
) -> tuple[Mapping[str, Any], ...]:
    """Return up to three single changes that fit, of different kinds, those on the same chips first.

    predict   prediction of a changed service; raises InputError for an invalid one
    """
    layout, memory, usable = prediction.plan.layout, prediction.memory, prediction.memory_usable

    def fitting(changes: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the changes that fit, with the tp that follows from more chips."""
        for change in changes:
            try:
                changed = predict(service.having(change))
            except InputError:
                continue
            if changed.fits:
                yield {name: changed.plan.to_dict()["tp"] if name == "tp" else value for name, value in change.items()}

    free_memory = usable - (memory["total"] - memory["cache"])
    kinds: list[Iterable[Mapping[str, Any]]] = []
    if service.knobs.tp is not None and isinstance(layout, ServingLayout):  # else every tp on these chips was tried
        kinds.append({"tp": tp} for tp in _TP if layout.tp < tp <= cluster.num_chips)
    if free_memory > 0.0 or memory["weights"] < usable:
        most = (layout.max_batch if isinstance(layout, ServingLayout) else 0) or engine.scheduling.max_batch
        kinds.append({"max_batch": batch} for batch in _MAX_BATCHES if batch < most)
        kinds.append([{"kv_precision": "fp8"}] if str(prediction.job.kv_precision) != "fp8" else [])
    narrower = narrower_formats(engine, cluster.chip, prediction.job.quantization.weight_bytes)
    kinds.append({"quantization": quantization.name} for quantization in narrower)
    if service.knobs.workers is None:  # with the smallest tp that fits
        kinds.append({"chips": chips, "tp": None} for chips in _CHIPS if cluster.num_chips < chips <= cluster.max_chips)
    remedies = list(chain(*(islice(fitting(changes), 1) for changes in kinds)))
    if len(remedies) < MOST and free_memory > 0.0:
        steps = shortened(prediction.job)
        fits = bisect_left(steps, True, key=lambda change: not any(fitting([change])))
        remedies += steps[max(fits - 1, 0) : fits]
    return tuple(remedies[:MOST])


def shortened(job: ServingJob) -> list[Mapping[str, Any]]:
    """Return shorter lengths of the longer of prompt and answer, in steps of 128 tokens, the shortest first."""
    name, lengths = ("input_len", job.input_len) if job.input_len.most >= job.output_len.most else ("output_len", job.output_len)
    return [{name: Lengths(least=min(lengths.least, most), most=most)} for most in range(_LEAST_LENGTH, lengths.most, _LEAST_LENGTH)]


def narrower_formats(engine: Engine, chip: Chip, below: float) -> list[Quantization]:
    """Return formats that the engine runs on the chip, the widest first; formats of equal width in the order of `QUANTIZATIONS`.

    below   bytes of a weight that they need less than
    """
    formats = [QUANTIZATIONS[name] for name in formats_on(engine.kernels.formats, chip)]
    narrower = [quantization for quantization in formats if quantization.weight_bytes < below and not quantization.experts_only]
    return sorted(narrower, key=lambda quantization: -round(4 * quantization.weight_bytes))
