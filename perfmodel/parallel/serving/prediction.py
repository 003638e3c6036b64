"""Prediction of a serving plan under a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel.parallel.serving.plan import ServingPlan
from perfmodel.workload.serving import ServingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A time over requests. [s]  p99 by closed forms, of a simulation all three; None where there is none."""

    mean: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPrediction:
    """A served load. All times in seconds, memory in bytes of the fullest chip.

    ttft             from a request's arrival to its first token
    tpot             (request latency - TTFT) / (output tokens - 1)
    inter_token      between two tokens of an answer
    request_latency  from arrival to the last token
    decode_step, prefill_time   a step in which all running sequences decode; one prompt by itself
    running          sequences that run at once in a replica, on average; queued: that wait
    max_sequences    sequences of mean length whose cache fits in a replica
    tokens_per_second_per_chip   output tokens, of all chips
    requests_per_second          of all replicas
    parts            of a decode step; they add up to `decode_step`
    goodput          requests a second of all replicas that kept the limits; kept_fraction: the share that did; None: not simulated
    fits             the weights and at least one sequence of full length fit
    fits_load        the load's sequences all run at once
    price_per_hour   of a chip; 0 where it is not known    [USD/h]
    cost_per_million of output tokens, on all chips given; None where it is not known    [USD]
    energy_per_million, carbon_per_million   of output tokens, of the data centre; None where they are not known   [J], [kg]
    remedies         of a plan that does not fit: the smallest single changes of the request that would, word -> value
    """

    job: ServingJob
    plan: ServingPlan
    cluster: str
    ttft: Spread
    tpot: Spread
    inter_token: Spread
    request_latency: Spread
    decode_step: float
    prefill_time: float
    running: float
    queued: float
    max_sequences: float
    tokens_per_second_per_chip: float
    requests_per_second: float
    memory: Mapping[str, float]
    memory_usable: float
    parts: Mapping[str, float]
    rests_on: Mapping[str, str]
    fits: bool
    fits_load: bool
    is_saturated: bool = False
    goodput: float | None = None
    kept_fraction: float | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    remedies: tuple[Mapping[str, Any], ...] = ()
    price_per_hour: float = 0.0
    cost_per_million: float | None = None
    energy_per_million: float | None = None
    carbon_per_million: float | None = None

    @property
    def tokens_per_second_per_user(self) -> float:
        """Output rate of one user: 1 / TPOT."""
        return 1.0 / self.tpot.mean if self.tpot.mean > 0 else 0.0
