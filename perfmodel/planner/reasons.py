"""Reasons why layouts are not in the space, counted over all degrees, and reasons why plans of a service are worse than the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perfmodel.cost.serving.times import expected_tokens
from perfmodel.parallel.algebra.degrees import admits, broken, unused_axis
from perfmodel.parallel.layout import STAGES_WITHOUT_LAYERS, divisors
from perfmodel.planner.result import RankedPlan, ServingObjective
from perfmodel.planner.uniform.space import Space
from perfmodel.workload.job import TrainingJob

NOT_RUN = "not what the framework runs"


def layouts_left_out(job: TrainingJob, num_chips: int, space: Space) -> dict[str, int]:
    """Return the first rule that each layout (pp, dp_replicate, dp_shard, cp, tp) breaks -> number of layouts."""
    counts: Counter[str] = Counter()
    for tp in divisors(num_chips):
        for pp in divisors(num_chips // tp):
            for cp in divisors(num_chips // (tp * pp)):
                data = num_chips // (tp * pp * cp)
                splits: Sequence[int] = divisors(data)
                if not space.runs.sharding.zero_of_replicas:
                    unmixed = [s for s in splits if s in (1, data)]
                    counts[NOT_RUN] += len(splits) - len(unmixed)
                    splits = unmixed
                allowed = [s for s in splits if space.admits("dp_shard", s) and space.admits("dp_replicate", data // s)]
                reason = _first_broken_rule(job, tp, pp, cp, data, space)
                if reason:
                    counts[reason] += len(splits)
                elif len(allowed) < len(splits):
                    counts["excluded by a given flag"] += len(splits) - len(allowed)
    return dict((+counts).most_common())


def _first_broken_rule(job: TrainingJob, tp: int, pp: int, cp: int, data: int, space: Space) -> str:
    model = job.transformer
    if not all(space.admits(knob, value) for knob, value in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", data))):
        return "excluded by a given flag"
    if not space.runs_degrees(job.seq_len, pp=pp, cp=cp, tp=tp):
        return NOT_RUN
    if any(admits(rules, model, job.seq_len, cp=cp, tp=tp) for rules in space.rule_sets):
        return _broken_otherwise(job, pp, data)
    # by the first rule set; conditions on the sequence come after those on the pipeline
    first = space.rule_sets[0]
    axis = unused_axis(first, model, cp=cp, tp=tp)
    if axis:
        return f"{axis} is more than 1, and rules={first.name} cut nothing by it"
    condition = broken(first, model, job.seq_len, cp=cp, tp=tp)
    if condition is None:
        return ""
    if condition.is_sequence and pp > model.num_hidden_layers + STAGES_WITHOUT_LAYERS:
        return _broken_otherwise(job, pp, data)
    return condition.reason


def _broken_otherwise(job: TrainingJob, pp: int, data: int) -> str:
    model = job.transformer
    if pp > model.num_hidden_layers + STAGES_WITHOUT_LAYERS:
        return f"pp is more than num_hidden_layers={model.num_hidden_layers} and stages for embedding and head"
    if job.global_batch % data:
        return f"dp_replicate*dp_shard does not divide global_batch={job.global_batch}"
    return ""


#: Names of the parts of a decode step in reports.
_WORDS = {
    "products": "matrix products",
    "experts": "experts",
    "attention": "attention",
    "passes": "norms and other passes over memory",
    "communication": "communication",
    "logits": "logits",
    "pipeline_sends": "sends between stages",
    "host": "scheduling and sampling",
    "prompts": "prompts and waiting",
}
_WORSE = {ServingObjective.LATENCY: "slower", ServingObjective.COST: "dearer"}


def terms(plan: RankedPlan, objective: ServingObjective) -> dict[str, float]:
    """Return the objective as a sum over the parts of decode steps and over prompts, the engine's front end and waiting.

    latency       of a request: its decode steps, and the rest                                        [s]
    throughput    chip-seconds of an output token: request latency over its tokens and the concurrent requests, times the chips
    """
    prediction = plan.prediction
    job, running = prediction.job, max(prediction.load.running, 1e-12)
    yielded = 1.0 if job.speculation is None else float(expected_tokens(job.speculation.acceptance, job.speculation.draft_tokens))
    steps = max(job.output_len.mean - 1.0, 0.0) / yielded
    if objective is ServingObjective.LATENCY:
        total, scale = prediction.request_latency.mean, steps
    else:
        total = 1.0 / max(plan.tokens_per_second_per_chip, 1e-12)
        chips = (prediction.plan.num_chips + plan.idle_chips) / prediction.plan.layout.replicas
        scale = steps * chips / (running * job.output_len.mean)
    parts = {name: scale * time for name, time in prediction.parts.items()}
    return parts | {"prompts": total - sum(parts.values())}


def why_worse(plan: RankedPlan, best: RankedPlan, objective: ServingObjective) -> str:
    """Describe in a sentence by how much a plan is worse, and the term that accounts for most of it."""
    ours, theirs = terms(plan, objective), terms(best, objective)
    total, least = sum(ours.values()), sum(theirs.values())
    if not 0 < least < float("inf") or not total < float("inf"):
        return "answers fewer requests than come"
    worse = total / least - 1.0
    if worse < 0.0005:
        if objective is ServingObjective.LATENCY:
            return "as good as the best"
        slower = why_worse(plan, best, ServingObjective.LATENCY)
        return slower if slower == "as good as the best" else f"the same throughput, but {slower}"
    share, word = (1.0 - least / total, "fewer tokens") if objective is ServingObjective.THROUGHPUT else (worse, _WORSE[objective])
    grown = max(ours, key=lambda name: ours[name] - theirs.get(name, 0.0))
    unit, of = (1.0, "s of a request") if objective is ServingObjective.LATENCY else (1e3, "chip-ms a token")
    main = f"{share:.1%} {word}: {_WORDS[grown]} {unit * ours[grown]:.3g} instead of {unit * theirs.get(grown, 0.0):.3g} {of}"
    details = []
    one, other = plan.prediction, best.prediction
    if objective is not ServingObjective.LATENCY:
        at_once, best_at_once = one.load.running * one.plan.layout.replicas, other.load.running * other.plan.layout.replicas
        if at_once < 0.9 * best_at_once:
            details.append(f"{at_once:,.0f} requests at once, not {best_at_once:,.0f}")
    if plan.idle_chips > best.idle_chips:
        details.append(f"{plan.idle_chips} chips stay idle")
    return "; ".join((main, *details))


def against(plan: RankedPlan, best: RankedPlan, objective: ServingObjective) -> str:
    """Describe in a sentence by how much a plan is better or worse than another."""
    if objective is ServingObjective.LATENCY:
        ratio = plan.prediction.request_latency.mean / best.prediction.request_latency.mean - 1
        return f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'quicker'}"
    ratio = plan.tokens_per_second_per_chip / best.tokens_per_second_per_chip - 1
    if abs(ratio) < 5e-4:  # would be printed as 0
        return "equal throughput"
    return f"{abs(ratio):.1%} {'fewer' if ratio < 0 else 'more'} tokens"
