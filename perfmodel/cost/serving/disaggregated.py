"""Disaggregated serving: rates of prefill and decode workers, queues, the cache transfer, and the numbers of workers.

x prefill workers of g_P chips, y decode workers of g_D chips. The gain: no prompt delays a decode step. The costs: workers that idle while
they wait for the other kind, and the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.link_rates import DEFAULT_LINK_FRACTION
from perfmodel.cost.serving.estimate import ServedPlans, ServingEstimator, prediction_of, rests_on
from perfmodel.cost.serving.load import ServedLoad, load_of
from perfmodel.cost.serving.memory import ServingMemory, cache_shape
from perfmodel.cost.serving.queueing import (
    NORMAL_99,
    busy_probability,
    piecewise_linear,
    queue_wait,
    relative_excess_99,
    stationary_running,
    wait_tail_99,
)
from perfmodel.cost.serving.requests import Requests, Scheduling, decode_steps, fill_steps, squared_variation
from perfmodel.cost.serving.step import StepCosts
from perfmodel.cost.serving.times import Array, ServingTimes
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.engine_layouts import check_layout
from perfmodel.parallel.serving_plan import Pools, ServiceLayout, ServingColumns
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.workload.serving import ServingJob

_HALVINGS = 50
_CORRECTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """Transfer of a prompt's cache from its prefill worker to its decode worker.

    token_bytes   cache of a token, one copy of all layers (for any number of chips with copies)             [byte]
    bandwidth     one direction, of all links of a prefill worker together                                [byte/s]
    latency       of a transfer                                                                           [s]
    layers        that are sent one by one, each after it is computed; 1: all after the prefill           [-]
    """

    token_bytes: Column
    bandwidth: Column
    latency: Column = 0.0
    layers: Column = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoPools:
    """Columns of two pools, with workers of one plan each.

    prefill, decode      steps of a worker of each kind
    scheduling           of decode workers; prefill_scheduling: of prefill workers (tokens and prompts of a step)
    prefill_workers x, decode_workers y
    capacity        K    sequences that one decode worker runs at once
    """

    prefill: ServingTimes
    decode: ServingTimes
    scheduling: Scheduling
    prefill_scheduling: Scheduling
    prefill_workers: Column
    decode_workers: Column
    capacity: Column
    handover: Handover


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DisaggregatedLoad:
    """Load on all workers, arrays over plans.

    load                         of all workers; `running` counts decoding requests
    prefill_use, decode_use      utilisation of the workers of each kind [-]
    matched_ratio                prefill workers per decode worker at which neither kind waits for the other [-]
    """

    load: ServedLoad
    prefill_use: Array
    decode_use: Array
    matched_ratio: Array


def exposed_transfer_time(num_bytes: Column, prefill_time: Column, *, bandwidth: Column, latency: Column, layers: Column = 1.0) -> Array:
    """Return the exposed time of a transfer whose layers are sent while later ones are computed. [s]

    t = a + max(V / (L B), V / B - (L - 1) / L t_p)

    The last layer is always exposed; with L = 1 the whole transfer is.
    """
    V, B, L = np.asarray(num_bytes, dtype=float), np.asarray(bandwidth), np.asarray(layers)
    return np.asarray(latency + np.maximum(V / (L * B), V / B - (L - 1) / L * prefill_time))


def prefill_rate(times: ServingTimes, requests: Requests, scheduling: Scheduling, handover: Handover) -> tuple[Array, Array]:
    """Return the largest prompt rate of one prefill worker, and the time of one prompt. [1/s], [s]

    mu_P = min(q / t_p(q), B / V): q prompts that fit into the tokens of a step, limited by the links. The time of one prompt is that of a
    batch of `prompts_together`, one for each attention rank.
    """
    alone = replace(scheduling, chunked=False, rows_per_step=1.0, tokens_per_step=1.0)
    base = fill_steps(times, requests, alone, scheduling.prompts_together)
    tokens = np.asarray(scheduling.step_tokens, dtype=float)
    most_prompts = np.where(np.isfinite(tokens), np.floor(tokens / requests.new_tokens), 1.0)
    full_batch = np.maximum(most_prompts, scheduling.prompts_together)
    full = fill_steps(times, requests, replace(alone, prompts_together=full_batch), full_batch)
    num_bytes = requests.prompt.mean * np.asarray(handover.token_bytes, dtype=float)
    with np.errstate(divide="ignore"):
        links = np.asarray(handover.bandwidth, dtype=float) / num_bytes
    most = np.maximum(base.together / base.prompt, full.together / full.prompt)
    return np.minimum(most, links), base.prompt


def decode_rate(times: ServingTimes, requests: Requests, scheduling: Scheduling, *, batch: Column) -> tuple[Array, Array]:
    """Return the request rate of one decode worker with a constant batch, and its step time. [1/s], [s]

    mu_D = b / (D t_d(b))
    """
    step = times.decode(batch, requests.mean_cached, scheduling.rows_per_step)
    return np.asarray(np.asarray(batch) / np.maximum(decode_steps(requests, scheduling) * step, 1e-12)), np.asarray(step)


def decode_tpot(times: ServingTimes, requests: Requests, scheduling: Scheduling, batch: Column) -> Array:
    """Return the TPOT of a decode worker with a batch of sequences. [s]   D t_d(b) / (O - 1)"""
    step = times.decode(batch, requests.mean_cached, scheduling.rows_per_step)
    return np.asarray(step * decode_steps(requests, scheduling) / max(requests.output.mean - 1, 1.0))


def largest_batch(times: ServingTimes, requests: Requests, scheduling: Scheduling, *, tpot_limit: Column, capacity: Column) -> Array:
    """Return the largest batch of a decode worker that meets a TPOT limit; 0 if a single sequence does not. [-]"""
    tpot = partial(decode_tpot, times, requests, scheduling)
    top, limit, _ = np.broadcast_arrays(np.floor(np.maximum(np.asarray(capacity, dtype=float), 1.0)), tpot_limit, tpot(np.asarray(1.0)))
    low, high = np.ones_like(top), top
    for _ in range(int(np.ceil(np.log2(max(float(np.max(top)), 2.0)))) + 1):
        middle = np.ceil((low + high) / 2)
        keeps = tpot(middle) <= limit
        low, high = np.where(keeps, middle, low), np.where(keeps, high, np.maximum(middle - 1, low))
    return np.where(tpot(np.ones_like(top)) <= limit, low, 0.0)


def disaggregated(
    pools: TwoPools, requests: Requests, *, concurrency: Column | None = None, rate: Column | None = None
) -> DisaggregatedLoad:
    """Return the load of clients or arrivals on x prefill and y decode workers; with neither, the maximum throughput of the slower kind.

        TTFT = h0 + W_P + W_D + t_p + transfer + m t_d,   TPOT = D t_d(b) / (O - 1)
        at most r = min(x mu_P, y mu_D(K)),   mu_P = q / t_p(q),  mu_D(K) = K / (D t_d(K))

    rate         W_P waits for x workers with service time t_p (M/D/x, longer if prompts differ), W_D for y K slots; b = r D t_d(b + 1) / y
    concurrency  the r at which all clients are accounted for, c = r (TTFT + D t_d(b)), b = r D t_d(b) / y. Waits as of Poisson arrivals,
                 excluding the client itself. A share s of requests arrives in waves (a burst of all clients takes c / (x mu_P)):
                 W_P (1 - 1 / c) + s (c - x q) / (2 x mu_P). Requests beyond y K wait for a slot
    neither      the throughput at which one kind is always busy; no request queues

    99th percentiles: of waits by an exponential tail of the requests that wait. With c clients, at most the others can wait. If each is in
    the queue for a share p = W_P / E2E of its time, their number is binomial, and 2.3 sqrt(c p (1 - p)) / r bounds the tail.

    Source of the form: DistServe, Zhong et al., OSDI 2024, section 3 (M/D/1 for prefill instances).
    """
    if concurrency is not None and rate is not None:
        raise bad_field("rate", rate, "only one of concurrency and rate can be given", "leave one of them out")
    decode, scheduling, handover = pools.decode, pools.scheduling, pools.handover
    x, y, K = (np.asarray(column, dtype=float) for column in (pools.prefill_workers, pools.decode_workers, np.maximum(pools.capacity, 1.0)))
    mu_p, prompt = prefill_rate(pools.prefill, requests, pools.prefill_scheduling, handover)
    mu_d, full_step = decode_rate(decode, requests, scheduling, batch=K)
    D, after = decode_steps(requests, scheduling), max(requests.output.mean - 1, 1.0)
    num_bytes = requests.prompt.mean * np.asarray(handover.token_bytes, dtype=float)
    shown = exposed_transfer_time(num_bytes, prompt, bandwidth=handover.bandwidth, latency=handover.latency, layers=handover.layers)
    most_p, most_d = x * mu_p, y * mu_d
    highest = np.where(np.greater_equal(pools.capacity, 1.0), np.minimum(most_p, most_d), 0.0)
    fixed = scheduling.first_token_time + prompt + shown
    varied = squared_variation(requests.prompt)

    def step(batch: Array) -> Array:
        return np.asarray(decode.decode(np.maximum(batch, 1.0), requests.mean_cached, scheduling.rows_per_step))

    def alone(batch: Array) -> tuple[Array, Array]:
        """Return the step time of a decode worker, whose steps include no prompts."""
        time = step(batch)
        return time, 0 * time

    def wait_for_prefill(r: Array) -> Array:
        return queue_wait(r, 1 / mu_p, x, squared_variation=varied)

    excess_time: Column = 0.0
    slot_wait: Column = 0.0
    wave: Column = 0.0
    if rate is not None:
        r = np.minimum(rate, highest)
        saturated = np.asarray(rate) >= highest
        running, slope = stationary_running(alone, rate=r / y, steps=D + 0 * highest, slots=K)
        b = np.where(saturated & (most_d <= most_p), K, running)
        t_d = np.where(saturated & (most_d <= most_p), full_step, step(np.minimum(b + 1, K)))
        excess_time = slope * NORMAL_99 * np.sqrt(b)
        wait = np.where(saturated, np.inf, wait_for_prefill(r))
        slot_wait = np.where(saturated, np.inf, queue_wait(r, D * full_step, y * K, squared_variation=squared_variation(requests.output)))
    elif concurrency is not None:
        c = np.asarray(concurrency, dtype=float)

        at_once = pools.prefill_scheduling.prompts_together
        wave = np.asarray(scheduling.lockstep) * np.maximum(c - x * at_once, 0.0) / (2 * most_p)

        def with_decode(r: Array) -> Array:
            return np.asarray(fixed + wave + np.where(c > 1, wait_for_prefill(r) * np.maximum(1 - 1 / c, 1e-9), 0.0))

        b, t_d, r = _closed_loop_balance(step, with_decode, scheduling.border_steps, clients=c, workers=y, steps=D, slots=K)
        r = np.minimum(np.minimum(r, highest), c / (fixed + (D + scheduling.border_steps) * t_d))
        with np.errstate(divide="ignore", invalid="ignore"):
            queued = np.maximum(np.where(r > 0, c / r, np.inf) - fixed - (D + scheduling.border_steps) * t_d, 0.0)
        wait = np.minimum(with_decode(r) - fixed, queued)
        slot_wait = np.where(np.isfinite(queued), queued - wait, np.inf)
        saturated = np.asarray(b >= K * (1 - 1e-9))
    else:
        r, wait = highest, np.asarray(0.0)
        running, _ = stationary_running(alone, rate=r / y, steps=D + 0 * highest, slots=K)
        b = np.where(most_d <= most_p, K, running)
        t_d = step(b)
        saturated = np.zeros(np.shape(r), dtype=bool)

    ttft = fixed + wait + slot_wait + scheduling.border_steps * t_d
    queueing = np.where(np.isfinite(wait), np.maximum(wait - wave, 0.0), 0.0)  # positions in a wave are uniform
    late = wait_tail_99(queueing, busy_probability(r / most_p, x))
    if rate is not None:
        late = late + wait_tail_99(np.where(np.isfinite(slot_wait), slot_wait, 0.0), busy_probability(r / most_d, y * K))
    elif concurrency is not None:
        waiting = np.clip(queueing / (ttft + D * t_d), 0.0, 1.0)
        late = np.minimum(late, NORMAL_99 * np.sqrt(c * waiting * (1 - waiting)) / np.maximum(r, 1e-12))
    tail = np.hypot(late, prompt * relative_excess_99(requests.prompt)) + 0.98 * np.minimum(wave, wait)
    tpot = D * t_d / after
    load = load_of(
        ttft=ttft,
        ttft_p99=ttft + tail,
        tpot=tpot,
        tpot_p99=tpot + np.sqrt(2 / 3) * excess_time * D / after,
        inter_token_p99=t_d + excess_time,
        request_latency=ttft + D * t_d,
        running=y * np.minimum(r * D * t_d / y, K),
        queue=np.where(r > 0, r * (wait + slot_wait), np.inf),
        requests_per_second=r,
        tokens_per_second=r * requests.output.mean,
        decode_time=t_d,
        prefill_time=prompt,
        is_saturated=saturated,
    )
    return DisaggregatedLoad(
        load=load,
        prefill_use=np.asarray(r / most_p),
        decode_use=np.asarray(r / most_d),
        matched_ratio=np.asarray(mu_d / mu_p),
    )


def _closed_loop_balance(
    step: Callable[[Array], Array],
    outside_decode: Callable[[Array], Array],
    border: Column,
    *,
    clients: Array,
    workers: Array,
    steps: Array,
    slots: Array,
) -> tuple[Array, Array, Array]:
    """Return the batch of a decode worker, its step time, and the request rate at which r (outside + (D + m) t_d) = c.

    outside_decode   time of a request outside decode at a rate   [s]
    border           m, steps between prefill and the first decode step   [-]
    """
    between = piecewise_linear(step, slots)
    offset: Array = np.asarray(0.0)
    b = r = slots
    t_d = step(slots)
    for _ in range(_CORRECTIONS):
        low, high = 0 * t_d + 0 * clients + 0 * workers, slots + 0 * t_d + 0 * clients + 0 * workers
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            t = between(middle) + offset
            r = workers * middle / np.maximum(steps * t, 1e-12)
            few = r * (outside_decode(r) + (steps + border) * t) < clients
            low, high = np.where(few, middle, low), np.where(few, high, middle)
        b = np.where(high >= slots * (1 - 1e-9), slots, (low + high) / 2)
        r = workers * b / np.maximum(steps * (between(b) + offset), 1e-12)
        t_d = step(b)
        offset = t_d - between(b)
    return b, t_d, r


# --- plans of two pools, evaluated by an estimator -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsInputs:
    """Columns of plans of two pools: inputs of their load, and the memory of a worker of each.

    decode_costs   steps of a decode worker, without drafts
    """

    pools: TwoPools
    decode_costs: StepCosts
    prefill_memory: ServingMemory
    decode_memory: ServingMemory

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether weights and one prompt fit on a prefill worker, and a sequence on a decode worker."""
        return np.asarray(self.prefill_memory.fits & self.decode_memory.fits)


def handover(estimator: ServingEstimator, pools: Sequence[Pools], tokens: float) -> Handover:
    """Return the transfer of prompts of `tokens` tokens: one copy of their cache, over the links of the chips of the smaller worker.

    The links are those of the innermost tier that contains all workers; for two kinds of chips, those between nodes. They reach the same
    fraction of their bandwidth as collectives on unmeasured links.
    """
    cluster = estimator.cluster
    shape, kv_heads = cache_shape(estimator.model), estimator.model.num_key_value_heads
    one_copy = float(shape.tokens_bytes(tokens, tp=1, kv_heads=kv_heads, cache_bytes=itemsize(estimator.cache)))
    inner = cluster.tiers if estimator.prefill is None else ()
    tiers = [next((tier for tier in inner if tier.size >= pair.num_chips), cluster.tiers[-1]) for pair in pools]
    links = np.array([float(min(pair.prefill.chips_per_replica, pair.decode.chips_per_replica)) for pair in pools])
    reached = np.array([tier.link.bandwidth / tier.oversubscription * DEFAULT_LINK_FRACTION for tier in tiers])
    return Handover(token_bytes=one_copy / tokens, bandwidth=links * reached, latency=np.array([tier.link.latency for tier in tiers]))


def serve_pools(
    estimator: ServingEstimator,
    job: ServingJob,
    pools: Sequence[Pools],
    *,
    distinct_experts: float = 0.0,
    concurrency: NDArray[np.int64] | None = None,
) -> tuple[DisaggregatedLoad, PoolsInputs]:
    """Return the load of `job` on every pair of pools; `concurrency`: clients of each pair, instead of the job's."""
    inputs = pools_inputs(estimator, job, pools, distinct_experts=distinct_experts)
    clients = concurrency if concurrency is not None else None if job.concurrency is None else float(job.concurrency)
    rate = None if clients is not None else job.rate
    return disaggregated(inputs.pools, Requests.of_job(job), concurrency=clients, rate=rate), inputs


def pools_inputs(estimator: ServingEstimator, job: ServingJob, pools: Sequence[Pools], *, distinct_experts: float = 0.0) -> PoolsInputs:
    """Return the inputs of the load of two pools, for the closed form and the simulation."""
    prefill_plans, decode_plans = ServingColumns.of([pair.prefill for pair in pools]), ServingColumns.of([pair.decode for pair in pools])
    prefill = estimator.prefill or estimator
    prefill_costs = prefill.times(prefill_plans, distinct_experts=distinct_experts)
    decode_costs = estimator.times(decode_plans, distinct_experts=distinct_experts)
    decode_memory = estimator.memory(decode_plans, job.input_len.mean + job.output_len.mean, job.speculation)
    ranks = prefill_plans.attention_dp.astype(float)
    return PoolsInputs(
        pools=TwoPools(
            prefill=prefill.with_drafts(prefill_costs, prefill_plans, job.speculation),
            decode=estimator.with_drafts(decode_costs, decode_plans, job.speculation),
            scheduling=estimator.scheduling(decode_plans, job.speculation),
            prefill_scheduling=replace(prefill.scheduling(prefill_plans), prompts_together=ranks),
            prefill_workers=np.array([float(pair.prefill_workers) for pair in pools]),
            decode_workers=np.array([float(pair.decode_workers) for pair in pools]),
            capacity=estimator.capacity(decode_plans, decode_memory),
            handover=handover(estimator, pools, job.input_len.mean),
        ),
        decode_costs=decode_costs,
        prefill_memory=prefill.memory(prefill_plans, job.input_len.mean, job.speculation),
        decode_memory=decode_memory,
    )


def predict_layout(
    estimator: ServingEstimator, job: ServingJob, layout: ServiceLayout, *, distinct_experts: float = 0.0
) -> ServingPrediction:
    """Predict equal replicas or two pools under one load. Raises InputError if the layout is not possible."""
    if isinstance(layout, Pools):
        return predict_pools(estimator, job, layout, distinct_experts=distinct_experts)
    return estimator.predict(job, layout, distinct_experts=distinct_experts)


def predict_pools(estimator: ServingEstimator, job: ServingJob, pools: Pools, *, distinct_experts: float = 0.0) -> ServingPrediction:
    """Predict two pools. Raises InputError if a worker is not possible.

    Memory and parts of a step are those of a decode worker.
    """
    notes, not_runnable = _check_workers(estimator, pools)
    pooled, inputs = serve_pools(estimator, job, [pools], distinct_experts=distinct_experts)
    workers, prefill_fits = float(pools.decode_workers), bool(np.ravel(inputs.prefill_memory.fits)[0])
    shared = ("running", "queue", "requests_per_second", "tokens_per_second")
    load = replace(pooled.load, **{name: getattr(pooled.load, name) / workers for name in shared})
    columns = ServedPlans(
        load=load,
        memory=inputs.decode_memory,
        capacity=np.asarray(inputs.pools.capacity),
        num_chips=np.array([float(pools.num_chips)]),
        replicas=np.array([workers]),
        times=inputs.decode_costs,
    )
    answering = replace(pools.decode, replicas=pools.decode_workers)
    prediction = prediction_of(estimator, job, answering, columns, 0, not_runnable=not_runnable)
    notes.append(
        f"prefill workers do {float(pooled.prefill_use[0]):.0%} of what they can, decode workers {float(pooled.decode_use[0]):.0%}; "
        f"{float(pooled.matched_ratio[0]):.2g} prefill workers a decode worker would match"
    )
    if not prefill_fits:
        notes.append("does not fit: the weights leave no room for a prompt on a prefill worker")
    if estimator.prefill is not None:
        based = ", ".join(dict.fromkeys(rests_on(estimator.prefill).values()))
        notes.append(f"prefill workers are {estimator.prefill.cluster.chip.name}, based on {based}; memory and parts are of decode workers")
    fits = prediction.fits and prefill_fits
    plan, notes = estimator.plan(job, pools), [*prediction.notes, *notes]
    return replace(prediction, plan=plan, fits=fits, load=replace(prediction.load, fits=prediction.load.fits and fits), notes=tuple(notes))


def _check_workers(estimator: ServingEstimator, pools: Pools) -> tuple[list[str], str]:
    """Check the workers as plans; return notes, and why the engine does not run a worker.

    Experts over a whole worker may be sharded over chips that do not divide their number: some experts are then replicated.
    """
    notes, not_runnable, model = [], [], estimator.model
    for name, worker in (("prefill", pools.prefill), ("decode", pools.decode)):
        experts = model.parts.experts
        over_all = experts is not None and worker.ep == worker.chips_of_stage
        degrees = worker.degrees | ({"ep": 1, "attention_dp": 1} if over_all else {})
        if reason := check_layout(model, estimator.engine, **degrees):
            not_runnable.append(f"{name} workers: {reason}")
        if over_all and experts is not None and experts.num_experts % worker.ep:
            notes.append(f"{experts.num_experts} experts over {worker.ep} chips: some are kept twice, for an equal number on each")
    return notes, "; ".join(not_runnable)
