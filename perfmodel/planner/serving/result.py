"""Results of a search for serving plans, and reasons why a plan is worse than the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.cost.serving.load import ServedLoad
from perfmodel.cost.serving.times import Array, expected_tokens
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.units import format_time
from perfmodel.parallel.serving.plan import ServiceLayout, ServingPlan
from perfmodel.parallel.serving.prediction import ServingPrediction

LIMITED = ("ttft", "tpot", "request_latency")
"""Times that may have a limit."""

LIMIT_HEADROOM = 0.015
"""Share of a limit by which a chosen plan's prediction must stay below it.

A search chooses the plan that is predicted fastest for its load, so its prediction errs to the fast side. Without headroom 11 % of the
choices among published runs break the limit that they were chosen under, with this 9 %, and the others yield half a percent less
(docs/accuracy-serving.md has larger and smaller values).
"""


class ServingObjective(StrEnum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Limits that every plan must meet; None: no limit. [s]

    ttft, tpot, request_latency
    is_p99   for ttft and tpot the 99th percentile over requests, by the closed forms, else the mean
    headroom share of each limit by which a prediction must stay below it
    """

    ttft: float | None = None
    tpot: float | None = None
    request_latency: float | None = None
    is_p99: bool = False
    headroom: float = LIMIT_HEADROOM

    def __post_init__(self) -> None:
        if not 0.0 <= self.headroom < 1.0:
            raise bad_field("limit_headroom", self.headroom, "must be a share from 0 to below 1", "write 0.02 for 2 % below each limit")
        for name, value in self.given().items():
            if not 0.0 < value < 1e9:
                raise bad_field(name, value, "must be a positive time", "write 300 ms")

    def given(self) -> dict[str, float]:
        """Return limit -> seconds, for the limits that are set."""
        values = {name: getattr(self, name) for name in LIMITED}
        return {name: value for name, value in values.items() if value is not None}

    def aims(self) -> dict[str, float]:
        """Return limit -> largest prediction [s]: the limit less its headroom."""
        return {name: value * (1.0 - self.headroom) for name, value in self.given().items()}

    def times_of(self, load: ServedLoad) -> dict[str, Array]:
        """Return the times of a load that the limits apply to."""
        ttft, tpot = (load.ttft_p99, load.tpot_p99) if self.is_p99 else (load.ttft, load.tpot)
        return {"ttft": ttft, "tpot": tpot, "request_latency": load.request_latency}

    def seen(self, prediction: ServingPrediction) -> dict[str, float]:
        """Return the times of a prediction that the limits apply to."""
        times = {"ttft": prediction.ttft, "tpot": prediction.tpot}
        limited = {name: time.p99 if self.is_p99 and time.p99 is not None else time.mean for name, time in times.items()}
        return {**limited, "request_latency": prediction.request_latency.mean}

    def __str__(self) -> str:
        of = " (p99)" if self.is_p99 else ""
        return ", ".join(f"{name} {format_time(value)}{of if name != 'request_latency' else ''}" for name, value in self.given().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan at its load, and why it is not the best.

    prediction       at that load: its job has the concurrency, the formats of weights and cache
    tokens_per_second_per_chip   output tokens, over all given chips, including idle ones
    cost_per_million             output tokens; None without a known price     [USD]
    idle_chips       chips without a replica
    meets            all limits
    reason           why it is worse than the best; empty for the best
    """

    prediction: ServingPrediction
    tokens_per_second_per_chip: float
    cost_per_million: float | None
    idle_chips: int
    meets: bool = True
    reason: str = ""

    @property
    def plan(self) -> ServingPlan:
        return self.prediction.plan

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Intervals of the prediction; tokens per second per chip count idle chips too."""
        serving = self.plan.num_chips / (self.plan.num_chips + self.idle_chips)
        share = {name: serving if name == "tokens_per_second" else 1.0 for name in self.prediction.intervals}
        return {name: (low * share[name], high * share[name]) for name, (low, high) in self.prediction.intervals.items()}

    def badness(self, objective: ServingObjective) -> float:
        """Return the objective that a search minimises. All chips are paid for, so the cost of a token follows from tokens per second."""
        if objective is ServingObjective.LATENCY:
            return self.prediction.request_latency.mean
        return -self.tokens_per_second_per_chip


def ranked_plan(prediction: ServingPrediction, *, num_chips: int, price: float, meets: bool = True) -> RankedPlan:
    """Return a predicted plan on `num_chips` chips, all of which are paid for: [USD/h] each; 0: not known."""
    plan = prediction.plan
    per_chip = prediction.tokens_per_second_per_chip * plan.num_chips / num_chips
    return RankedPlan(
        prediction=prediction,
        tokens_per_second_per_chip=per_chip,
        cost_per_million=1e6 * price / 3600.0 / per_chip if price > 0 and per_chip > 0 else None,
        idle_chips=num_chips - plan.num_chips,
        meets=meets,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan at a load on the Pareto front of tokens per chip and tokens per user.

    concurrency   requests in flight, of all replicas together; meets: the given limits
    ttft, tpot    means [s]
    """

    layout: ServiceLayout
    quantization: str
    kv_precision: str
    concurrency: int
    tokens_per_second_per_user: float
    tokens_per_second_per_chip: float
    ttft: float
    tpot: float
    meets: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBaseline:
    """A usual plan without a search, at its best load within the limits, or the nearest to them.

    plans    empty if there is no such plan; reason: why there is none, or which limit it breaks
    """

    name: str
    meaning: str
    plans: tuple[RankedPlan, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingSearchResult:
    """Result of a search for serving plans.

    num_evaluated   plans of the space, each at its load; plans of one layout differ in tokens of a step and in sequences at once
    num_feasible    plans that fit, are not saturated and meet the limits
    rejected        reason -> plans; with num_feasible these are all evaluated plans
    left_out        reason -> layouts that are impossible, or that the engine does not run
    is_load_searched  no load was given: each plan was tried under many, and is ranked at its best
    plans           the best of each layout and format, best first; if none of them meets the limits, those of `disaggregated` that do
    best            of `plans` and `disaggregated`
    pareto          most tokens per user first, over all plans and loads, without limits
    disaggregated   the best plans of two pools, if requested
    price_per_hour  of a chip; 0: not known       [USD/h]
    search_time     CPU seconds
    """

    objective: ServingObjective
    limits: ServingLimits
    num_chips: int
    num_evaluated: int
    num_feasible: int
    rejected: Mapping[str, int]
    left_out: Mapping[str, int]
    is_load_searched: bool
    plans: tuple[RankedPlan, ...]
    pareto: tuple[FrontPoint, ...]
    baselines: tuple[ServingBaseline, ...]
    price_per_hour: float
    search_time: float
    disaggregated: tuple[RankedPlan, ...] = ()

    @property
    def best(self) -> RankedPlan:
        if not self.plans:
            raise InputError("best: no plan was found")
        return min((*self.plans[:1], *self.disaggregated[:1]), key=lambda ranked: ranked.badness(self.objective))


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
    return f"{abs(ratio):.1%} {'fewer' if ratio < 0 else 'more'} tokens"
