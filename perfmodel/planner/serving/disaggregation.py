"""Search for plans of two pools: layouts and numbers of prefill and decode workers, and the load under which they keep the limits.

Every pair of layouts that fit is compared by its rates alone (`disaggregated.py`): prompts per second of a prefill worker, and requests per
second of a decode worker with the largest batch within the limit of TPOT. The best splits of the chips are then evaluated at their loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.disaggregated import decode_rate, decode_tpot, handover, largest_batch, prefill_rate, serve_pools
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.load import ServedLoad
from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.times import ServingTimes
from perfmodel.parallel.serving_plan import Pools, ServingColumns, ServingLayout
from perfmodel.planner.reasons import against
from perfmodel.planner.result import FrontPoint, RankedPlan, ServingLimits, ServingObjective
from perfmodel.planner.serving.evaluate import Chosen, Evaluator, first_of_each
from perfmodel.workload.serving import ServingJob

Array = NDArray[np.float64]

#: Number of splits that are evaluated at loads, those with the highest rates.
MOST_SPLITS = 48
#: Number of loads of a split that are tried at first, and between the largest within the limits and the next.
_LOADS = 12
_BETWEEN = 6
#: For a front: limits of TPOT for each of which the best splits are tried (None: no limit) [s], and the number of splits for each.
_PACES = (None, 0.16, 0.08, 0.04, 0.02, 0.01)
_SPLITS_AT_A_PACE = 8
#: Number of plans that are simulated, per plan that is shown.
_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Prefill and decode workers on the given chips, and the most clients that could keep the decode workers busy."""

    pools: Pools
    most_clients: int


def find_pools(chosen: Chosen, columns: ServingColumns, decode: ServingColumns, *, top: int = 3) -> tuple[RankedPlan, ...]:
    """Return the best plans of two pools, best first; empty where none fits or none meets the limits.

    With a load in the job every split is evaluated at it. Otherwise each is ranked at the largest number of clients within the limits (with
    one client if latency is the objective).

    columns   layouts of workers; decode: those of decode workers
    """
    evaluator, objective = chosen.evaluator, chosen.objective
    workers = (
        None if evaluator.job.is_static else _workers(evaluator.estimators[0], evaluator.job_of(0), columns, decode, evaluator.num_chips)
    )
    splits = [] if workers is None else workers.splits([evaluator.limits])[0]
    if not splits:
        return ()
    candidates: list[tuple[float, int, int]] = []
    for at, (badness, clients) in enumerate(zip(*_best_loads(evaluator, splits, objective), strict=True)):
        if np.isfinite(badness):
            candidates.append((float(badness), at, int(clients)))
    ranked: list[RankedPlan] = []
    kinds: set[tuple[ServingLayout, ServingLayout]] = set()
    tried = 0
    for _, at, clients in sorted(candidates):
        pools = splits[at].pools
        if (pools.prefill, pools.decode) in kinds:
            continue
        one, tried = chosen.kept_layout(0, pools, clients)[0], tried + 1
        if one is not None:
            kinds.add((pools.prefill, pools.decode))
            ranked.append(one)
        if len(ranked) == top or tried == _TRIED * top:
            break
    ranked.sort(key=objective.cost)
    return tuple(replace(one, reason=against(one, ranked[0], objective)) if one is not ranked[0] else one for one in ranked)


def pools_front(evaluator: Evaluator, columns: ServingColumns, decode: ServingColumns) -> tuple[FrontPoint, ...]:
    """Return front points of tokens/s per user and per chip for plans of two pools: the best splits at several limits of TPOT."""
    estimator, num_chips = evaluator.estimators[0], evaluator.num_chips
    free = replace(evaluator.job_of(0), concurrency=None, rate=None, is_static=False)
    workers = _workers(estimator, free, columns, decode, num_chips)
    if workers is None:
        return ()
    splits: dict[Pools, _Split] = {}
    for group in workers.splits([ServingLimits(tpot=pace, headroom=0.0) for pace in _PACES], most=_SPLITS_AT_A_PACE):
        for split in group:
            splits.setdefault(split.pools, split)
    if not splits:
        return ()
    chosen = list(splits.values())
    clients = _first_loads(chosen)
    pools = [split.pools for split in chosen for _ in range(clients.shape[1])]
    served, inputs = serve_pools(estimator, free, pools, concurrency=clients.ravel())
    load = served.load
    timed = inputs.fits & np.logical_not(load.is_saturated) & (load.tpot > 0)
    holds = timed & _keeps(load, evaluator.limits)
    return tuple(
        FrontPoint(
            layout=pools[at],
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
    """Layouts of prefill and decode workers, with rates that hardly depend on the limits.

    prefill   with `prompts` per second, 0 where a worker does not fit, and the time of one prompt   [1/s], [s]
    decode    those that fit, with the sequences that a worker runs at once
    """

    estimator: ServingEstimator
    job: ServingJob
    num_chips: int
    prefill: list[ServingLayout]
    prompts: Array
    prompt_time: Array
    decode: ServingColumns
    capacity: Array

    def splits(self, under: Sequence[ServingLimits], *, most: int = MOST_SPLITS) -> list[list[_Split]]:
        """Return the splits with the highest rates under each of the limits, over all pairs of layouts and numbers of workers that fit."""
        aims = [limits.aims() for limits in under]
        answers, batches = self._answers(np.array([aim.get("tpot", np.inf) for aim in aims]))
        kinds = np.stack([self.decode.tp, self.decode.pp, self.decode.attention_dp, self.decode.ep])
        chips_p = np.array([float(worker.chips_per_replica) for worker in self.prefill])
        splits: list[list[_Split]] = []
        for aim, answer, batch in zip(aims, answers, batches, strict=True):
            ttft = aim.get("ttft", np.inf)
            best = first_of_each(kinds, self.decode.dcp, -answer)
            chips_d = self.decode.chips_per_replica[best].astype(float)
            prompts = np.where(self.prompt_time <= ttft, self.prompts, 0.0)
            splits.append([])
            for x, p, y, d, rate in _highest_rates(prompts, answer[best], chips_p, chips_d, self.num_chips, most=most):
                decode = self.decode.layout(int(best[d]))
                pools = Pools(prefill=self.prefill[p], decode=decode, prefill_workers=x, decode_workers=y)
                # longest time of a request to its first token
                before = max(4.0 * float(self.prompt_time[p]), ttft if np.isfinite(ttft) else 0.0)
                splits[-1].append(_Split(pools=pools, most_clients=max(int(y * batch[best[d]] + rate * before), 1)))
        return splits

    def _answers(self, tpot: Array) -> tuple[Array, Array]:
        """Return request rates [limits, layouts] of a worker with the largest batch within each limit, and that batch.

        Steps are never faster with more sequences (`ServingTimes`). So a search is needed only if one sequence keeps the limit and all
        together do not.
        """
        steps, limit = self._steps(self.decode), tpot[:, None]
        top = np.floor(np.maximum(self.capacity, 1.0))
        one, every = (decode_tpot(*steps, batch=number) <= limit for number in (np.ones_like(top), top))
        batch = np.where(every, top, 0.0)
        which, row = np.nonzero(one & ~every)
        if len(row):
            some = self._steps(self.decode.take(row))
            batch[which, row] = largest_batch(*some, tpot_limit=tpot[which], capacity=self.capacity[row])
        most, _ = decode_rate(*steps, batch=np.maximum(batch, 1.0))
        return np.where(batch >= 1.0, most, 0.0), batch

    def _steps(self, columns: ServingColumns) -> tuple[ServingTimes, Requests, Scheduling]:
        """Return step times, requests and scheduling of decode workers."""
        of, drafts = self.estimator, self.job.speculation
        return of.with_drafts(of.times(columns), columns, drafts), Requests.of_job(self.job), of.scheduling(columns, drafts)


def _workers(
    estimator: ServingEstimator, job: ServingJob, columns: ServingColumns, decode: ServingColumns, num_chips: int
) -> _Workers | None:
    """Return the workers that leave chips for the other pool; None if there are none."""
    both = [layouts.take(layouts.chips_per_replica < num_chips) for layouts in (columns, decode)]
    columns, decode = (replace(layouts, replicas=np.ones_like(layouts.replicas)) for layouts in both)
    decode = decode.take(decode.pcp == 1)  # decode workers have no prompts to share
    memory = estimator.memory(decode, job.input_len.mean + job.output_len.mean, job.speculation)
    fits = np.flatnonzero(memory.fits)
    if not len(columns) or not len(fits):
        return None
    capacity, decode = estimator.capacity(decode, memory)[fits], decode.take(fits)
    alike = replace(columns, dcp=np.ones_like(columns.dcp))  # prefill workers do not decode
    prefill = list(dict.fromkeys(alike.layout(row) for row in range(len(alike))))
    rows = ServingColumns.of(prefill)
    scheduling = replace(estimator.scheduling(rows), prompts_together=rows.attention_dp.astype(float))
    sent = handover(estimator, [Pools(prefill=one, decode=one, prefill_workers=1, decode_workers=1) for one in prefill], job.input_len.mean)
    prompts, prompt_time = prefill_rate(estimator.times(rows), Requests.of_job(job), scheduling, sent)
    prefill_fits = estimator.memory(rows, float(job.input_len.most), job.speculation).fits
    return _Workers(
        estimator=estimator,
        job=job,
        num_chips=num_chips,
        prefill=prefill,
        prompts=np.where(prefill_fits, prompts, 0.0),
        prompt_time=prompt_time,
        decode=decode,
        capacity=capacity,
    )


def _highest_rates(
    most_p: Array, most_d: Array, chips_p: Array, chips_d: Array, num_chips: int, *, most: int = MOST_SPLITS
) -> Iterator[tuple[int, int, int, int, float]]:
    """Yield (x, p, y, d, rate) of the `most` splits with the highest rates, best first; ties: fewer chips first, then by x, p and d.

        rate = min(x mu_p, y mu_d) > 0,   y = (N - x g_p) // g_d

    The rate of decode workers d depends only on the remaining chips, so the best rate of each (x, p) is known without its pairs. The `most`
    best (x, p) reach a rate of T or more. So only the (x, p) and d that reach T need pairing.
    """
    x, p = np.nonzero(np.arange(1, num_chips)[:, None] * chips_p < num_chips)
    x += 1
    prompts = x * most_p[p]
    left, of = np.unique(num_chips - x * chips_p[p], return_inverse=True)
    count_d = left[:, None] // chips_d
    answers = count_d * most_d
    best = np.minimum(prompts, answers.max(axis=1)[of])
    least = np.sort(best)[-most:][0]
    rows = np.flatnonzero((best >= least) & (best > 0))
    some, d = np.nonzero(answers[of[rows]] >= least)
    pair = rows[some]
    y, rate = count_d[of[pair], d], np.minimum(prompts[pair], answers[of[pair], d])
    used = x[pair] * chips_p[p[pair]] + y * chips_d[d]
    for at in np.lexsort((used, -rate))[:most]:
        if rate[at] > 0:
            yield int(x[pair[at]]), int(p[pair[at]]), int(y[at]), int(d[at]), float(rate[at])


def _best_loads(evaluator: Evaluator, splits: list[_Split], objective: ServingObjective) -> tuple[Array, NDArray[np.int64]]:
    """Return the objective of each split at its best load (infinite if none meets the limits), and the clients; 0: those of the job."""
    if not evaluator.is_load_searched:
        return _badness(evaluator, splits, None, objective)[:, 0], np.zeros(len(splits), dtype=np.int64)
    if objective is ServingObjective.LATENCY:
        one = np.ones((len(splits), 1), dtype=np.int64)
        return _badness(evaluator, splits, one, objective)[:, 0], one[:, 0]
    clients, rows = _first_loads(splits), np.arange(len(splits))
    for share in (np.linspace(0, 1, _BETWEEN), np.linspace(0, 1, _BETWEEN), np.zeros(1)):
        values = _badness(evaluator, splits, clients, objective)
        best = values.argmin(axis=1)
        if len(share) > 1:
            low, high = clients[rows, best], clients[rows, np.minimum(best + 1, clients.shape[1] - 1)]
            between = np.round(low[:, None] + (high - low)[:, None] * share[None, :]).astype(np.int64)
            clients = between
    return values[rows, best], clients[rows, best]


def _first_loads(splits: list[_Split]) -> NDArray[np.int64]:
    """Return clients [splits, loads] in equal ratios, from one to the number that keeps the decode workers busy."""
    most = np.array([float(split.most_clients) for split in splits])[:, None]
    return np.maximum(np.round(most ** np.linspace(0, 1, _LOADS)[None, :]), 1).astype(np.int64)


def _keeps(load: ServedLoad, limits: ServingLimits) -> NDArray[np.bool_]:
    """Return whether all limits are kept."""
    limited, holds = limits.times_of(load), np.ones(load.ttft.shape, dtype=bool)
    for name, aim in limits.aims().items():
        holds = holds & (limited[name] <= aim)
    return holds


def _badness(evaluator: Evaluator, splits: list[_Split], clients: NDArray[np.int64] | None, objective: ServingObjective) -> Array:
    """Return the objective [splits, loads]; infinite where the limits are not met."""
    loads, job = 1 if clients is None else clients.shape[1], evaluator.job_of(0)
    pools = [split.pools for split in splits for _ in range(loads)]
    served, inputs = serve_pools(evaluator.estimators[0], job, pools, concurrency=None if clients is None else clients.ravel())
    load = served.load
    holds = inputs.fits & _keeps(load, evaluator.limits)
    if job.rate is not None:
        holds = holds & np.logical_not(load.is_saturated)
    value = load.request_latency if objective is ServingObjective.LATENCY else -load.tokens_per_second
    return np.where(holds, value, np.inf).reshape(len(splits), loads)
