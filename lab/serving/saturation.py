"""Published runs with more clients than running requests, and the running requests of the simulated engine in the same benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfmodel.cost.serving.simulated import simulate_replicas
from perfmodel.foundation.grouping import grouped
from perfmodel.parallel.serving_plan import Pools, ServingLayout
from perfmodel.validation.rows import ServingRow
from perfmodel.validation.validate import CasePredictor

_LEAST_ALIKE, _ALIKE, _UNLIKE = 4, 1.15, 2.0
_WAIT = 0.1
"""Share of waiting clients, by Little's law, from which a run counts as saturated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    """A run with fewer running requests than clients.

    running     c (1 - TTFT / latency), Little's law of what was measured
    predicted   the same of the simulated benchmark; nan where it was not simulated
    held        sequences whose complete answers fit in the KV cache
    """

    row: ServingRow
    clients: float
    running: float
    held: float
    predicted: float = float("nan")

    @property
    def is_mostly_queue(self) -> bool:
        """Whether a request waits for longer than it runs."""
        return self.running < self.clients / 2

    @property
    def key(self) -> tuple[str, ...]:
        return (*(getattr(self.row.labels, name) for name in ("source", "engine", "model", "chip")), f"{self.clients:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Saturated runs. full: with a KV cache that is predicted to be full. others: the rest, including `limited` ones."""

    full: tuple[Saturated, ...]
    num_others: int
    num_limited: int


def saturation_of(rows: Sequence[ServingRow], predictor: CasePredictor) -> Saturation:
    runs = saturated_runs(rows)
    limited = admission_limited(runs)
    full = [run for run in runs if run.held < run.clients and run.row.id not in limited]
    return Saturation(
        full=tuple(replace(run, predicted=running_in_benchmark(run.row, predictor)) for run in full),
        num_others=len(runs) - len(full),
        num_limited=len(limited),
    )


def saturated_runs(rows: Sequence[ServingRow]) -> list[Saturated]:
    """Return loads of one pool, without speculative decoding and not suspect, in which a tenth of the clients or more waited."""
    saturated = []
    for row in rows:
        if row.planned is None or not row.is_predicted or row.kind != "serving" or row.case.suspect:
            continue
        if isinstance(row.planned.layout, Pools) or row.planned.job.speculation is not None:
            continue
        clients = float(row.planned.job.concurrency or 0)
        running = clients * (1.0 - row.case.measured("ttft") / row.case.measured("request_latency"))
        if running <= (1.0 - _WAIT) * clients:
            saturated.append(Saturated(row=row, clients=clients, running=running, held=row.max_sequences * row.planned.layout.replicas))
    return saturated


def admission_limited(runs: Sequence[Saturated]) -> set[str]:
    """Return runs that an admission limit bounds: a limit on running requests that the source does not state.

    In their group most clients wait, and the number of running requests is the same for KV caches of very different sizes.
    """
    groups = grouped([run for run in runs if run.is_mostly_queue], lambda run: run.key)
    return {
        run.row.id
        for group in groups.values()
        if len(group) >= _LEAST_ALIKE
        and max(member.running for member in group) <= _ALIKE * min(member.running for member in group)
        and max(member.held for member in group) >= _UNLIKE * min(member.held for member in group)
        for run in group
    }


def running_in_benchmark(row: ServingRow, predictor: CasePredictor) -> float:
    """Return c (1 - TTFT / latency) of a benchmark whose clients start together on an empty engine."""
    planned = row.planned
    assert planned is not None
    assert isinstance(planned.layout, ServingLayout)
    prediction, clients = predictor.served(planned), planned.job.concurrency or 1
    seen = simulate_replicas(predictor.serving_estimator(planned), prediction, planned.layout)
    return clients * (1.0 - seen.ttft.mean / seen.request_latency.mean)
