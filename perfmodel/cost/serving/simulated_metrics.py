"""Metrics of a simulated load: percentiles over requests, throughput, goodput, and when a run is long enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from perfmodel.cost.serving.times import Array
from perfmodel.parallel.serving_prediction import Spread

#: TTFT, TPOT, latency [s] and tokens of a completed request.
Answer: TypeAlias = tuple[float, float, float, int]
#: Batches of a run whose means are compared.
_BATCHES = 20
#: Least growth of a run whose mean is too uncertain.
_LEAST_GROWTH = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Metrics of the requests that completed after the warm-up.

    ttft, tpot, inter_token, request_latency   over requests (inter_token: over all gaps between a sequence's steps) [s]
    running, queue         sequences with a slot and requests without, time average [-]
    requests_per_second, tokens_per_second     completed requests, and output tokens [1/s]
    kept_fraction          of the requests that met all limits [-]
    preemptions, steps     in the complete run
    ttft_error             relative standard error of the mean TTFT at a rate; 0 for clients, whose runs match benchmarks [-]
    """

    ttft: Spread
    tpot: Spread
    inter_token: Spread
    request_latency: Spread
    running: float
    queue: float
    requests_per_second: float
    tokens_per_second: float
    kept_fraction: float
    preemptions: int
    steps: int
    ttft_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """End of a run at a rate: when the relative standard errors of mean TTFT and TPOT are at most `error`, or after `most` requests."""

    error: float
    most: int

    def missing(self, answers: Sequence[Answer]) -> int:
        """Return the number of requests that must still complete. [-]"""
        error, number = max(mean_error([answer[at] for answer in answers]) for at in (0, 1)), len(answers)
        if error <= self.error or number >= self.most:
            return 0
        return int(min(max(number * (error / self.error) ** 2, _LEAST_GROWTH * number), self.most)) - number


def mean_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the mean of a stationary series, by batch means, as neighbours are correlated. [-]

    Source: Law, Simulation Modeling and Analysis, section 9.5.3 (batch means).
    """
    size = max(len(values) // _BATCHES, 1)
    batches = [sum(values[at : at + size]) / size for at in range(0, size * (len(values) // size), size)]
    mean = sum(batches) / max(len(batches), 1)
    if mean <= 0 or len(batches) < 2:
        return 0.0
    variance = sum((batch - mean) ** 2 for batch in batches) / (len(batches) - 1)
    return float((variance / len(batches)) ** 0.5 / mean)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunRecord:
    """A run of one engine after its warm-up.

    answers                    TTFT, TPOT, latency [s] and tokens of each request
    gaps                       times between steps [s], each with the number of sequences with that gap
    elapsed                    [s]
    area_running, area_queue   sequences times seconds
    preemptions, steps         in the complete run
    clients                    of a closed loop; 0: of an open one
    """

    answers: Sequence[Answer]
    gaps: Sequence[tuple[float, float]]
    elapsed: float
    area_running: float
    area_queue: float
    preemptions: int
    steps: int
    clients: int = 0

    @property
    def pace(self) -> float:
        """Requests completed a second: c / E2E of clients that are never idle, as the end of a run leaves partial answers. [1/s]"""
        if not self.clients:
            return len(self.answers) / self.elapsed
        return self.clients * len(self.answers) / sum(latency for _, _, latency, _ in self.answers)

    @property
    def ttft_error(self) -> float:
        """Relative standard error of the mean TTFT of an open load. [-]"""
        return 0.0 if self.clients else mean_error([answer[0] for answer in self.answers])


def summarize_runs(records: Sequence[tuple[RunRecord, float]], limits: Mapping[str, float] = MappingProxyType({})) -> SimulatedLoad:
    """Return the metrics of the requests of engines, averaged over engines.

    records   each with its number of engines
    limits    ttft, tpot, request_latency that a request must meet to count as goodput   [s]
    """
    copies = np.array([count for _, count in records], dtype=float)
    paces = np.array([record.pace for record, _ in records])
    weights = np.concatenate([np.full(len(record.answers), count * record.pace / len(record.answers)) for record, count in records])
    ttft, tpot, latency, outputs = np.array([answer for record, _ in records for answer in record.answers]).T
    gaps, seen = (
        np.array([(gap, number * count / record.elapsed) for record, count in records for gap, number in record.gaps]).reshape(-1, 2).T
    )
    times = {"ttft": ttft, "tpot": tpot, "request_latency": latency}
    kept = np.all([times[name] <= limits.get(name, np.inf) for name in times], axis=0)
    pace = float(np.average(paces, weights=copies))

    def mean(name: str) -> float:
        return float(np.average([getattr(record, name) / record.elapsed for record, _ in records], weights=copies))

    return SimulatedLoad(
        ttft=_spread(ttft, weights),
        tpot=_spread(tpot[outputs > 1], weights[outputs > 1]),
        inter_token=_spread(gaps, seen),
        request_latency=_spread(latency, weights),
        running=mean("area_running"),
        queue=mean("area_queue"),
        requests_per_second=pace,
        tokens_per_second=pace * float(np.average(outputs, weights=weights)),
        kept_fraction=float(np.average(kept, weights=weights)),
        preemptions=sum(record.preemptions for record, _ in records),
        steps=sum(record.steps for record, _ in records),
        ttft_error=max(record.ttft_error for record, _ in records),
    )


def _spread(values: Array, weights: Array) -> Spread:
    """Return the weighted mean and percentiles of values."""
    if not len(values):
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    order = np.argsort(values)
    ordered, below = values[order], np.cumsum(weights[order])
    at = [float(ordered[min(np.searchsorted(below, share * below[-1] * (1 - 1e-12)), len(ordered) - 1)]) for share in (0.5, 0.9, 0.99)]
    return Spread(mean=float(np.average(values, weights=weights)), p50=at[0], p90=at[1], p99=at[2])
