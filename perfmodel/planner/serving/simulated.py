"""Results of a search as `serve` prints them: simulated, and only plans that then keep the limits.

The space is ranked by formulas (`evaluate.py`), which are some percent off in TTFT; the plans that are shown are simulated. A plan that
breaks a limit in simulation is ranked at fewer clients if the load is searched, and is left out if the load is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perfmodel.cost.serving.pools import predict_plan
from perfmodel.cost.serving.simulated import predict_served
from perfmodel.parallel.serving.plan import ServingPlan
from perfmodel.planner.serving.evaluate import LATENCY, NO_MEMORY, SATURATED, TPOT, TTFT, Evaluator, LoadTable
from perfmodel.planner.serving.result import RankedPlan, ServingObjective, ranked_plan

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
    known: dict[tuple[int, ServingPlan, int], RankedPlan] = field(default_factory=dict)

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
        return tuple(sorted(plans, key=lambda plan: plan.badness(self.objective)))

    def _first(self, table: LoadTable, rows: Iterable[int], top: int) -> list[RankedPlan]:
        plans: list[RankedPlan] = []
        for row in rows:
            plan = self.kept(table, int(row))
            plans += [plan] if plan is not None else []
            if len(plans) == top:
                break
        return plans

    def kept(self, table: LoadTable, row: int) -> RankedPlan | None:
        """Return the plan of a row, with fewer clients if those of the table break a limit."""
        kept, first = self.kept_plan(int(table.formats[row]), table.columns.plan(row), int(table.concurrency[row]))
        if first is not None:
            self.broken[row] = self.evaluator.limits.seen(first.prediction)
        return kept

    def kept_plan(self, which: int, plan: ServingPlan, clients: int) -> tuple[RankedPlan | None, RankedPlan | None]:
        """Return the plan at the largest tried clients within the limits, and the plan that breaks them at the given clients."""
        first: RankedPlan | None = None
        for step in range(_MOST_STEPS):
            ranked = self.ranked(which, plan, clients)
            worst = self._worst(ranked)
            if worst <= 1.0:
                return ranked, first
            if not step:
                first = ranked
            together = plan.replicas * plan.attention_dp
            per_rank = int(clients / together * min(0.98, max(1 / worst, 0.5)))
            if not self.evaluator.is_load_searched or per_rank < 1:
                break
            is_bound = plan.max_batch * together == clients
            clients, plan = per_rank * together, replace(plan, max_batch=per_rank) if is_bound else plan
        return None, first

    def ranked(self, which: int, plan: ServingPlan, clients: int) -> RankedPlan:
        """Return a plan under a number of clients, in one of the formats."""
        if (key := (which, plan, clients)) not in self.known:
            job, estimator = self.evaluator.job_of(which, clients or None), self.evaluator.estimators[which]
            prediction = (predict_served if self.simulates else predict_plan)(estimator, job, plan)
            self.known[key] = ranked_plan(prediction, num_chips=self.evaluator.num_chips, price=self.price)
        return self.known[key]

    def _worst(self, ranked: RankedPlan) -> float:
        """Return the largest ratio of a time to its limit."""
        seen = self.evaluator.limits.seen(ranked.prediction)
        return max((seen[name] / aim for name, aim in self.evaluator.limits.aims().items()), default=0.0)

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
