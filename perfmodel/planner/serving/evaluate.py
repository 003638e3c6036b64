"""Evaluation of plans at their loads as columns: memory, latency and throughput, and the limits that they break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.estimate import ServedPlans, ServingEstimator
from perfmodel.parallel.serving.columns import COLUMNS, ServingColumns
from perfmodel.planner.serving.result import LIMITED, ServingLimits, ServingObjective
from perfmodel.planner.serving.space import cross
from perfmodel.workload.serving import ServingJob

Array = NDArray[np.float64]
Whole = NDArray[np.int64]

#: A wait of a day means an unbounded queue: one of its servers is always busy. [s]
_ENDLESS = 86400.0

#: Number of rows that are timed at once: each has a column in tables of all operators, so this bounds their memory.
_BLOCK = 4096

#: Reasons for rejection in the order of their checks; codes of `LoadTable.verdict` are indices into it.
FEASIBLE, NO_MEMORY, SATURATED, TTFT, TPOT, LATENCY = range(6)
REASONS = (
    "",
    "does not fit into memory",
    "saturated: more requests than it holds at once, or than it answers",
    "breaks ttft",
    "breaks tpot",
    "breaks request_latency",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadTable:
    """Rows of plans at their loads; times are nan where a row was not timed (no memory, saturated).

    formats       index into the search's formats; concurrency: requests in flight of all replicas, 0 where the load is a rate
    sequences     number that fits in a replica
    per_chip      output tokens a second over all given chips
    ttft, tpot    means; `limited` has the times that the limits apply to
    """

    columns: ServingColumns
    formats: Whole
    concurrency: Whole
    sequences: Array
    ttft: Array
    tpot: Array
    latency: Array
    limited: dict[str, Array]
    per_chip: Array
    verdict: Whole

    def __len__(self) -> int:
        return len(self.formats)

    def take(self, which: NDArray[Any]) -> LoadTable:
        return LoadTable(
            columns=self.columns.take(which),
            limited={name: values[which] for name, values in self.limited.items()},
            **{name: getattr(self, name)[which] for name in _ROWS},
        )

    @property
    def per_user(self) -> Array:
        """Output tokens a second per user."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.tpot > 0, 1.0 / self.tpot, 0.0)

    def distance(self, limits: ServingLimits) -> Array:
        """Return the distance of a row from the limits: the largest ratio of a time to its limit."""
        worst = np.zeros(len(self))
        for name, limit in limits.aims().items():
            worst = np.maximum(worst, self.limited[name] / limit)
        return worst

    def badness(self, objective: ServingObjective) -> Array:
        """Return the objective to minimise. All chips are paid for, so the cost of a token follows from the tokens per second."""
        if objective is ServingObjective.LATENCY:
            return self.latency
        return -self.per_chip


_ROWS = ("formats", "concurrency", "sequences", "ttft", "tpot", "latency", "per_chip", "verdict")


def joined(tables: Sequence[LoadTable]) -> LoadTable:
    """Concatenate tables."""
    columns: dict[str, Any] = {name: np.concatenate([getattr(table.columns, name) for table in tables]) for name in COLUMNS}
    return LoadTable(
        columns=ServingColumns(engine=tables[0].columns.engine, **columns),
        limited={name: np.concatenate([table.limited[name] for table in tables]) for name in tables[0].limited},
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in _ROWS},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluator:
    """Evaluator of columns of plans of one job, with an estimator per format.

    num_chips    given chips, including idle ones
    """

    job: ServingJob
    estimators: tuple[ServingEstimator, ...]
    limits: ServingLimits
    num_chips: int

    @property
    def is_load_searched(self) -> bool:
        return self.job.concurrency is None and self.job.rate is None

    def job_of(self, which: int, concurrency: int | None = None) -> ServingJob:
        """Return the job in one of the formats, at the load of a row."""
        of = self.estimators[which]
        clients = concurrency if concurrency else self.job.concurrency
        return replace(self.job, quantization=of.quantization, kv_precision=of.cache, concurrency=clients)

    def grid(self, which: int, columns: ServingColumns, max_tokens: Sequence[int], batches: Sequence[int], most: int) -> LoadTable:
        """Evaluate each layout with each number of tokens, at each load or bound of its sequences.

        batches   of an attention rank: clients, if the load is searched; else bounds, 0: the engine's own
        most      the given bound; 0: if the load is searched, the load itself
        """
        rows = cross(columns, max_tokens, batches)
        if not self.is_load_searched:
            if self.job.concurrency is not None and 0 in batches:  # otherwise the bound was given
                places = rows.max_batch * rows.attention_dp * rows.replicas
                rows = rows.take((rows.max_batch == 0) | (places < self.job.concurrency))
            return self.evaluate(which, rows, np.full(len(rows), self.job.concurrency or 0, dtype=np.int64))
        clients = rows.max_batch * rows.attention_dp * rows.replicas
        return self.evaluate(which, replace(rows, max_batch=np.full(len(rows), most, dtype=np.int64)) if most else rows, clients)

    def capacity(self, which: int, rows: ServingColumns) -> tuple[Array, NDArray[np.bool_]]:
        """Return the sequences of mean length that fit in a replica of each row, and whether one of full length fits."""
        job = self.job_of(which)
        mean = job.input_len.mean + job.output_len.mean
        sequences = np.asarray(self.estimators[which].memory(rows, mean, job.speculation).sequences, dtype=float)
        return sequences, sequences * mean >= float(job.input_len.most + job.output_len.most)

    def evaluate(self, which: int, rows: ServingColumns, concurrency: Whole) -> LoadTable:
        """Evaluate rows in one format. Rows without memory, or without capacity for their load, are not timed."""
        of = self.estimators[which]
        job, count = self.job_of(which), len(rows)
        sequences, has_capacity = self.capacity(which, rows)
        verdict = np.where(has_capacity, FEASIBLE, NO_MEMORY)
        limit = np.where(rows.max_batch > 0, rows.max_batch, of.engine.scheduling.max_batch) * rows.attention_dp
        if self.is_load_searched:
            verdict[(verdict == 0) & (concurrency > np.minimum(sequences, limit) * rows.replicas)] = SATURATED
        timed = np.flatnonzero(verdict == 0)
        nothing = np.full(count, np.nan)
        values = {name: nothing.copy() for name in ("ttft", "tpot", "latency", "per_chip")}
        limited = {name: nothing.copy() for name in LIMITED}
        for start in range(0, len(timed), _BLOCK):
            block = timed[start : start + _BLOCK]
            served = of.serve(job, rows.take(block), concurrency=None if self.job.rate is not None else concurrency[block])
            for name, column in self._figures(served).items():
                values[name][block] = column
            for name, column in self.limits.times_of(served.load).items():
                limited[name][block] = column
            if self.job.rate is not None:
                verdict[block[np.logical_or(served.load.is_saturated, served.load.ttft > _ENDLESS)]] = SATURATED
        for code, name in ((TTFT, "ttft"), (TPOT, "tpot"), (LATENCY, "request_latency")):
            aim = self.limits.aims().get(name)
            if aim is not None:
                verdict[(verdict == 0) & ~(limited[name] <= aim)] = code
        return LoadTable(
            columns=rows,
            formats=np.full(count, which, dtype=np.int64),
            concurrency=concurrency,
            sequences=sequences,
            ttft=values["ttft"],
            tpot=values["tpot"],
            latency=values["latency"],
            limited=limited,
            per_chip=values["per_chip"],
            verdict=verdict,
        )

    def _figures(self, served: ServedPlans) -> dict[str, Array]:
        load = served.load
        return {
            "ttft": load.ttft,
            "tpot": load.tpot,
            "latency": load.request_latency,
            "per_chip": load.tokens_per_second * served.replicas / self.num_chips,
        }
