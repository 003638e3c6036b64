"""Plans that people would use without a search: always shown, even where they lose or do not fit; they obey what a search was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfmodel.cost.estimate import Estimator
from perfmodel.parallel.layout import AttentionKernel, Recompute
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

#: What each is, in a sentence.
MEANINGS = {
    DATA_PARALLEL: "whole copies on all chips, the least recomputation that fits, the fastest micro-batch",
    FSDP: "ZeRO-3 over all chips, the least recomputation that fits, the fastest micro-batch",
    RULE_OF_THUMB: "tp up to the node, then pp until it fits (Narayanan et al. 2021), 1f1b, ZeRO-1, recomputation last",
    AS_PUBLISHED: "tp, cp, pp, ep and ZeRO as they published them, data parallelism with the rest, the least recomputation that fits",
}


def baselines(
    estimator: Estimator, space: Space, *, memory_headroom: float | None, risk: float | None = None, attention: AttentionKernel
) -> tuple[Baseline, ...]:
    """Plain data parallelism, FSDP over all chips, the Megatron rule of thumb, and what a model's makers published, within the space."""
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
    """The space that a search was given, and what it predicts with."""

    estimator: Estimator
    space: Space
    headroom: float | None
    risk: float | None
    attention: AttentionKernel

    def first_that_fits(self, name: str, steps: Sequence[Fixed], reason: str, *, least: Recompute = Recompute.NONE) -> Baseline:
        """The first of these sets of knobs of which a plan fits, with its fastest micro-batch, under the least recomputation possible.

        Where none fits, the one of the last step with the least recomputation that needs the least memory. `reason`: why there may be none.
        least: with which recomputation to begin, where the space has it (beside unfused attention)
        """
        allowed = [fixed for fixed in steps if all(self.space.admits(knob, value) for knob, value in fixed.items())]
        if not allowed:
            return Baseline(name=name, prediction=(), reason="excluded by a given flag")
        runs = self.space.runs
        allowed = [fixed for fixed in allowed if runs.admits_zero(int(fixed["zero"]), pipelined=int(fixed["pp"]) > 1, replicated=False)]
        if not allowed:
            return Baseline(name=name, prediction=(), reason="not what the framework runs")
        last: Sweep | None = None
        recomputes = recompute_choices(self.space, self.attention, DEFAULT_RECOMPUTE_OPERATORS)
        if least in recomputes:
            recomputes = recomputes[recomputes.index(least) :]
        for recompute in recomputes:
            for fixed in allowed:
                found = self._sweep(fixed | {"recompute": str(recompute)})
                if found.num_feasible:
                    return self._baseline(name, found)
                if found.num_evaluated and recompute is recomputes[0]:
                    last = found
        return Baseline(name=name, prediction=(), reason=reason) if last is None else self._baseline(name, last)

    def _sweep(self, fixed: Fixed) -> Sweep:
        space = replace(self.space, fixed={**self.space.fixed, **fixed}, orders=self.space.orders[:1])
        return sweep(self.estimator, space, top=1, memory_headroom=self.headroom, risk=self.risk, attention=self.attention)

    def _baseline(self, name: str, found: Sweep) -> Baseline:
        ids = found.best_time.ids if found.num_feasible else found.least.ids
        found_best = self.estimator.predict(found.plan(int(ids[0])), memory_headroom=self.headroom, risk=self.risk)
        return Baseline(name=name, prediction=(found_best,), reason="")


def megatron_rule_of_thumb(within: _Within) -> Baseline:
    """Tensor parallelism up to the node, then pipeline until the model fits, data parallelism with the rest.

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


def as_published(within: _Within, told: PublishedDegrees) -> Baseline:
    """The degrees of the model's makers on the chips at hand: schedule, micro-batch and how tokens reach experts are the fastest."""
    chips, model = within.estimator.cluster.num_chips, told.tp * told.cp * told.pp
    if chips % model or (chips // told.pp) % told.ep:
        degrees = ", ".join(f"{name} {getattr(told, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(told, name) > 1)
        return Baseline(name=AS_PUBLISHED, prediction=(), reason=f"{degrees} do not divide {chips:,} chips")
    data = chips // model
    zero = told.zero if data * told.cp > 1 else 0
    step: Fixed = {"tp": told.tp, "cp": told.cp, "pp": told.pp, "zero": zero}
    step |= {"dp_shard": data if zero else 1, "dp_replicate": 1 if zero else data}
    step |= {"ep": told.ep} if told.ep > 1 else {}
    job = within.estimator.job
    return within.first_that_fits(AS_PUBLISHED, [step], f"its layout does not divide global_batch={job.global_batch}")
