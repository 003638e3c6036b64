"""Prediction of a serving plan under a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel.foundation.text import facts_text, html_table, percent
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.hardware.cluster_text import chips_text, short_name
from perfmodel.parallel.serving_plan import ServingPlan
from perfmodel.workload.serving import Lengths, ServingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Distribution of a time over requests. [s]  Closed forms give p99, a simulation all percentiles; None: not computed."""

    mean: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedLoad:
    """Requests of a load that run, wait and meet their limits.

    running          mean number of running sequences of a replica; queued: mean number of waiting ones
    fits             all sequences of the load run at once
    is_saturated     more requests come than are answered
    goodput          requests per second of all replicas that met the limits; kept_fraction: their share; None: not simulated
    """

    running: float
    queued: float
    fits: bool
    is_saturated: bool = False
    goodput: float | None = None
    kept_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """Price of a chip, and what output tokens cost on all given chips.

    price_per_hour   of a chip; 0: not known    [USD/h]
    cost_per_million of output tokens; None: not known    [USD]
    energy_per_million, carbon_per_million   of output tokens, of the data centre; None: not known   [J], [kg]
    """

    price_per_hour: float = 0.0
    cost_per_million: float | None = None
    energy_per_million: float | None = None
    carbon_per_million: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingPrediction:
    """Prediction of a serving plan under a load. All times in seconds, memory in bytes of the fullest chip.

    ttft             time to first token, from a request's arrival
    tpot             time per output token: (request latency - TTFT) / (output tokens - 1)
    inter_token      latency between two tokens of an answer
    request_latency  from arrival to the last token
    prefill_time     prefill of one prompt alone
    max_sequences    sequences of mean length whose cache fits in a replica
    tokens_per_second_per_chip   output tokens of all replicas over all chips
    requests_per_second          of all replicas
    parts            of a decode step; they add up to `decode_step`
    fits             the weights and at least one sequence of full length fit
    not_runnable     why the engine does not run the plan; "" if it does
    remedies         of a plan that does not fit: the smallest single changes of the request with which it would, word -> value
    """

    plan: ServingPlan
    ttft: Spread
    tpot: Spread
    inter_token: Spread
    request_latency: Spread
    prefill_time: float
    load: PredictedLoad
    max_sequences: float
    tokens_per_second_per_chip: float
    requests_per_second: float
    memory: Mapping[str, float]
    memory_usable: float
    parts: Mapping[str, float]
    rests_on: Mapping[str, str]
    fits: bool
    not_runnable: str = ""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    remedies: tuple[Mapping[str, Any], ...] = ()
    costs: TokenCosts = TokenCosts()

    @property
    def job(self) -> ServingJob:
        return self.plan.job

    @property
    def cluster(self) -> str:
        return self.plan.cluster

    @property
    def decode_step(self) -> float:
        """Time of a step in which all running sequences decode. [s]"""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_user(self) -> float:
        """Output rate of one user: 1 / TPOT."""
        return 1.0 / self.tpot.mean if self.tpot.mean > 0 else 0.0

    def __str__(self) -> str:
        return facts_text(summary(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([], summary(self))


def summary(prediction: ServingPrediction) -> list[tuple[str, str]]:
    """Return the rows of the summary: job, plan, times, throughput, memory, basis and notes."""
    plan, fits = prediction.plan, prediction.fits
    times = f"TTFT {format_time(prediction.ttft.mean)}, TPOT {format_time(prediction.tpot.mean)}"
    rate = f"{prediction.tokens_per_second_per_chip:,.0f} output tokens/s a chip, {prediction.tokens_per_second_per_user:,.1f} for a user"
    memory = f"{format_bytes(prediction.memory['total'])} of {format_bytes(prediction.memory_usable)} usable on each chip"
    return [
        ("job", service_line(prediction)),
        ("plan", f"{plan.label()}, {short_name(plan.engine)}"),
        *([("times", f"{times}, request {format_time(prediction.request_latency.mean)}"), ("throughput", rate)] if fits else []),
        ("memory", f"{memory}: {'fits' if fits else 'does not fit'}"),
        ("based on", next(iter(prediction.rests_on.values()), "")),
        *(("note", note) for note in prediction.notes),
    ]


def lengths_line(job: ServingJob) -> str:
    """Return the text of a request: its lengths, the cached share of its prompt, and the tokens drafted for its answer."""
    text = f"{_lengths(job.input_len)} tokens in, {_lengths(job.output_len)} out"
    if job.prefix_hit:
        text += f", {percent(job.prefix_hit)} of a prompt cached"
    if (drafts := job.speculation) is not None:
        drafter = f" by {drafts.draft.name}" if drafts.draft is not None else ""
        text += f", {drafts.draft_tokens} tokens drafted a step{drafter}, {drafts.acceptance:g} accepted"
    return text


def _lengths(lengths: Lengths) -> str:
    return f"{lengths.least:,}" if lengths.least == lengths.most else f"{lengths.least:,} to {lengths.most:,}"


def load_text(job: ServingJob) -> str:
    """Return the text of the load: concurrency or request rate."""
    if job.concurrency is not None:
        return f"{job.concurrency:,} {'in a batch' if job.is_static else 'in flight'}"
    return f"{job.rate:g} a second" if job.rate is not None else "all that fit in flight"


def service_line(prediction: ServingPrediction) -> str:
    """Return the model, its load and its cluster in one line."""
    job = prediction.job
    model = f"{job.model.name} in {job.quantization.name}"
    return f"{model}, {lengths_line(job)}, {load_text(job)}, on {chips_text(prediction.plan.num_chips)} of {short_name(prediction.cluster)}"
