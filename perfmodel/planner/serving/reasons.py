"""Reasons why a serving plan is worse than the best: the term of the objective that grows most."""

from __future__ import annotations

from perfmodel.cost.serving.times import expected_tokens
from perfmodel.planner.serving.result import RankedPlan, ServingObjective

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
    job, running = prediction.job, max(prediction.running, 1e-12)
    yielded = 1.0 if job.speculation is None else float(expected_tokens(job.speculation.acceptance, job.speculation.draft_tokens))
    steps = max(job.output_len.mean - 1.0, 0.0) / yielded
    if objective is ServingObjective.LATENCY:
        total, scale = prediction.request_latency.mean, steps
    else:
        total = 1.0 / max(plan.tokens_per_second_per_chip, 1e-12)
        chips = (prediction.plan.num_chips + plan.idle_chips) / prediction.plan.replicas
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
        at_once, best_at_once = one.running * one.plan.replicas, other.running * other.plan.replicas
        if at_once < 0.9 * best_at_once:
            details.append(f"{at_once:,.0f} requests at once, not {best_at_once:,.0f}")
    if plan.idle_chips > best.idle_chips:
        details.append(f"{plan.idle_chips} chips stay idle")
    return "; ".join((main, *details))
