"""Plans that are usual without a search, within the given space. They are always shown, even if they are slower or do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.layout import divisors
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.published_layouts import PublishedDegrees, published_degrees
from perfmodel.planner.result import Baseline
from perfmodel.planner.uniform.space import recompute_choices, tensor_degrees
from perfmodel.planner.uniform.sweep import Sweep, sweep

if TYPE_CHECKING:
    from perfmodel.planner.uniform.search import UniformPlans

Fixed = dict[str, int | str | bool]

DATA_PARALLEL = "data parallel"
FSDP = "FSDP"
RULE_OF_THUMB = "Megatron rule of thumb"
AS_PUBLISHED = "as its makers ran it"

#: Description of each baseline.
MEANINGS = {
    DATA_PARALLEL: "whole copies on all chips, the least recomputation that fits, the fastest micro-batch",
    FSDP: "ZeRO-3 over all chips, the least recomputation that fits, the fastest micro-batch",
    RULE_OF_THUMB: "tp up to the node, then pp until it fits (Narayanan et al. 2021), 1f1b, ZeRO-1, recomputation last",
    AS_PUBLISHED: "tp, cp, pp, ep and ZeRO as they published them, data parallelism with the rest, the least recomputation that fits",
}


def baselines(plans: UniformPlans) -> tuple[Baseline[Prediction], ...]:
    """Return plain data parallelism, FSDP over all chips, the Megatron rule of thumb and the model's published layout, within the space."""
    job, chips = plans.estimator.job, plans.estimator.cluster.num_chips
    flat: Fixed = {"pp": 1, "tp": 1, "cp": 1}
    too_many = f"global_batch={job.global_batch} has fewer sequences than there are chips, or does not divide among {chips}"
    published = published_degrees(job.transformer.name)
    return (
        first_that_fits(plans, DATA_PARALLEL, [flat | {"dp_replicate": chips, "dp_shard": 1, "zero": 0}], too_many),
        first_that_fits(plans, FSDP, [flat | {"dp_replicate": 1, "dp_shard": chips, "zero": 3}], too_many)
        if chips > 1
        else _none(FSDP, "there is one chip only"),
        megatron_rule_of_thumb(plans),
        *([] if published is None else [as_published(plans, published)]),
    )


def first_that_fits(
    plans: UniformPlans, name: str, steps: Sequence[Fixed], reason: str, *, least: Recompute = Recompute.NONE
) -> Baseline[Prediction]:
    """Return the first of these sets of knobs with a plan that fits, under the least recomputation, with its fastest micro-batch.

    If none fits, the last step under the least recomputation is predicted with the plan of least memory.

    reason: why there may be no plan
    least: recomputation to start with, if the space has it (unfused attention comes before it)
    """
    space, sharding = plans.space, plans.space.runs.sharding
    allowed = [fixed for fixed in steps if all(space.admits(knob, value) for knob, value in fixed.items())]
    if not allowed:
        return _none(name, "excluded by a given flag")
    allowed = [fixed for fixed in allowed if sharding.admits(int(fixed["zero"]), pipelined=int(fixed["pp"]) > 1, replicated=False)]
    if not allowed:
        return _none(name, "not what the framework runs")
    last: Sweep | None = None
    recomputes = recompute_choices(space, plans.kernel, DEFAULT_RECOMPUTE_OPERATORS)
    if least in recomputes:
        recomputes = recomputes[recomputes.index(least) :]
    for recompute in recomputes:
        for fixed in allowed:
            part = replace(space, fixed={**space.fixed, **fixed, "recompute": str(recompute)}, orders=space.orders[:1])
            state = sweep(plans.estimator, part, top=1, **plans.rule, attention=plans.kernel, also=())
            if state.counts.num_feasible:
                return _predicted(plans, name, state)
            if state.counts.num_evaluated and recompute is recomputes[0]:
                last = state
    return _none(name, reason) if last is None else _predicted(plans, name, last)


def _predicted(plans: UniformPlans, name: str, state: Sweep) -> Baseline[Prediction]:
    ids = state.best.time.ids if state.counts.num_feasible else state.best.least.ids
    best = plans.estimator.predict(state.plan(int(ids[0])), **plans.rule)
    return Baseline(name=name, meaning=MEANINGS[name], plans=(best,))


def _none(name: str, reason: str) -> Baseline[Prediction]:
    return Baseline(name=name, meaning=MEANINGS[name], plans=(), reason=reason)


def megatron_rule_of_thumb(plans: UniformPlans) -> Baseline[Prediction]:
    """Return the plan of the Megatron rule of thumb: tp up to the node, then pp until the model fits, data parallelism with the rest.

    Sequence parallelism with tp, 1f1b, distributed optimizer (ZeRO-1) where there are data ranks, recomputation where nothing else helps.
    Source: Narayanan et al., SC21, takeaways 1 and 2; Korthikanti et al. 2022.
    """
    job, cluster, space = plans.estimator.job, plans.estimator.cluster, plans.space
    chips = cluster.num_chips
    cp = int(space.fixed.get("cp", 1))
    widths = [t for t in tensor_degrees(job, min(cluster.chips_per_node, chips), space) if chips % (t * cp) == 0]
    widest = max(widths, default=1)
    scatters = any(rules.scatters_residual for rules in space.rule_sets)
    steps: list[Fixed] = []
    for tp, pp in [(t, 1) for t in widths] + [(widest, p) for p in divisors(chips // (widest * cp))[1:]]:
        data = chips // (tp * pp * cp)
        zero = 1 if data * cp > 1 and space.admits("zero", 1) else 0
        step: Fixed = {"tp": tp, "pp": pp, "cp": cp, "zero": zero, "dp_shard": data if zero else 1, "dp_replicate": 1 if zero else data}
        usual: Fixed = {"sequence_parallel": tp > 1 and scatters, "schedule": "1f1b"}
        steps.append(step | {knob: value for knob, value in usual.items() if knob not in space.fixed})
    reason = f"no degree of it divides global_batch={job.global_batch} and the model"
    return first_that_fits(plans, RULE_OF_THUMB, steps, reason, least=Recompute.SELECTIVE)


def as_published(plans: UniformPlans, published: PublishedDegrees) -> Baseline[Prediction]:
    """Return the model's published degrees on these chips, with the fastest schedule, micro-batch and dispatcher."""
    chips, model = plans.estimator.cluster.num_chips, published.tp * published.cp * published.pp
    if chips % model or (chips // published.pp) % published.ep:
        degrees = ", ".join(f"{name} {getattr(published, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(published, name) > 1)
        return _none(AS_PUBLISHED, f"{degrees} do not divide {chips:,} chips")
    data = chips // model
    zero = published.zero if data * published.cp > 1 else 0
    step: Fixed = {"tp": published.tp, "cp": published.cp, "pp": published.pp, "zero": zero}
    step |= {"dp_shard": data if zero else 1, "dp_replicate": 1 if zero else data}
    step |= {"ep": published.ep} if published.ep > 1 else {}
    job = plans.estimator.job
    return first_that_fits(plans, AS_PUBLISHED, [step], f"its layout does not divide global_batch={job.global_batch}")
