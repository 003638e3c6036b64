"""Finds the best plans of serving: all of the space at their loads, the best of each layout, the front, baselines, and why not the rest.

With a load (clients or a rate) every plan is evaluated at it. Without one the load is searched too: each plan is tried with ever more
clients, which it has places for, and stands with the largest number under which it holds the limits (throughput), or with one (latency).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.foundation.errors import LONGEST_SENTENCE, InputError
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.chip_cluster import chips_text
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.serving.columns import ServingColumns
from perfmodel.planner.serving.baselines import baseline_layouts
from perfmodel.planner.serving.disaggregation import against, find_pools, pools_front
from perfmodel.planner.serving.evaluate import FEASIBLE, NO_MEMORY, REASONS, SATURATED, Evaluator, LoadTable, joined
from perfmodel.planner.serving.reasons import why_worse
from perfmodel.planner.serving.result import (
    FrontPoint,
    RankedPlan,
    ServingBaseline,
    ServingLimits,
    ServingObjective,
    ServingSearchResult,
)
from perfmodel.planner.serving.simulated import Chosen
from perfmodel.planner.serving.space import Format, Layouts, ServingSpace, layouts
from perfmodel.workload.serving import ServingJob

#: Points of the front that are kept: every one, up to so many.
MOST_FRONT_POINTS = 64
#: Plans whose largest loads are found exactly, where fewer are shown.
_USUAL_TOP = 10
#: Plans of two pools that are shown.
MOST_POOLS = 3
#: Latencies of plans that are as good otherwise are told apart in steps of this share.
_ALIKE = 0.005


class NothingFoundError(InputError):
    """No plan of a search can be chosen.

    said      what was searched and what comes nearest, without a remedy
    fits      some plan fits into memory: it is limits or the rate that none keeps
    remedies  flags under which a plan was found in the same search
    """

    longest: ClassVar[int] = 2 * LONGEST_SENTENCE  # it also reports the nearest plan of a whole search

    def __init__(self, said: str, remedy: str = "", *, fits: bool = True, remedies: tuple[str, ...] = ()) -> None:
        super().__init__(f"{said}: {remedy}" if remedy else said)
        self.said, self.fits, self.remedies = said, fits, remedies


def find_serving_plans(
    job: ServingJob,
    cluster: Cluster,
    calibration: Calibration,
    engine: Engine,
    *,
    space: ServingSpace | None = None,
    limits: ServingLimits | None = None,
    objective: ServingObjective = ServingObjective.THROUGHPUT,
    top: int = 10,
    price_per_hour: float | None = None,
    with_pools: bool = False,
    names_pools: bool = True,
    with_baselines: bool = True,
) -> ServingSearchResult:
    """The best plans for `job` on all chips of the cluster. Raises InputError where none fits, or none meets the limits.

    price_per_hour   of a chip; None: that of the table of prices, where it has one     [USD/h]
    with_pools       also plans of workers for prompts and others for answers, in the first format; they are the plans where no other meets
                     the limits
    names_pools      where nothing else meets the limits, say whether those would
    """
    started = time.process_time()
    space, limits = space or ServingSpace(), limits or ServingLimits()
    price = cluster.chip.price_per_hour if price_per_hour is None else price_per_hour
    if objective is ServingObjective.COST and price <= 0:
        raise InputError(f"objective=cost: no price of {cluster.chip.name} is known; give price_per_hour")
    found = layouts(job.model, cluster, engine, space)
    if not len(found.columns):
        raise InputError(_no_layout(job, cluster, found))
    estimators, left_out = _estimators(job, cluster, calibration, engine, space)
    evaluator = Evaluator(job=job, estimators=estimators, limits=limits, num_chips=cluster.num_chips)
    alone = found if "pcp" not in space.fixed else layouts(job.model, cluster, engine, space.without("pcp"))
    chosen = Chosen(evaluator=evaluator, objective=objective, price=price)
    searched = _Search(
        evaluator=evaluator, space=space, engine=engine, objective=objective, top=top, price=price, answering=alone.columns, chosen=chosen
    )
    table = searched.table(found.columns)
    order = searched.ranked(table)
    plans = searched.shown(table, order)
    meet = searched.chosen.as_simulated(table)
    apart: tuple[RankedPlan, ...] = ()
    if not plans:
        tried = bool(limits.given()) and (with_pools or names_pools) and not job.is_static
        apart = searched.pools(found.columns) if tried else ()
        if not (with_pools and apart):
            raise searched.nothing_meets(searched.chosen.tried(table) if len(order) else table, cluster, apart if tried else None)
        plans = apart
    if with_pools and not apart:
        apart = searched.pools(found.columns, plans[0])
        if apart and apart[0].badness(objective) < plans[0].badness(objective):
            plans = (replace(plans[0], reason=f"{against(plans[0], apart[0], objective)} than disaggregated"), *plans[1:])
    rejected = Counter({REASONS[code]: int((meet.verdict == code).sum()) for code in range(1, len(REASONS))})
    return ServingSearchResult(
        objective=objective,
        limits=limits,
        num_chips=cluster.num_chips,
        num_evaluated=len(table),
        num_feasible=int((meet.verdict == FEASIBLE).sum()),
        rejected={reason: count for reason, count in rejected.items() if count},
        left_out={**found.left_out, **left_out},
        is_load_searched=evaluator.is_load_searched,
        plans=plans,
        pareto=searched.whole_front(table, found.columns, with_pools=with_pools),
        baselines=searched.baselines(cluster, plans[0]) if with_baselines else (),
        price_per_hour=price,
        disaggregated=apart,
        search_time=time.process_time() - started,
    )


def _estimators(
    job: ServingJob, cluster: Cluster, calibration: Calibration, engine: Engine, space: ServingSpace
) -> tuple[tuple[ServingEstimator, ...], dict[str, int]]:
    """One for each format. A format that the chip has no units for is left out, where there are others."""
    formats: Sequence[Format] = space.formats or ((job.quantization, job.kv_precision),)
    found: list[ServingEstimator] = []
    refused: list[InputError] = []
    for quantization, cache in formats:
        try:
            found.append(
                ServingEstimator(
                    model=job.model,
                    cluster=cluster,
                    calibration=calibration,
                    engine=engine,
                    quantization=quantization,
                    cache=cache,
                )
            )
        except InputError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return tuple(found), {f"{cluster.chip.name} has no units for the format": len(refused)} if refused else {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """answering: how workers may lie that only answer"""

    evaluator: Evaluator
    space: ServingSpace
    engine: Engine
    objective: ServingObjective
    top: int
    price: float
    answering: ServingColumns
    chosen: Chosen

    # --- rows -----------------------------------------------------------------------------------------------------------------------

    def table(self, columns: ServingColumns, max_tokens: Sequence[int] | None = None) -> LoadTable:
        """All layouts in all formats, with every number of tokens and load; where the load is searched, its largest ones found exactly."""
        tokens = self.space.tokens_of_a_step(self.engine) if max_tokens is None else max_tokens
        tables = [self.evaluator.grid(which, columns, tokens, self.batches, self.bound) for which in range(len(self.evaluator.estimators))]
        if self.evaluator.is_load_searched and self.objective is not ServingObjective.LATENCY:
            tables += self._to_the_edge(tables)
        return joined(tables)

    @property
    def batches(self) -> tuple[int, ...]:
        tried = self.space.batches_tried(self.engine)
        if not self.evaluator.is_load_searched:
            if "max_batch" in self.space.fixed:
                return tried
            if self.evaluator.job.rate is not None and "max_batch" not in self.space.maximum:
                return (0,)  # fewer places than those that run saturate a plan, and more change nothing but the wait for one
            return (0, *tried)
        if "max_batch" in self.space.fixed:
            most = self.space.fixed["max_batch"]
            return tuple(sorted({each for each in self.space.batches if each < most} | {most}))
        return tried

    @property
    def bound(self) -> int:
        return self.space.fixed.get("max_batch", 0)

    def _to_the_edge(self, tables: Sequence[LoadTable]) -> list[LoadTable]:
        """Between the last load that a plan holds and the first that it does not, by halves; only of plans that may come to be shown."""
        batches = np.array(self.batches, dtype=np.int64)
        best = [np.where(table.verdict == FEASIBLE, table.per_chip, -np.inf).reshape(-1, len(batches)) for table in tables]
        enough = self._enough(tables)
        found: list[LoadTable] = []
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
                found.append(tried)
                holds = tried.verdict == FEASIBLE
                low, high = np.where(holds, middle, low), np.where(holds, high, middle)
        return found

    def _enough(self, tables: Sequence[LoadTable]) -> float:
        """Tokens a chip that a plan must be able to reach to be among those shown, as far as the first loads say."""
        table = joined(tables)
        order = self.ranked(table)
        shown = max(self.top, _USUAL_TOP)  # so that how many are printed changes nothing else
        return float(table.per_chip[order[shown - 1]]) if len(order) >= shown else -np.inf

    # --- order ----------------------------------------------------------------------------------------------------------------------

    def ranked(self, table: LoadTable) -> np.ndarray:
        """The best row of each layout and format that meets everything, best first. Ties: by times, then by the smaller plan."""
        rows = np.flatnonzero(table.verdict == FEASIBLE)
        return self._first_of_each(table, rows[self._order(table.take(rows), table.badness(self.objective)[rows])])

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
            about = np.floor(np.log(table.latency) / _ALIKE)  # what engines do by themselves where others hardly change anything
        return np.lexsort((*keys, table.latency, columns.max_batch > 0, columns.max_tokens > 0, columns.dcp > 1, about, badness))

    @staticmethod
    def _first_of_each(table: LoadTable, rows: np.ndarray) -> np.ndarray:
        columns = table.columns
        kinds = np.stack(
            [table.formats, columns.tp, columns.pp, columns.attention_dp, columns.ep, columns.dcp, columns.pcp, columns.replicas]
        )[:, rows]
        order = np.lexsort(kinds)  # alike ones side by side, each in the order of rows
        is_first = np.any(np.diff(kinds[:, order], axis=1, prepend=-1) != 0, axis=0)
        return np.asarray(rows[np.sort(order[is_first])])

    # --- what is shown ----------------------------------------------------------------------------------------------------------------

    def shown(self, table: LoadTable, order: np.ndarray) -> tuple[RankedPlan, ...]:
        """The first of the order, as far as they keep the limits where they are simulated."""
        if self.chosen.simulates:
            plans = list(self.chosen.plans(table, order, self.top))
        else:
            plans = [self.ranked_plan(table, int(row)) for row in order[: self.top]]
        best = plans[0] if plans else None
        return tuple(
            plan if plan is best or best is None else replace(plan, reason=why_worse(plan, best, self.objective)) for plan in plans
        )

    def ranked_plan(self, table: LoadTable, row: int) -> RankedPlan:
        """One row with all that people read."""
        meets = bool(table.verdict[row] == FEASIBLE)
        found = self.chosen.ranked(int(table.formats[row]), table.columns.plan(row), int(table.concurrency[row]))
        return replace(found, meets=meets)

    def whole_front(self, table: LoadTable, columns: ServingColumns, *, with_pools: bool) -> tuple[FrontPoint, ...]:
        """That of plans whose workers do both, and of plans of two pools where they were asked for."""
        alone, evaluator = self.front(table, columns), self.evaluator
        if not with_pools or evaluator.job.is_static:
            return alone
        job, chips = evaluator.job_of(0), evaluator.num_chips
        apart = pools_front(evaluator.estimators[0], job, columns, num_chips=chips, answering=self.answering, limits=evaluator.limits)
        found: list[FrontPoint] = []
        for point in sorted((*alone, *apart), key=lambda each: (-each.tokens_per_second_per_user, -each.tokens_per_second_per_chip)):
            if not found or point.tokens_per_second_per_chip > found[-1].tokens_per_second_per_chip:
                found.append(point)
        return tuple(found)

    def front(self, table: LoadTable, columns: ServingColumns) -> tuple[FrontPoint, ...]:
        """Pareto front of tokens/s a user and tokens/s a chip, over plans and loads, also with a given load."""
        if not self.evaluator.is_load_searched:
            job = replace(self.evaluator.job, concurrency=None, rate=None, is_static=False)
            other = replace(self, evaluator=replace(self.evaluator, job=job), objective=ServingObjective.LATENCY)
            return other.front(other.table(columns, self.space.tokens_of_a_step(self.engine)[:1]), columns)
        rows = np.flatnonzero((table.verdict != NO_MEMORY) & (table.verdict != SATURATED))
        chosen = table.take(rows)
        order = rows[self._order(replace(chosen, latency=1.0 / np.maximum(chosen.per_chip, 1e-12)), -chosen.per_user)]
        highest = np.maximum.accumulate(np.concatenate(([-np.inf], table.per_chip[order])))[:-1]
        on_front = order[table.per_chip[order] > highest]
        if len(on_front) > MOST_FRONT_POINTS:
            on_front = on_front[np.unique(np.linspace(0, len(on_front) - 1, MOST_FRONT_POINTS).round().astype(int))]
        return tuple(self._front_point(table, int(row)) for row in on_front)

    def _front_point(self, table: LoadTable, row: int) -> FrontPoint:
        of = self.evaluator.estimators[int(table.formats[row])]
        return FrontPoint(
            plan=table.columns.plan(row),
            quantization=of.quantization.name,
            kv_precision=str(of.cache),
            concurrency=int(table.concurrency[row]),
            tokens_per_second_per_user=float(table.per_user[row]),
            tokens_per_second_per_chip=float(table.per_chip[row]),
            ttft=float(table.ttft[row]),
            tpot=float(table.tpot[row]),
            meets=bool(table.verdict[row] == FEASIBLE),
        )

    def baselines(self, cluster: Cluster, best: RankedPlan) -> tuple[ServingBaseline, ...]:
        """In the first format, with the engine's own limits."""
        evaluator = replace(self.evaluator, estimators=self.evaluator.estimators[:1])
        alone = replace(self, evaluator=evaluator, space=replace(self.space, fixed={}, maximum={}), top=1)
        found = []
        for name, meaning, columns, reason in baseline_layouts(evaluator, cluster, self.engine):
            plans: tuple[RankedPlan, ...] = ()
            if len(columns):
                own = replace(alone, chosen=replace(self.chosen, evaluator=evaluator, broken={}))
                table = own.table(columns, (0,))
                order = own.ranked(table)
                kept = own.shown(table, order)
                now = own.chosen.as_simulated(table)
                row = int(order[0]) if len(order) else own.nearest(table)
                plan = kept[0] if kept else own.ranked_plan(now, row)
                worse = REASONS[int(now.verdict[row])] if not plan.meets else ""
                plans = (replace(plan, reason=worse or why_worse(plan, best, self.objective)),)
                reason = reason or worse
            found.append(ServingBaseline(name=name, meaning=meaning, found=plans, reason=reason))
        return tuple(found)

    def pools(self, columns: ServingColumns, best: RankedPlan | None = None) -> tuple[RankedPlan, ...]:
        """The best of two pools, and how far each is from the best plan without; where there is none, from the best of them."""
        evaluator = self.evaluator
        found = find_pools(
            evaluator.estimators[0],
            evaluator.job_of(0),
            columns,
            num_chips=evaluator.num_chips,
            answering=self.answering,
            limits=evaluator.limits,
            objective=self.objective,
            top=min(self.top, MOST_POOLS),
            price_per_hour=self.price,
            kept=(lambda plan, clients: self.chosen.kept_plan(0, plan, clients)[0]) if self.chosen.simulates else None,
        )
        return found if best is None else tuple(replace(each, reason=against(each, best, self.objective)) for each in found)

    # --- nothing -----------------------------------------------------------------------------------------------------------------------

    def nearest(self, table: LoadTable) -> int:
        """The row that is nearest to the limits; where none was timed, the one with most room."""
        distance = np.where(np.isfinite(table.tpot), table.distance(self.evaluator.limits), np.inf)
        distance = np.where(table.verdict == SATURATED, np.inf, distance)
        if not np.isfinite(distance).any():
            return int(np.argmax(table.sequences))
        return int(self._order(table, distance)[0])

    def nothing_meets(self, table: LoadTable, cluster: Cluster, apart: Sequence[RankedPlan] | None) -> NothingFoundError:
        """The error: the nearest plan, and what would meet the limits, be it workers of two kinds (`apart`; None: not tried)."""
        if not (table.verdict != NO_MEMORY).any():
            return NothingFoundError(self._nothing_fits(table, cluster), fits=False)
        where = f"{chips_text(cluster.num_chips)} of {cluster.name}"
        limits, is_timed = self.evaluator.limits, table.verdict > SATURATED
        if self.evaluator.job.rate is not None and not np.isfinite(table.distance(limits)[is_timed]).any():
            return NothingFoundError(self._nothing_answers(table, where), "use more chips")
        row = self.nearest(table)
        has = " and ".join(f"{name} {format_time(float(table.limited[name][row]))}" for name in limits.given())
        clients = int(table.concurrency[row])
        load = f" with {clients:,} {'requests' if clients > 1 else 'request'} in flight" if clients else ""
        is_near = bool(table.distance(limits)[row] * (1.0 - limits.headroom) <= 1.0)
        remedy = f"allow {'a limit_headroom of 0' if is_near else 'as much'}, or use more or faster chips, fewer bits"
        remedy += "" if self.evaluator.is_load_searched else ", a smaller load"
        remedies = (["--limit-headroom 0"] if is_near and limits.headroom else []) + (["--disaggregated"] if apart else [])
        spare = f" with {100 * limits.headroom:g} % of each to spare" if is_near else ""
        said = f"limits={limits}: no plan of {self.evaluator.job.model.name} on {where} meets them{spare}"
        if apart:
            best = apart[0]
            have = " and ".join(f"{name} {format_time(limits.seen(best.prediction)[name])}" for name in limits.given())
            remedy = f"add --disaggregated ({best.plan.label()} has {have}), or {remedy}"
        elif apart is not None:
            remedy = f"{remedy}; disaggregated serving does not meet them either"
        nearest = f"the nearest, {table.columns.plan(row).label()}{load}, has {has}"
        return NothingFoundError(f"{said}; {nearest}", remedy, remedies=tuple(remedies))

    def _nothing_fits(self, table: LoadTable, cluster: Cluster) -> str:
        """Parts of the memory of the row with the most room."""
        job = self.evaluator.job
        mean = job.input_len.mean + job.output_len.mean
        of = [each.memory(table.columns, mean, job.speculation) for each in self.evaluator.estimators]
        room = np.stack([np.broadcast_to(each.cache_capacity, len(table)) for each in of])[table.formats, np.arange(len(table))]
        row = int(np.argmax(room))
        held = of[int(table.formats[row])]
        named = {"weights": held.weights, "activations": held.activations, "graphs": held.graphs, "context": held.context}
        sizes = {name: float(np.broadcast_to(size, len(table))[row]) for name, size in named.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        usable = format_bytes(float(np.broadcast_to(held.usable, len(table))[row]))
        taken = f"{largest} take {format_bytes(sizes[largest])} of {usable} usable on each chip under {table.columns.plan(row).label()}"
        if room[row] > 0:
            taken += f", and the {format_bytes(float(room[row]))} left hold no request of full length"
        return f"chips={cluster.num_chips}: no plan of {job.model.name} fits ({taken})"

    def _nothing_answers(self, table: LoadTable, where: str) -> str:
        """Where no plan answers requests as fast as they come: the one that answers most."""
        job = self.evaluator.job
        assert job.rate is not None
        timed = np.where(table.verdict == NO_MEMORY, -np.inf, np.nan_to_num(table.per_chip, nan=-np.inf))
        best = int(np.argmax(timed))
        most = float(table.per_chip[best]) * self.evaluator.num_chips / job.output_len.mean
        label = table.columns.plan(best).label()
        if most < 0.999 * job.rate:
            best_of = f"{label} answers at most {most:.3g} a second"
        else:
            best_of = f"prompts queue without end under {label}"
        return f"rate={job.rate:g}: no plan on {where} answers this rate; {best_of}"


def _no_layout(job: ServingJob, cluster: Cluster, found: Layouts) -> str:
    reasons = "; ".join(f"{count} of them: {reason}" for reason, count in sorted(found.left_out.items(), key=lambda each: -each[1])[:3])
    return f"plan: no layout of {job.model.name} on {chips_text(cluster.num_chips)} is left ({reasons}); give fewer knobs"
