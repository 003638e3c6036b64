"""Searches plans of two pools: which worker for prompts, which for answers, how many of each, and the load under which they hold limits.

Every pair of layouts that fit is looked at by its rates alone (`disaggregated.py`: prompts a second of one worker, requests a second of
another with the largest batch that keeps the limit of a token); the best splits of the chips are then evaluated at their loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.disaggregated import decode_rate, decode_tpot, largest_batch, prefill_rate
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.pools import ServedPools, handover, predict_pools, serve_pools
from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.times import ServingTimes
from perfmodel.parallel.serving.columns import ServingColumns
from perfmodel.parallel.serving.plan import Pools, ServingPlan
from perfmodel.planner.serving.result import FrontPoint, RankedPlan, ServingLimits, ServingObjective, ranked_plan
from perfmodel.workload.serving import ServingJob

Array = NDArray[np.float64]

#: Splits that are evaluated at loads, those with the highest rates.
MOST_SPLITS = 48
#: Loads of a split that are tried at first, and between the last that holds and the next.
_LOADS = 12
_BETWEEN = 6
#: Of a front: times of a token for each of which the best splits are tried (None: however long), and how many of them. [s]
_PACES = (None, 0.16, 0.08, 0.04, 0.02, 0.01)
_SPLITS_AT_A_PACE = 8
#: Plans that are simulated, for each that is shown.
_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Workers of both kinds on the given chips, and the most clients that could keep its decode workers busy."""

    pools: Pools
    most_clients: int


def find_pools(
    estimator: ServingEstimator,
    job: ServingJob,
    columns: ServingColumns,
    *,
    num_chips: int,
    answering: ServingColumns | None = None,
    limits: ServingLimits | None = None,
    objective: ServingObjective = ServingObjective.THROUGHPUT,
    top: int = 3,
    price_per_hour: float = 0.0,
    kept: Callable[[ServingPlan, int], RankedPlan | None] | None = None,
) -> tuple[RankedPlan, ...]:
    """The best plans of two pools, best first, of workers that lie as `columns` do (`answering`: those that answer lie so);
    empty where none fits or none meets the limits.

    With a load in the job every split is evaluated at it; else each stands at the largest number of clients under which it holds the
    limits (with one client where latency is the objective).

    kept   simulates a plan at its clients (0: the load of the job); None where it breaks a limit so. Without it figures are the formulas'
    """
    limits = limits or ServingLimits()
    workers = None if job.is_static else _workers(estimator, job, columns, answering, num_chips)
    splits = [] if workers is None else workers.splits([limits])[0]
    if not splits:
        return ()
    found: list[tuple[float, int, int]] = []
    for at, (badness, clients) in enumerate(zip(*_best_loads(estimator, job, splits, limits, objective), strict=True)):
        if np.isfinite(badness):
            found.append((float(badness), at, int(clients)))
    ranked: list[RankedPlan] = []
    kinds: set[tuple[ServingPlan, ServingPlan]] = set()
    tried = 0
    for _, at, clients in sorted(found):
        pools = splits[at].pools
        if (pools.prefill, pools.decode) in kinds:
            continue
        plan = ServingPlan(engine=estimator.engine.name, pools=pools)
        one = kept(plan, clients) if kept else _ranked(estimator, _at_load(job, clients), plan, num_chips, price_per_hour)
        tried += 1
        if one is not None:
            kinds.add((pools.prefill, pools.decode))
            ranked.append(one)
        if len(ranked) == top or tried == _TRIED * top:
            break
    ranked.sort(key=lambda each: each.badness(objective))
    return tuple(replace(one, reason=against(one, ranked[0], objective)) if one is not ranked[0] else one for one in ranked)


def pools_front(
    estimator: ServingEstimator,
    job: ServingJob,
    columns: ServingColumns,
    *,
    num_chips: int,
    answering: ServingColumns | None = None,
    limits: ServingLimits,
) -> tuple[FrontPoint, ...]:
    """Points of the front of tokens a user against tokens a chip that plans of two pools may hold: the best splits for several paces."""
    free = replace(job, concurrency=None, rate=None, is_static=False)
    workers = _workers(estimator, free, columns, answering, num_chips)
    if workers is None:
        return ()
    splits: dict[Pools, _Split] = {}
    for found in workers.splits([ServingLimits(tpot=pace, headroom=0.0) for pace in _PACES], most=_SPLITS_AT_A_PACE):
        for split in found:
            splits.setdefault(split.pools, split)
    if not splits:
        return ()
    chosen = list(splits.values())
    clients = _first_loads(chosen)
    pools = [each.pools for each in chosen for _ in range(clients.shape[1])]
    served = serve_pools(estimator, free, pools, concurrency=clients.ravel())
    load = served.disaggregated.load
    timed = served.prefill_fits & np.asarray(served.decode_memory.sequences >= 1.0) & np.logical_not(load.is_saturated) & (load.tpot > 0)
    holds = timed & _keeps(served, limits)
    return tuple(
        FrontPoint(
            plan=ServingPlan(engine=estimator.engine.name, pools=pools[at]),
            quantization=estimator.quantization.name,
            kv_precision=str(estimator.cache),
            concurrency=int(clients.ravel()[at]),
            tokens_per_second_per_user=float(1.0 / load.tpot[at]),
            tokens_per_second_per_chip=float(load.tokens_per_second[at]) / num_chips,
            ttft=float(load.ttft[at]),
            tpot=float(load.tpot[at]),
            meets=bool(holds[at]),
        )
        for at in np.flatnonzero(timed)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Workers:
    """How one worker of either kind may lie, and what it could do by itself, of which limits change little.

    asked       for prompts: `prompts` a second, 0 where one does not fit, and the time of one prompt   [1/s], [s]
    answering   for answers, those that fit, and the sequences that one runs at once
    """

    estimator: ServingEstimator
    job: ServingJob
    num_chips: int
    asked: list[ServingPlan]
    prompts: Array
    prompt_time: Array
    answering: ServingColumns
    capacity: Array

    def splits(self, under: Sequence[ServingLimits], *, most: int = MOST_SPLITS) -> list[list[_Split]]:
        """Splits with the highest rates under each of the limits, of all pairs of layouts and numbers of workers that fit on the chips."""
        aims = [limits.aims() for limits in under]
        answers, batches = self._answers(np.array([each.get("tpot", np.inf) for each in aims]))
        ttft = [each.get("ttft", np.inf) for each in aims]
        return [self._best(*each, most=most) for each in zip(ttft, answers, batches, strict=True)]

    def _best(self, ttft: float, answers: Array, batch: Array, *, most: int) -> list[_Split]:
        """Where a prompt may take so long, and workers answer so many requests a second with such batches."""
        prompts, best = np.where(self.prompt_time <= ttft, self.prompts, 0.0), _best_shares(self.answering, answers)
        chips_p = np.array([float(each.chips_per_replica) for each in self.asked])
        chips_d = self.answering.chips_per_replica[best].astype(float)
        allowed = ttft if np.isfinite(ttft) else 0.0
        found: list[_Split] = []
        for x, p, y, d, rate in _highest_rates(prompts, answers[best], chips_p, chips_d, self.num_chips, most=most):
            decode = self.answering.plan(int(best[d]))
            pools = Pools(prefill=self.asked[p], decode=decode, prefill_workers=x, decode_workers=y)
            before = max(4.0 * float(self.prompt_time[p]), allowed)  # as long as a request may be under way to its first token
            found.append(_Split(pools=pools, most_clients=max(int(y * batch[best[d]] + rate * before), 1)))
        return found

    def _answers(self, tpot: Array) -> tuple[Array, Array]:
        """[limits, layouts] Requests a second of a worker with the largest batch that keeps each of the limits, and that batch.

        No step is quicker with more sequences (`ServingTimes`): it is looked for only where one keeps the limit and all together do not.
        """
        steps, limit = self._steps(self.answering), tpot[:, None]
        top = np.floor(np.maximum(self.capacity, 1.0))
        one, every = (decode_tpot(*steps, batch=number) <= limit for number in (np.ones_like(top), top))
        batch = np.where(every, top, 0.0)
        which, row = np.nonzero(one & ~every)
        if len(row):
            some = self._steps(self.answering.take(row))
            batch[which, row] = largest_batch(*some, tpot_limit=tpot[which], capacity=self.capacity[row])
        most, _ = decode_rate(*steps, batch=np.maximum(batch, 1.0))
        return np.where(batch >= 1.0, most, 0.0), batch

    def _steps(self, columns: ServingColumns) -> tuple[ServingTimes, Requests, Scheduling]:
        """Step times of decode workers."""
        of, drafts = self.estimator, self.job.speculation
        return of.with_drafts(of.times(columns), columns, drafts), Requests.of_job(self.job), of.scheduling(columns, drafts)


def _workers(
    estimator: ServingEstimator, job: ServingJob, columns: ServingColumns, answering: ServingColumns | None, num_chips: int
) -> _Workers | None:
    """Workers that leave chips for the other kind; None if there are none."""
    columns, answering = (_of_one_worker(each, num_chips) for each in (columns, columns if answering is None else answering))
    answering = answering.take(answering.pcp == 1)  # no prompts to share
    memory = estimator.memory(answering, job.input_len.mean + job.output_len.mean, job.speculation)
    fits = np.flatnonzero(memory.fits)
    if not len(columns) or not len(fits):
        return None
    capacity, answering = estimator.capacity(answering, memory)[fits], answering.take(fits)
    alike = replace(columns, dcp=np.ones_like(columns.dcp))  # those for prompts do not decode
    asked = list(dict.fromkeys(alike.plan(row) for row in range(len(alike))))
    prompts, prompt_time = _prompts(estimator, job, asked)
    return _Workers(
        estimator=estimator,
        job=job,
        num_chips=num_chips,
        asked=asked,
        prompts=prompts,
        prompt_time=prompt_time,
        answering=answering,
        capacity=capacity,
    )


def _highest_rates(
    most_p: Array, most_d: Array, chips_p: Array, chips_d: Array, num_chips: int, *, most: int = MOST_SPLITS
) -> Iterator[tuple[int, int, int, int, float]]:
    """(x, p, y, d, rate) of the `most` splits with the highest rates, best first; ties: fewer chips first, then by x, p and d.

        rate = min(x mu_p, y mu_d) > 0,   y = (N - x g_p) // g_d

    What workers d could answer depends on the chips left alone, so the best rate of each (x, p) is known without its pairs. As many
    (x, p) as are asked for reach a rate T: only those whose best is T or more, beside the d that reach it, need be paired.
    """
    x, p = np.nonzero(np.arange(1, num_chips)[:, None] * chips_p < num_chips)
    x += 1
    asked = x * most_p[p]
    left, of = np.unique(num_chips - x * chips_p[p], return_inverse=True)
    count_d = left[:, None] // chips_d
    answered = count_d * most_d
    best = np.minimum(asked, answered.max(axis=1)[of])
    least = np.sort(best)[-most:][0]
    rows = np.flatnonzero((best >= least) & (best > 0))
    some, d = np.nonzero(answered[of[rows]] >= least)
    pair = rows[some]
    y, rate = count_d[of[pair], d], np.minimum(asked[pair], answered[of[pair], d])
    used = x[pair] * chips_p[p[pair]] + y * chips_d[d]
    for at in np.lexsort((used, -rate))[:most]:
        if rate[at] > 0:
            yield int(x[pair[at]]), int(p[pair[at]]), int(y[at]), int(d[at]), float(rate[at])


def _of_one_worker(columns: ServingColumns, num_chips: int) -> ServingColumns:
    """Layouts that leave chips for another worker."""
    columns = columns.take(columns.chips_per_replica < num_chips)
    return replace(columns, replicas=np.ones_like(columns.replicas))


def _best_shares(columns: ServingColumns, most: Array) -> NDArray[np.int64]:
    """The layout with the highest rate of those that differ only in dcp; the smaller of equal ones."""
    kinds = np.stack([columns.tp, columns.pp, columns.attention_dp, columns.ep])
    order = np.lexsort((columns.dcp, -most, *kinds))
    is_first = np.any(np.diff(kinds[:, order], axis=1, prepend=-1) != 0, axis=0)
    return np.sort(order[is_first])


def _prompts(estimator: ServingEstimator, job: ServingJob, workers: list[ServingPlan]) -> tuple[Array, Array]:
    """Prompts a second of a worker of each layout, 0 where it does not fit, and the time of one."""
    columns = ServingColumns.of(workers)
    scheduling = replace(estimator.scheduling(columns), prompts_together=columns.attention_dp.astype(float))
    alike = [Pools(prefill=each, decode=each, prefill_workers=1, decode_workers=1) for each in workers]
    sent = handover(estimator, alike, job.input_len.mean)
    most, time = prefill_rate(estimator.times(columns), Requests.of_job(job), scheduling, sent)
    fits = np.asarray(estimator.memory(columns, float(job.input_len.most), job.speculation).sequences) >= 1.0
    return np.where(fits, most, 0.0), time


def _best_loads(
    estimator: ServingEstimator, job: ServingJob, splits: list[_Split], limits: ServingLimits, objective: ServingObjective
) -> tuple[Array, NDArray[np.int64]]:
    """Objective of each split at its best load (infinite if no load meets the limits) and the clients; 0 clients: those of the job."""
    if job.concurrency is not None or job.rate is not None:
        return _badness(estimator, job, splits, None, limits, objective)[:, 0], np.zeros(len(splits), dtype=np.int64)
    if objective is ServingObjective.LATENCY:
        one = np.ones((len(splits), 1), dtype=np.int64)
        return _badness(estimator, job, splits, one, limits, objective)[:, 0], one[:, 0]
    clients, rows = _first_loads(splits), np.arange(len(splits))
    for share in (np.linspace(0, 1, _BETWEEN), np.linspace(0, 1, _BETWEEN), np.zeros(1)):
        values = _badness(estimator, job, splits, clients, limits, objective)
        best = values.argmin(axis=1)
        if len(share) > 1:
            low, high = clients[rows, best], clients[rows, np.minimum(best + 1, clients.shape[1] - 1)]
            between = np.round(low[:, None] + (high - low)[:, None] * share[None, :]).astype(np.int64)
            clients = between
    return values[rows, best], clients[rows, best]


def _first_loads(splits: list[_Split]) -> NDArray[np.int64]:
    """[splits, loads] Clients in equal ratios, from one to as many as keep the decode workers busy."""
    most = np.array([float(each.most_clients) for each in splits])[:, None]
    return np.maximum(np.round(most ** np.linspace(0, 1, _LOADS)[None, :]), 1).astype(np.int64)


def _keeps(served: ServedPools, limits: ServingLimits) -> NDArray[np.bool_]:
    """Where all limits are kept."""
    load = served.disaggregated.load
    limited, holds = limits.times_of(load), np.ones(load.ttft.shape, dtype=bool)
    for name, aim in limits.aims().items():
        holds = holds & (limited[name] <= aim)
    return holds


def _badness(
    estimator: ServingEstimator,
    job: ServingJob,
    splits: list[_Split],
    clients: NDArray[np.int64] | None,
    limits: ServingLimits,
    objective: ServingObjective,
) -> Array:
    """[splits, loads]"""
    loads = 1 if clients is None else clients.shape[1]
    pools = [each.pools for each in splits for _ in range(loads)]
    served = serve_pools(estimator, job, pools, concurrency=None if clients is None else clients.ravel())
    load = served.disaggregated.load
    holds = np.asarray(served.prefill_fits & np.asarray(served.decode_memory.sequences >= 1.0), dtype=bool) & _keeps(served, limits)
    if job.rate is not None:
        holds = holds & np.logical_not(load.is_saturated)
    value = load.request_latency if objective is ServingObjective.LATENCY else -load.tokens_per_second
    return np.where(holds, value, np.inf).reshape(len(splits), loads)


def _at_load(job: ServingJob, clients: int) -> ServingJob:
    return replace(job, concurrency=clients) if clients else job


def _ranked(estimator: ServingEstimator, job: ServingJob, plan: ServingPlan, num_chips: int, price: float) -> RankedPlan:
    return ranked_plan(predict_pools(estimator, job, plan), num_chips=num_chips, price=price)


def against(plan: RankedPlan, best: RankedPlan, objective: ServingObjective) -> str:
    """In a sentence, by how much a plan is better or worse than another."""
    if objective is ServingObjective.LATENCY:
        ratio = plan.prediction.request_latency.mean / best.prediction.request_latency.mean - 1
        return f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'quicker'}"
    ratio = plan.tokens_per_second_per_chip / best.tokens_per_second_per_chip - 1
    return f"{abs(ratio):.1%} {'fewer' if ratio < 0 else 'more'} tokens"
