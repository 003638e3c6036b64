"""Evaluation of plans at their loads: all of them as columns by formulas, those that are shown by simulation.

Formulas are some percent off in TTFT. A plan that breaks a limit in simulation is ranked at fewer clients if the load is searched, and is
left out if the load is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.disaggregated import predict_layout
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.simulated import predict_served
from perfmodel.parallel.serving_plan import COLUMNS, ServiceLayout, ServingColumns, ServingLayout
from perfmodel.planner.result import LIMITED, RankedPlan, ServingLimits, ServingObjective, ranked_plan
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
        columns=ServingColumns(**columns),
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
            load = served.load
            values["ttft"][block], values["tpot"][block], values["latency"][block] = load.ttft, load.tpot, load.request_latency
            values["per_chip"][block] = load.tokens_per_second * served.replicas / self.num_chips
            for name, column in self.limits.times_of(load).items():
                limited[name][block] = column
            if self.job.rate is not None:
                verdict[block[np.logical_or(load.is_saturated, load.ttft > _ENDLESS)]] = SATURATED
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


def first_of_each(kinds: Array | Whole, *keys: Array | Whole) -> Whole:
    """Return the index of the first of equal columns of `kinds`, in order; of equal columns the least by `keys`, the last key first."""
    order = np.lexsort((*keys, *kinds))  # equal columns are adjacent
    is_first = np.any(np.diff(kinds[:, order], axis=1, prepend=-1) != 0, axis=0)
    return np.sort(order[is_first])


def usual_tokens(table: LoadTable, row: int) -> int | None:
    """Return the feasible row that differs from a row only in the engine's own number of tokens of a step, if there is one."""
    columns = table.columns
    if not columns.max_tokens[row]:
        return None
    alike = (columns.max_tokens == 0) & (table.formats == table.formats[row]) & (table.verdict == FEASIBLE)
    for name in set(COLUMNS) - {"max_tokens"}:
        alike &= getattr(columns, name) == getattr(columns, name)[row]
    return int(np.argmax(alike)) if alike.any() else None


_CODES = {"ttft": TTFT, "tpot": TPOT, "request_latency": LATENCY}
#: Largest number of reductions of the clients before a plan is given up.
_MOST_STEPS = 6
#: Number of rows that break a limit by the formulas, and by which factor, that are simulated if no other row keeps it.
_MOST_NEAR, _NEAR = 8, 4 / 3
#: Number of rows of a search that are simulated, per row that is shown.
_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """Simulator of the rows of a search, with a cache.

    broken   row of the table -> its limited times, for rows that break a limit in simulation
    known    predicted plans: (format, plan, clients) -> the plan under that load
    """

    evaluator: Evaluator
    objective: ServingObjective
    price: float
    broken: dict[int, dict[str, float]] = field(default_factory=dict)
    known: dict[tuple[int, ServiceLayout, int], RankedPlan] = field(default_factory=dict)

    @property
    def simulates(self) -> bool:
        """Whether plans are simulated. A load that is searched without limits uses the formulas: each plan gets all clients that fit."""
        job = self.evaluator.job
        has_load = job.concurrency is not None or job.rate is not None
        return not job.is_static and (has_load or bool(self.evaluator.limits.given()))

    def plans(self, table: LoadTable, order: Sequence[int] | np.ndarray, top: int) -> tuple[RankedPlan, ...]:
        """Return up to `top` rows that keep the limits, best first; other rows of the table only if none of `order` does."""
        plans = self._first(table, order[: _TRIED * top], top)
        if not plans and self.evaluator.limits.given():
            distance = table.distance(self.evaluator.limits)
            near = np.flatnonzero((table.verdict > SATURATED) & (distance <= _NEAR) & (distance > 1.0))
            plans = self._first(table, near[np.argsort(distance[near], kind="stable")][:_MOST_NEAR], top)
        return tuple(sorted(plans, key=self.objective.cost))

    def _first(self, table: LoadTable, rows: Iterable[int], top: int) -> list[RankedPlan]:
        plans: list[RankedPlan] = []
        for row in rows:
            plan = self.kept(table, int(row))
            plans += [plan] if plan is not None else []
            if len(plans) == top:
                break
        return plans

    def kept(self, table: LoadTable, row: int) -> RankedPlan | None:
        """Return the plan of a row, with fewer clients if those of the table break a limit.

        Formulas err by more than what other tokens of a step gain under a given load, so the engine's own number is simulated as well and
        chosen if it is as good.
        """
        usual = None if self.evaluator.is_load_searched else usual_tokens(table, row)
        plans: list[RankedPlan] = []
        for one in (row,) if usual is None else (usual, row):
            plan, first = self.kept_layout(int(table.formats[one]), table.columns.layout(one), int(table.concurrency[one]))
            plans += [plan] if plan is not None else []
            if first is not None:
                self.broken[one] = self.evaluator.limits.seen(first.prediction)
        return min(plans, key=lambda plan: (self.objective.cost(plan), plan.prediction.request_latency.mean), default=None)

    def kept_layout(self, which: int, layout: ServiceLayout, clients: int) -> tuple[RankedPlan | None, RankedPlan | None]:
        """Return the plan at the largest tried clients within the limits, and the plan that breaks them at the given clients."""
        first: RankedPlan | None = None
        for step in range(_MOST_STEPS):
            ranked = self.ranked(which, layout, clients)
            seen, aims = self.evaluator.limits.seen(ranked.prediction), self.evaluator.limits.aims()
            worst = max((seen[name] / aim for name, aim in aims.items()), default=0.0)
            if worst <= 1.0:
                return ranked, first
            if not step:
                first = ranked
            together = layout.replicas * layout.attention_dp if isinstance(layout, ServingLayout) else 1
            per_rank = int(clients / together * min(0.98, max(1 / worst, 0.5)))
            if not self.evaluator.is_load_searched or per_rank < 1:
                break
            if isinstance(layout, ServingLayout) and layout.max_batch * together == clients:
                layout = replace(layout, max_batch=per_rank)
            clients = per_rank * together
        return None, first

    def ranked(self, which: int, layout: ServiceLayout, clients: int) -> RankedPlan:
        """Return a plan under a number of clients, in one of the formats."""
        if (key := (which, layout, clients)) not in self.known:
            job, estimator = self.evaluator.job_of(which, clients or None), self.evaluator.estimators[which]
            prediction = (predict_served if self.simulates else predict_layout)(estimator, job, layout)
            self.known[key] = ranked_plan(prediction, num_chips=self.evaluator.num_chips, price=self.price)
        return self.known[key]

    def as_simulated(self, table: LoadTable) -> LoadTable:
        """Return the table with the simulated times of the rows that break a limit in simulation."""
        if not self.broken:
            return table
        verdict, limited = table.verdict.copy(), {name: values.copy() for name, values in table.limited.items()}
        aims = self.evaluator.limits.aims()
        for row, seen in self.broken.items():
            for name, value in seen.items():
                limited[name][row] = value
            verdict[row] = next(_CODES[name] for name in aims if seen[name] > aims[name])
        return replace(table, verdict=verdict, limited=limited)

    def tried(self, table: LoadTable) -> LoadTable:
        """Return the simulated rows if rows keep the limits only by the formulas; else the whole table."""
        rows = np.array(sorted(self.broken), dtype=np.int64)
        return self.as_simulated(table).take(rows) if len(rows) and not (table.verdict[rows] == NO_MEMORY).any() else table
