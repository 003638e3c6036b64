"""Search for serving plans: all plans at their loads, the best of each layout, the front, baselines, and reasons for the rest.

With a load (clients or a rate) every plan is evaluated at it. Without one the load is searched too. Each plan is tried with increasing
numbers of clients that it has capacity for, and is ranked at the largest number within the limits (throughput), or at one (latency).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.foundation.bisection import first_index
from perfmodel.foundation.errors import LONGEST_SENTENCE, InputError, bad_field
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import chips_text
from perfmodel.parallel.serving_plan import ServingColumns
from perfmodel.planner.reasons import against, why_worse
from perfmodel.planner.result import (
    Baseline,
    FrontPoint,
    PlanRanking,
    RankedPlan,
    SearchResult,
    ServingConditions,
    ServingLimits,
    ServingObjective,
    ServingSearch,
)
from perfmodel.planner.search import search
from perfmodel.planner.serving.disaggregation import find_pools, pools_front
from perfmodel.planner.serving.evaluate import FEASIBLE, NO_MEMORY, REASONS, SATURATED, Chosen, Evaluator, LoadTable, first_of_each, joined
from perfmodel.planner.serving.space import BASELINES, Format, Layouts, ServingSpace, baseline_layouts, layouts
from perfmodel.search.select import front_of
from perfmodel.workload.serving import ServingJob

#: Largest number of points of the front.
MOST_FRONT_POINTS = 64
#: Number of plans whose largest loads are found exactly, if fewer are shown.
_USUAL_TOP = 10
#: Number of plans of two pools that are shown.
MOST_POOLS = 3
#: Relative step in which latencies of otherwise equal plans are compared.
_ALIKE = 0.005
#: Largest ratio of a time to its three printed digits.
_ROUNDING = 1.005


class NothingFoundError(InputError):
    """No plan of a search can be chosen.

    summary   the search and the nearest plan, without a remedy
    fits      some plan fits into memory: the limits or the rate rule out all plans
    remedies  flags with which the same search finds a plan
    """

    longest: ClassVar[int] = 2 * LONGEST_SENTENCE  # it also reports the nearest plan of a whole search

    def __init__(self, summary: str, remedy: str = "", *, fits: bool = True, remedies: tuple[str, ...] = ()) -> None:
        super().__init__(f"{summary}: {remedy}" if remedy else summary)
        self.summary, self.fits, self.remedies = summary, fits, remedies


def serving_plans(
    job: ServingJob,
    cluster: Cluster,
    calibration: Calibration,
    engine: Engine,
    *,
    space: ServingSpace | None = None,
    limits: ServingLimits | None = None,
    objective: ServingObjective = ServingObjective.THROUGHPUT,
    price_per_hour: float | None = None,
    also: Collection[str] = ("baselines", "front", "remedies"),
) -> ServingPlans:
    """Return the plans for `job` on all chips of the cluster. Raises InputError where no layout is left.

    price_per_hour   of a chip; None: from the table of prices, if it has one     [USD/h]
    """
    space, limits = space or ServingSpace(), limits or ServingLimits()
    price = cluster.chip.price_per_hour if price_per_hour is None else price_per_hour
    if objective is ServingObjective.COST and price <= 0:
        raise InputError(f"objective=cost: no price of {cluster.chip.name} is known; give price_per_hour")
    admitted = layouts(job.model, cluster, engine, space)
    if not len(admitted.columns):
        most = sorted(admitted.left_out.items(), key=lambda item: -item[1])[:3]
        reasons = "; ".join(f"{count} of them: {reason}" for reason, count in most)
        where = f"{job.model.name} on {chips_text(cluster.num_chips)}"
        raise InputError(f"plan: no layout of {where} is left ({reasons}); give fewer knobs")
    formats: Sequence[Format] = space.formats or ((job.quantization, job.kv_precision),)
    estimators: list[ServingEstimator] = []
    refused: list[InputError] = []
    for quantization, cache in formats:
        try:
            estimators.append(
                ServingEstimator(
                    model=job.model, cluster=cluster, calibration=calibration, engine=engine, quantization=quantization, cache=cache
                )
            )
        except InputError as error:
            refused.append(error)
    if not estimators:
        raise refused[0]
    engine = estimators[0].engine  # with its defaults on the chip
    evaluator = Evaluator(job=job, estimators=tuple(estimators), limits=limits, num_chips=cluster.num_chips)
    alone = admitted if "pcp" not in space.fixed else layouts(job.model, cluster, engine, space.without("pcp"))
    unable = {f"{cluster.chip.name} has no units for the format": len(refused)} if refused else {}
    return ServingPlans(
        evaluator=evaluator,
        cluster=cluster,
        space=space,
        engine=engine,
        objective=objective,
        price=price,
        admitted=replace(admitted, left_out={**admitted.left_out, **unable}),
        decode=alone.columns,
        chosen=Chosen(evaluator=evaluator, objective=objective, price=price),
        also=also,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingPlans:
    """Plans of a service on all chips of a cluster, as a `PlanSpace`, with an estimator per format that the chip has units for.

    decode   layouts of decode workers
    also     baselines; front; disaggregated: plans with prefill and decode workers too, in the first format, which become the plans if no
             other meets the limits; remedies: if nothing meets them, the error reports whether disaggregated plans would
    """

    evaluator: Evaluator
    cluster: Cluster
    space: ServingSpace
    engine: Engine
    objective: ServingObjective
    price: float
    admitted: Layouts
    decode: ServingColumns
    chosen: Chosen
    also: Collection[str]

    def evaluate(self, top: int) -> LoadTable:
        return self.table(self.admitted.columns, self.space.tokens_of_a_step(self.engine), top)

    def ranked(self, rows: LoadTable, top: int) -> ServingSearch:
        """Return the best plans. Raises NothingFoundError where none fits, or none meets the limits."""
        order, evaluator = self.order(rows), self.evaluator
        plans, with_pools = self.shown(rows, order, top), "disaggregated" in self.also
        apart: tuple[RankedPlan, ...] = ()
        if not plans:
            is_tried = bool(evaluator.limits.given()) and (with_pools or "remedies" in self.also) and not evaluator.job.is_static
            apart = self.pools(top) if is_tried else ()
            if not (with_pools and apart):
                raise self.nothing_meets(self.chosen.tried(rows) if len(order) else rows, apart if is_tried else None)
            plans = apart
        elif with_pools:
            apart = self.pools(top, plans[0])
            if apart and self.objective.cost(apart[0]) < self.objective.cost(plans[0]):
                plans = (replace(plans[0], reason=f"{against(plans[0], apart[0], self.objective)} than disaggregated"), *plans[1:])
        verdict = self.chosen.as_simulated(rows).verdict
        return SearchResult(
            objective=self.objective,
            conditions=ServingConditions(
                limits=evaluator.limits,
                num_chips=evaluator.num_chips,
                is_load_searched=evaluator.is_load_searched,
                price_per_hour=self.price,
            ),
            num_evaluated=len(rows),
            num_feasible=int((verdict == FEASIBLE).sum()),
            rejected={REASONS[code]: int((verdict == code).sum()) for code in range(1, len(REASONS))},
            left_out=self.admitted.left_out,
            plans=plans,
            ranking=PlanRanking(places=tuple(range(1, len(plans) + 1))),
            disaggregated=apart,
        )

    # --- rows -----------------------------------------------------------------------------------------------------------------------

    def table(self, columns: ServingColumns, tokens: Sequence[int], top: int) -> LoadTable:
        """Evaluate all layouts in all formats, with every number of tokens and load; a searched load is refined to its largest value."""
        tables = [self.evaluator.grid(which, columns, tokens, self.batches, self.bound) for which in range(len(self.evaluator.estimators))]
        if self.evaluator.is_load_searched and self.objective is not ServingObjective.LATENCY:
            tables += self._to_the_edge(tables, top)
        return joined(tables)

    @property
    def batches(self) -> tuple[int, ...]:
        """Clients of an attention rank if the load is searched, else bounds of its sequences; 0: the engine's own."""
        most = self.bound or self.engine.scheduling.max_batch
        if self.evaluator.is_load_searched:
            return self.space.batches_up_to(most)
        if self.bound:
            return (self.bound,)
        # under a rate, a bound below the running sequences saturates a plan, and one above changes only the wait
        return (0,) if self.evaluator.job.rate is not None else (0, *self.space.batches_up_to(most))

    @property
    def bound(self) -> int:
        return self.space.fixed.get("max_batch", 0)

    def _to_the_edge(self, tables: Sequence[LoadTable], top: int) -> list[LoadTable]:
        """Bisect between the largest load within the limits and the first beyond them, only for plans that may be shown."""
        batches = np.array(self.batches, dtype=np.int64)
        best = [np.where(table.verdict == FEASIBLE, table.per_chip, -np.inf).reshape(-1, len(batches)) for table in tables]
        table = joined(tables)
        order, shown = self.order(table), max(top, _USUAL_TOP)  # so that the number of printed plans changes nothing else
        enough = float(table.per_chip[order[shown - 1]]) if len(order) >= shown else -np.inf  # of the last plan that is shown, at first
        bisected: list[LoadTable] = []
        for which, (table, values) in enumerate(zip(tables, best, strict=True)):
            feasible = np.isfinite(values)
            last = np.where(feasible.any(axis=1), len(batches) - 1 - np.argmax(feasible[:, ::-1], axis=1), -1)
            groups = np.flatnonzero((last >= 0) & (last < len(batches) - 1))
            low, high = batches[last[groups]], batches[np.minimum(last[groups] + 1, len(batches) - 1)]
            most = values[groups, last[groups]] * high / low
            keep = most >= enough
            groups, low, high = groups[keep], low[keep], high[keep]
            while len(groups := groups[high - low > 1]):
                apart = high - low > 1
                low, high = low[apart], high[apart]
                middle = (low + high) // 2
                rows = table.columns.take(groups * len(batches))
                chosen = rows if self.bound else replace(rows, max_batch=middle)
                clients = middle * rows.attention_dp * rows.replicas
                tried = self.evaluator.evaluate(which, chosen, clients)
                bisected.append(tried)
                holds = tried.verdict == FEASIBLE
                low, high = np.where(holds, middle, low), np.where(holds, high, middle)
        return bisected

    # --- order ----------------------------------------------------------------------------------------------------------------------

    def order(self, table: LoadTable) -> np.ndarray:
        """Return the best feasible row of each layout and format, best first. Ties are ordered by times, then by the smaller plan."""
        rows = np.flatnonzero(table.verdict == FEASIBLE)
        rows, columns = rows[self._order(table.take(rows), table.badness(self.objective)[rows])], table.columns
        kinds = (table.formats, columns.tp, columns.pp, columns.attention_dp, columns.ep, columns.dcp, columns.pcp, columns.replicas)
        return np.asarray(rows[first_of_each(np.stack(kinds)[:, rows])])

    def _order(self, table: LoadTable, badness: np.ndarray) -> np.ndarray:
        columns = table.columns
        keys = (
            columns.max_batch,
            columns.max_tokens,
            columns.dcp,
            columns.pcp,
            columns.ep,
            columns.attention_dp,
            columns.pp,
            columns.tp,
            table.formats,
        )
        with np.errstate(divide="ignore"):
            about = np.floor(np.log(table.latency) / _ALIKE)  # defaults of the engine come first where other settings hardly matter
        return np.lexsort((*keys, table.latency, columns.max_batch > 0, columns.max_tokens > 0, columns.dcp > 1, about, badness))

    # --- what is shown ----------------------------------------------------------------------------------------------------------------

    def shown(self, table: LoadTable, order: np.ndarray, top: int) -> tuple[RankedPlan, ...]:
        """Return the first plans of the order, those that keep the limits in simulation if plans are simulated."""
        if self.chosen.simulates:
            plans = list(self.chosen.plans(table, order, top))
        else:
            plans = [self.ranked_plan(table, int(row)) for row in order[:top]]
        best = plans[0] if plans else None
        return tuple(
            plan if plan is best or best is None else replace(plan, reason=why_worse(plan, best, self.objective)) for plan in plans
        )

    def ranked_plan(self, table: LoadTable, row: int) -> RankedPlan:
        """Return one row as a ranked plan with its prediction."""
        meets = bool(table.verdict[row] == FEASIBLE)
        ranked = self.chosen.ranked(int(table.formats[row]), table.columns.layout(row), int(table.concurrency[row]))
        return replace(ranked, meets=meets)

    def front(self, rows: LoadTable) -> tuple[FrontPoint, ...]:
        """Return the front of plans with one pool, and of plans with two pools if requested."""
        alone = self.front_alone(rows)
        if "disaggregated" not in self.also or self.evaluator.job.is_static:
            return alone
        points = (*alone, *pools_front(self.evaluator, self.admitted.columns, self.decode))
        per_user, per_chip = (np.array([getattr(p, f"tokens_per_second_per_{name}") for p in points]) for name in ("user", "chip"))
        return tuple(points[index] for index in front_of(-per_user, -per_chip))

    def front_alone(self, table: LoadTable) -> tuple[FrontPoint, ...]:
        """Return the Pareto front of tokens/s per user and tokens/s per chip, over plans and loads, also if a load is given."""
        if not self.evaluator.is_load_searched:
            job = replace(self.evaluator.job, concurrency=None, rate=None, is_static=False)
            other = replace(self, evaluator=replace(self.evaluator, job=job), objective=ServingObjective.LATENCY)
            return other.front_alone(other.table(self.admitted.columns, self.space.tokens_of_a_step(self.engine)[:1], 1))
        rows = np.flatnonzero((table.verdict != NO_MEMORY) & (table.verdict != SATURATED))
        chosen = table.take(rows)
        order = rows[self._order(replace(chosen, latency=1.0 / np.maximum(chosen.per_chip, 1e-12)), -chosen.per_user)]
        highest = np.maximum.accumulate(np.concatenate(([-np.inf], table.per_chip[order])))[:-1]
        on_front = order[table.per_chip[order] > highest]
        if len(on_front) > MOST_FRONT_POINTS:
            on_front = on_front[np.unique(np.linspace(0, len(on_front) - 1, MOST_FRONT_POINTS).round().astype(int))]
        formats = [(of.quantization.name, str(of.cache)) for of in self.evaluator.estimators]
        return tuple(
            FrontPoint(
                layout=table.columns.layout(row),
                quantization=formats[table.formats[row]][0],
                kv_precision=formats[table.formats[row]][1],
                concurrency=int(table.concurrency[row]),
                tokens_per_second_per_user=float(table.per_user[row]),
                tokens_per_second_per_chip=float(table.per_chip[row]),
                ttft=float(table.ttft[row]),
                tpot=float(table.tpot[row]),
                meets=bool(table.verdict[row] == FEASIBLE),
            )
            for row in map(int, on_front)
        )

    def baselines(self, result: ServingSearch) -> tuple[Baseline[RankedPlan], ...]:
        """Return the baselines in the first format, with the engine's own limits."""
        evaluator = replace(self.evaluator, estimators=self.evaluator.estimators[:1])
        alone = replace(self, evaluator=evaluator, space=replace(self.space, fixed={}))
        baselines = []

        def fits(layout: ServingColumns) -> bool:
            return bool(evaluator.capacity(0, layout)[1][0])

        for name, columns, reason in baseline_layouts(evaluator.job.model, self.cluster, self.engine, fits):
            plans: tuple[RankedPlan, ...] = ()
            if columns is not None:
                usual = replace(alone, chosen=replace(self.chosen, evaluator=evaluator, broken={}))
                table = usual.table(columns, (0,), 1)
                order = usual.order(table)
                kept = usual.shown(table, order, 1)
                now = usual.chosen.as_simulated(table)
                row = int(order[0]) if len(order) else usual.nearest(table)
                plan = kept[0] if kept else usual.ranked_plan(now, row)
                worse = REASONS[int(now.verdict[row])] if not plan.meets else ""
                plans = (replace(plan, reason=worse or why_worse(plan, result.plans[0], self.objective)),)
                reason = reason or worse
            baselines.append(Baseline(name=name, meaning=BASELINES[name], plans=plans, reason=reason))
        return tuple(baselines)

    def pools(self, top: int, best: RankedPlan | None = None) -> tuple[RankedPlan, ...]:
        """Return the best plans of two pools, each compared with the best plan of one pool; without one, with the best of them."""
        pools = find_pools(self.chosen, self.admitted.columns, self.decode, top=min(top, MOST_POOLS))
        return pools if best is None else tuple(replace(ranked, reason=against(ranked, best, self.objective)) for ranked in pools)

    # --- nothing -----------------------------------------------------------------------------------------------------------------------

    def nearest(self, table: LoadTable) -> int:
        """Return the row nearest to the limits; if none was timed, the one with the most sequences that fit."""
        distance = np.where(np.isfinite(table.tpot), table.distance(self.evaluator.limits), np.inf)
        distance = np.where(table.verdict == SATURATED, np.inf, distance)
        if not np.isfinite(distance).any():
            return int(np.argmax(table.sequences))
        return int(self._order(table, distance)[0])

    def nothing_meets(self, table: LoadTable, apart: Sequence[RankedPlan] | None) -> NothingFoundError:
        """Return the error with the nearest plan, and with what would meet the limits. apart: disaggregated plans; None: not tried"""
        if not (table.verdict != NO_MEMORY).any():
            return NothingFoundError(self._nothing_fits(table), fits=False)
        where = f"{chips_text(self.cluster.num_chips)} of {self.cluster.name}"
        limits, is_timed = self.evaluator.limits, table.verdict > SATURATED
        rate = self.evaluator.job.rate
        if rate is not None and not np.isfinite(table.distance(limits)[is_timed]).any():
            # the plan that answers most requests
            timed = np.where(table.verdict == NO_MEMORY, -np.inf, np.nan_to_num(table.per_chip, nan=-np.inf))
            best_row = int(np.argmax(timed))
            most = float(table.per_chip[best_row]) * self.evaluator.num_chips / self.evaluator.job.output_len.mean
            label = table.columns.layout(best_row).label()
            best_of = f"{label} answers at most {most:.3g} a second" if most < 0.999 * rate else f"prompts queue without end under {label}"
            return NothingFoundError(f"rate={rate:g}: no plan on {where} answers this rate; {best_of}", "use more chips")
        row = self.nearest(table)
        times = {name: float(table.limited[name][row]) for name in limits.given()}
        if self.chosen.simulates and is_timed[row]:
            times = self.evaluator.limits.seen(self.ranked_plan(table, row).prediction)
        has = " and ".join(f"{name} {format_time(times[name])}" for name in limits.given())
        clients = int(table.concurrency[row])
        load = f" with {clients:,} {'requests' if clients > 1 else 'request'} in flight" if clients else ""
        is_near = all(times[name] <= limit for name, limit in limits.given().items())
        enough = {name: _ROUNDING * times[name] / (1.0 - limits.headroom) for name, aim in limits.aims().items() if times[name] > aim}
        raised = " and ".join(f"{name} to {format_time(time)}" for name, time in enough.items())
        remedy = f"{'set limit_headroom to 0' if is_near else f'raise {raised}'}, or use more or faster chips, fewer bits"
        remedy += "" if self.evaluator.is_load_searched else ", a smaller load"
        remedies = (["--limit-headroom 0"] if is_near and limits.headroom else []) + (["--disaggregated"] if apart else [])
        spare = f" with {100 * limits.headroom:g} % of each to spare" if is_near else ""
        summary = f"limits={limits}: no plan of {self.evaluator.job.model.name} on {where} meets them{spare}"
        if apart:
            best = apart[0]
            have = " and ".join(f"{name} {format_time(limits.seen(best.prediction)[name])}" for name in limits.given())
            remedy = f"add --disaggregated ({best.plan.label()} has {have}), or {remedy}"
        elif apart is not None:
            remedy = f"{remedy}; disaggregated serving does not meet them either"
        nearest = f"the nearest, {table.columns.layout(row).label()}{load}, has {has}"
        return NothingFoundError(f"{summary}; {nearest}", remedy, remedies=tuple(remedies))

    def _nothing_fits(self, table: LoadTable) -> str:
        """Describe the memory of the row with the largest free memory."""
        job = self.evaluator.job
        mean = job.input_len.mean + job.output_len.mean
        of = [estimator.memory(table.columns, mean, job.speculation) for estimator in self.evaluator.estimators]
        headroom = np.stack([np.broadcast_to(memory.cache_capacity, len(table)) for memory in of])[table.formats, np.arange(len(table))]
        row = int(np.argmax(headroom))
        held = of[int(table.formats[row])]
        sizes = {name: float(np.broadcast_to(size, len(table))[row]) for name, size in held.classes().items() if name != "reserve"}
        largest = max(sizes, key=lambda name: sizes[name])
        usable = format_bytes(float(np.broadcast_to(held.usable, len(table))[row]))
        taken = f"{largest} take {format_bytes(sizes[largest])} of {usable} usable on each chip under {table.columns.layout(row).label()}"
        if headroom[row] > 0:
            taken += f", and the {format_bytes(float(headroom[row]))} left hold no request of full length"
        return f"chips={self.cluster.num_chips}: no plan of {job.model.name} fits ({taken})"


def find_fewest_chips(job: ServingJob, cluster: Cluster, plans_on: Callable[[Cluster], ServingPlans], *, most_chips: int = 0) -> int:
    """Return the fewest chips of the cluster that hold the job's load: parts of a node, then whole nodes.

    Parts are powers of two. More chips never hold less (added replicas take requests from the others), so the numbers are bisected.
    Raises InputError if the job has no load, or if not even `most_chips` (0: all that are possible on the cluster) hold it.

    plans_on   returns the plans on a number of chips
    """
    if job.concurrency is None and job.rate is None:
        raise bad_field("concurrency", None, "the number of chips follows from the load", "give a concurrency or a rate")
    most, node = most_chips or cluster.max_chips, cluster.chips_per_node
    parts = [2**power for power in range(node.bit_length()) if 2**power < node]
    counts = [count for count in (*parts, *range(node, most + 1, node)) if count <= most] or [1]
    errors: list[InputError] = []

    def holds(index: int) -> bool:
        try:
            search(replace(plans_on(cluster.with_chips(counts[index])), also=()), top=1)
        except InputError as error:
            errors.append(error)
            return False
        return True

    index = first_index(len(counts), holds)
    if index is None:
        raise errors[-1]
    return counts[index]
