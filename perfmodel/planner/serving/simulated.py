"""Results of a search as `serve` prints them: simulated, and only plans that then keep the limits.

The space is ranked by formulas (`evaluate.py`), which are some percent off in TTFT; the plans that are shown are simulated. One that
breaks a limit so stands at fewer clients where the load is searched, and is left out where the load is given.
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
#: Fewer clients are tried so many times before a plan is given up.
_MOST_STEPS = 6
#: Rows that break a limit by the formulas, by up to a third, which are simulated where no other row keeps it.
_MOST_NEAR, _NEAR = 8, 4 / 3
#: Rows that are simulated of one search, for each that is shown.
_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """Simulates rows of a search.

    broken   row of the table -> what it has of the limited times, of rows that were simulated and break a limit
    known    plans that were predicted: (format, plan, clients) -> the plan under that load
    """

    evaluator: Evaluator
    objective: ServingObjective
    price: float
    broken: dict[int, dict[str, float]] = field(default_factory=dict)
    known: dict[tuple[int, ServingPlan, int], RankedPlan] = field(default_factory=dict)

    @property
    def simulates(self) -> bool:
        """Whether plans are simulated. A load that is searched without limits uses the formulas: each plan has as many clients as fit."""
        job = self.evaluator.job
        has_load = job.concurrency is not None or job.rate is not None
        return not job.is_static and (has_load or bool(self.evaluator.limits.given()))

    def plans(self, table: LoadTable, order: Sequence[int] | np.ndarray, top: int) -> tuple[RankedPlan, ...]:
        """Up to `top` rows that keep the limits, best first; the rest of the table only where none of `order` does."""
        found = self._first(table, order[: _TRIED * top], top)
        if not found and self.evaluator.limits.given():
            distance = table.distance(self.evaluator.limits)
            near = np.flatnonzero((table.verdict > SATURATED) & (distance <= _NEAR) & (distance > 1.0))
            found = self._first(table, near[np.argsort(distance[near], kind="stable")][:_MOST_NEAR], top)
        return tuple(sorted(found, key=lambda plan: plan.badness(self.objective)))

    def _first(self, table: LoadTable, rows: Iterable[int], top: int) -> list[RankedPlan]:
        found: list[RankedPlan] = []
        for row in rows:
            plan = self.kept(table, int(row))
            found += [plan] if plan is not None else []
            if len(found) == top:
                break
        return found

    def kept(self, table: LoadTable, row: int) -> RankedPlan | None:
        """The row, with fewer clients where those of the table break a limit."""
        found, first = self.kept_plan(int(table.formats[row]), table.columns.plan(row), int(table.concurrency[row]))
        if first is not None:
            self.broken[row] = self.evaluator.limits.seen(first.prediction)
        return found

    def kept_plan(self, which: int, plan: ServingPlan, clients: int) -> tuple[RankedPlan | None, RankedPlan | None]:
        """A plan at the clients, or fewer, under which it keeps the limits; and what breaks them at the clients that were given."""
        first: RankedPlan | None = None
        for step in range(_MOST_STEPS):
            ranked = self.ranked(which, plan, clients)
            worst = self._worst(ranked)
            if worst <= 1.0:
                return ranked, first
            if not step:
                first = ranked
            together = plan.replicas * plan.attention_dp
            each = int(clients / together * min(0.98, max(1 / worst, 0.5)))
            if not self.evaluator.is_load_searched or each < 1:
                break
            is_bound = plan.max_batch * together == clients
            clients, plan = each * together, replace(plan, max_batch=each) if is_bound else plan
        return None, first

    def ranked(self, which: int, plan: ServingPlan, clients: int) -> RankedPlan:
        """A plan under so many clients, in one of the formats."""
        if (key := (which, plan, clients)) not in self.known:
            job, estimator = self.evaluator.job_of(which, clients or None), self.evaluator.estimators[which]
            prediction = (predict_served if self.simulates else predict_plan)(estimator, job, plan)
            self.known[key] = ranked_plan(prediction, num_chips=self.evaluator.num_chips, price=self.price)
        return self.known[key]

    def _worst(self, ranked: RankedPlan) -> float:
        """The largest of its times over what it may be."""
        seen = self.evaluator.limits.seen(ranked.prediction)
        return max((seen[name] / aim for name, aim in self.evaluator.limits.aims().items()), default=0.0)

    def as_simulated(self, table: LoadTable) -> LoadTable:
        """The table with what rows have that break a limit where they are simulated."""
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
        """The simulated rows of a table whose rows keep the limits only by the formulas; else all rows."""
        rows = np.array(sorted(self.broken), dtype=np.int64)
        return self.as_simulated(table).take(rows) if len(rows) and not (table.verdict[rows] == NO_MEMORY).any() else table
