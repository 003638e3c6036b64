"""Plans that are usual without a search, within the given space. They are always shown, even if they are slower or do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfmodel.cost.estimate import Estimator
from perfmodel.parallel.choices import AttentionKernel, Recompute
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, divisors
from perfmodel.planner.published_layouts import PublishedDegrees, published_degrees
from perfmodel.planner.result import Baseline
from perfmodel.planner.uniform.space import Space, recompute_choices, tensor_degrees
from perfmodel.planner.uniform.sweep import Sweep, sweep

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


def baselines(
    estimator: Estimator, space: Space, *, memory_headroom: float | None, risk: float | None = None, attention: AttentionKernel
) -> tuple[Baseline, ...]:
    """Return plain data parallelism, FSDP over all chips, the Megatron rule of thumb and the model's published layout, within the space."""
    within = _Within(estimator=estimator, space=space, headroom=memory_headroom, risk=risk, attention=attention)
    job, chips = estimator.job, estimator.cluster.num_chips
    flat: Fixed = {"pp": 1, "tp": 1, "cp": 1}
    too_many = f"global_batch={job.global_batch} has fewer sequences than there are chips, or does not divide among {chips}"
    published = published_degrees(job.transformer.name)
    return (
        within.first_that_fits(DATA_PARALLEL, [flat | {"dp_replicate": chips, "dp_shard": 1, "zero": 0}], too_many),
        within.first_that_fits(FSDP, [flat | {"dp_replicate": 1, "dp_shard": chips, "zero": 3}], too_many)
        if chips > 1
        else Baseline(name=FSDP, prediction=(), reason="there is one chip only"),
        megatron_rule_of_thumb(within),
        *([] if published is None else [as_published(within, published)]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Within:
    """Space and settings of a search that baselines must keep."""

    estimator: Estimator
    space: Space
    headroom: float | None
    risk: float | None
    attention: AttentionKernel

    def first_that_fits(self, name: str, steps: Sequence[Fixed], reason: str, *, least: Recompute = Recompute.NONE) -> Baseline:
        """Return the first of these sets of knobs with a plan that fits, under the least recomputation, with its fastest micro-batch.

        If none fits, the last step under the least recomputation is predicted with the plan of least memory.

        reason: why there may be no plan
        least: recomputation to start with, if the space has it (unfused attention comes before it)
        """
        allowed = [fixed for fixed in steps if all(self.space.admits(knob, value) for knob, value in fixed.items())]
        if not allowed:
            return Baseline(name=name, prediction=(), reason="excluded by a given flag")
        stages = self.space.runs.sharding
        allowed = [fixed for fixed in allowed if stages.admits(int(fixed["zero"]), pipelined=int(fixed["pp"]) > 1, replicated=False)]
        if not allowed:
            return Baseline(name=name, prediction=(), reason="not what the framework runs")
        last: Sweep | None = None
        recomputes = recompute_choices(self.space, self.attention, DEFAULT_RECOMPUTE_OPERATORS)
        if least in recomputes:
            recomputes = recomputes[recomputes.index(least) :]
        for recompute in recomputes:
            for fixed in allowed:
                knobs = {**self.space.fixed, **fixed, "recompute": str(recompute)}
                space = replace(self.space, fixed=knobs, orders=self.space.orders[:1])
                state = sweep(
                    self.estimator, space, top=1, memory_headroom=self.headroom, risk=self.risk, attention=self.attention, also=()
                )
                if state.counts.num_feasible:
                    return self._baseline(name, state)
                if state.counts.num_evaluated and recompute is recomputes[0]:
                    last = state
        return Baseline(name=name, prediction=(), reason=reason) if last is None else self._baseline(name, last)

    def _baseline(self, name: str, state: Sweep) -> Baseline:
        ids = state.best.time.ids if state.counts.num_feasible else state.best.least.ids
        found_best = self.estimator.predict(state.plan(int(ids[0])), memory_headroom=self.headroom, risk=self.risk)
        return Baseline(name=name, prediction=(found_best,), reason="")


def megatron_rule_of_thumb(within: _Within) -> Baseline:
    """Return the plan of the Megatron rule of thumb: tp up to the node, then pp until the model fits, data parallelism with the rest.

    Sequence parallelism with tp, 1f1b, distributed optimizer (ZeRO-1) where there are data ranks, recomputation where nothing else helps.
    Source: Narayanan et al., SC21, takeaways 1 and 2; Korthikanti et al. 2022.
    """
    job, cluster, space = within.estimator.job, within.estimator.cluster, within.space
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
    return within.first_that_fits(RULE_OF_THUMB, steps, reason, least=Recompute.SELECTIVE)


def as_published(within: _Within, published: PublishedDegrees) -> Baseline:
    """Return the model's published degrees on these chips, with the fastest schedule, micro-batch and dispatcher."""
    chips, model = within.estimator.cluster.num_chips, published.tp * published.cp * published.pp
    if chips % model or (chips // published.pp) % published.ep:
        degrees = ", ".join(f"{name} {getattr(published, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(published, name) > 1)
        return Baseline(name=AS_PUBLISHED, prediction=(), reason=f"{degrees} do not divide {chips:,} chips")
    data = chips // model
    zero = published.zero if data * published.cp > 1 else 0
    step: Fixed = {"tp": published.tp, "cp": published.cp, "pp": published.pp, "zero": zero}
    step |= {"dp_shard": data if zero else 1, "dp_replicate": 1 if zero else data}
    step |= {"ep": published.ep} if published.ep > 1 else {}
    job = within.estimator.job
    return within.first_that_fits(AS_PUBLISHED, [step], f"its layout does not divide global_batch={job.global_batch}")
