"""Simulated prediction of a serving plan: times over requests, their percentiles, and the requests that met their limits.

A load is simulated by default (`predict_served`). TTFT depends on the share of a closed loop in lockstep, and on the number of Poisson
arrivals in one step. The formulas are right on average only. A search ranks by formulas (`load.py`, `disaggregated.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from perfmodel.cost.serving.disaggregated import pools_inputs, predict_layout
from perfmodel.cost.serving.estimate import ServingEstimator, step_parts
from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.simulate import ROUNDS, Benchmark, run_engine, run_pools, table_of
from perfmodel.cost.serving.simulated_engine import BatchLimits
from perfmodel.cost.serving.simulated_metrics import RunRecord, SimulatedLoad, StoppingRule, summarize_runs
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.units import format_time
from perfmodel.parallel.serving_plan import Pools, ServiceLayout, ServingLayout
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.workload.serving import ServingJob

#: Least number of simulated requests of a replica; with few clients in several runs of different seeds.
_LEAST_REQUESTS = 500
#: Output tokens above which a tenth of them is more than a step or two.
_LONG_ANSWER = 32
#: Largest number of running requests or clients of a replica for which a load is simulated by default. It takes a second.
MOST_CLIENTS = 2048
#: Least number of warm-up requests at a rate.
_LEAST_WARM_UP = 100
#: A rate is simulated until TTFT and TPOT have an error of 3 % with 95 % confidence, or up to a number of requests. Loads near saturation
#: would need more.
STOPPING_RULE = StoppingRule(error=0.015, most=4000)


def predict_served(
    estimator: ServingEstimator, job: ServingJob, layout: ServiceLayout, *, distinct_experts: float = 0.0
) -> ServingPrediction:
    """Predict a plan under a load as it is printed: clients and rates are simulated, other loads use formulas."""
    prediction = predict_layout(estimator, job, layout, distinct_experts=distinct_experts)
    return with_simulation(estimator, prediction, distinct_experts=distinct_experts) if is_simulated(prediction) else prediction


def is_simulated(prediction: ServingPrediction) -> bool:
    """Return whether `predict_served` simulates this plan and load. A queue that only grows is not simulated."""
    job, layout = prediction.job, prediction.plan.layout
    if not prediction.fits or job.is_static or (job.concurrency is None and job.rate is None):
        return False
    if job.rate is not None:
        return not prediction.load.is_saturated and prediction.load.running <= MOST_CLIENTS
    return (job.concurrency or 0) <= MOST_CLIENTS * (layout.replicas if isinstance(layout, ServingLayout) else layout.decode_workers)


def with_simulation(
    estimator: ServingEstimator,
    prediction: ServingPrediction,
    *,
    limits: Mapping[str, float] = MappingProxyType({}),
    seed: int = 0,
    distinct_experts: float = 0.0,
) -> ServingPrediction:
    """Return the prediction with simulated times over requests: of the replicas, or of all workers of two pools (`simulate.py`).

    Intervals are centred on the simulated means. `goodput` counts requests that meet the limits. A saturated rate is not simulated, as its
    queue only grows. Raises InputError for a plan that does not fit, or for a batch that is not refilled.
    """
    job, plan = prediction.job, prediction.plan
    if not prediction.fits:
        raise bad_field("plan", plan.label(), "does not fit, so that no request runs", "simulate one that fits")
    if job.is_static or (job.concurrency is None and job.rate is None):
        raise bad_field("concurrency", None, "a simulation needs clients or arrivals", "give --concurrency or --rate")
    if job.rate is not None and prediction.load.is_saturated:
        note = "not simulated: the queue only grows; figures are those of the formulas"
        none = 0.0 if limits else None
        return replace(prediction, notes=(*prediction.notes, note), load=replace(prediction.load, goodput=none, kept_fraction=none))
    layout, parts = plan.layout, dict(prediction.parts)
    if isinstance(layout, Pools):
        load, copies, running_in = _pool_load(estimator, prediction, layout, limits, seed, distinct_experts), 1, layout.decode_workers
    else:
        load = simulate_replicas(estimator, prediction, layout, limits=limits, seed=seed, distinct_experts=distinct_experts)
        copies, running_in = layout.replicas, 1
        working = min(layout.replicas, job.concurrency or layout.replicas)
        times = estimator.times([layout], distinct_experts=distinct_experts)
        parts = step_parts(times, job, load.running * layout.replicas / working)
    if job.rate is not None:  # all arrivals are answered, except for random fluctuations
        answered, per_chip = prediction.requests_per_second, prediction.tokens_per_second_per_chip
    else:
        answered, per_chip = load.requests_per_second * copies, load.tokens_per_second * copies / plan.num_chips
    means = {"ttft": load.ttft.mean, "tpot": load.tpot.mean, "request_latency": load.request_latency.mean}
    done = replace(
        prediction,
        ttft=load.ttft,
        tpot=load.tpot,
        request_latency=load.request_latency,
        inter_token=load.inter_token,
        parts=parts,
        load=replace(
            prediction.load,
            running=load.running / running_in,
            queued=load.queue / running_in,
            goodput=load.kept_fraction * answered if limits else None,
            kept_fraction=load.kept_fraction if limits else None,
        ),
        tokens_per_second_per_chip=per_chip,
        requests_per_second=answered,
        intervals=_rescaled_intervals(prediction, {**means, "tokens_per_second": per_chip}),
    )
    return replace(done, notes=tuple(dict.fromkeys((*prediction.notes, *_notes(estimator, done, load)))))


def _notes(estimator: ServingEstimator, prediction: ServingPrediction, load: SimulatedLoad) -> list[str]:
    """Return notes on the time outside steps, on waves of answers of one length, and on a rate near saturation."""
    job, length, host = prediction.job, prediction.job.output_len, estimator.engine.host.request_time
    outside = f"{format_time(host)} of TTFT is network, tokenization and API server, as in published runs of {estimator.engine.name}"
    notes = [outside] if prediction.ttft.mean < 2 * host else []
    if job.rate is not None:
        error = f"near saturation waits vary widely: the mean time to the first token is known to {2 * load.ttft_error:.0%} only"
        return [*notes, error] if load.ttft_error > STOPPING_RULE.error else notes
    has_waves = length.least == length.most >= _LONG_ANSWER and prediction.load.running > 1
    if not has_waves or prediction.plan.pools is not None or estimator.engine.scheduling.has_chunks:
        return notes
    varied = f"{round(0.9 * length.mean)}:{round(1.1 * length.mean)}"
    rule = f"answers of one length end together, and {estimator.engine.name} runs prompts before any decode step"
    return [*notes, f"requests come in waves: {rule}; with --output-len {varied} the first token comes sooner"]


def _rescaled_intervals(prediction: ServingPrediction, values: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the prediction's intervals, scaled by the ratio of each new value to the old one."""
    old = {name: getattr(prediction, name).mean for name in ("ttft", "tpot", "request_latency")}
    old["tokens_per_second"] = prediction.tokens_per_second_per_chip
    scaled = {}
    for name, (low, high) in prediction.intervals.items():
        scale = values[name] / old[name] if 0 < old[name] < math.inf else math.nan
        if math.isfinite(scale):
            scaled[name] = (low * scale, high * scale)
    return scaled


def simulate_replicas(
    estimator: ServingEstimator,
    prediction: ServingPrediction,
    layout: ServingLayout,
    *,
    limits: Mapping[str, float] = MappingProxyType({}),
    seed: int = 0,
    distinct_experts: float = 0.0,
) -> SimulatedLoad:
    """Return the average over the replicas of a layout, each under its share of the load; replicas without a request are idle.

    If replicas do not divide the clients, some have one client more than others.
    """
    job = prediction.job
    costs = estimator.with_drafts(estimator.times([layout], distinct_experts=distinct_experts), [layout], job.speculation)
    tokens = job.input_len.mean + job.output_len.mean
    scheduling = estimator.scheduling([layout], job.speculation)
    scheduling = replace(scheduling, step_tokens=float(np.ravel(scheduling.step_tokens)[0]))
    requests = Requests.of_job(job)
    batch_limits = BatchLimits(
        max_sequences=(layout.max_batch or estimator.engine.scheduling.max_batch) * layout.attention_dp,
        cache_tokens=prediction.max_sequences * tokens,
        block_tokens=estimator.engine.memory.block_tokens,
        reserves_output=estimator.engine.memory.reserves_answers,
    )
    clients, more = divmod(job.concurrency or 0, layout.replicas)
    shares = [(clients + 1, more), (clients, layout.replicas - more)] if job.concurrency is not None else [(0, layout.replicas)]
    records: list[tuple[RunRecord, float]] = []
    for share, copies in shares:
        if not copies or (job.concurrency is not None and not share):
            continue
        runs = max(-(-_LEAST_REQUESTS // (ROUNDS * share)), 1) if share else 1
        rate = (job.rate or 0.0) / layout.replicas
        load = Benchmark(concurrency=share, seed=seed) if share else _at_rate(rate, prediction.load.running, seed)
        table = table_of(costs, requests, scheduling, batch_limits, load)
        for at in range(runs):
            record = run_engine(table, requests, scheduling, batch_limits, replace(load, seed=seed + at))
            records.append((record, copies / runs))
    seen = summarize_runs(records, limits)
    working = sum(copies for _, copies in records) / layout.replicas
    shared = ("running", "queue", "requests_per_second", "tokens_per_second")
    return replace(seen, **{name: getattr(seen, name) * working for name in shared})


def _at_rate(rate: float, running: float, seed: int) -> Benchmark:
    """Return a run at a rate with `running` requests in flight: at least twice that number as warm-up, and after it."""
    full = round(2 * running)
    warm_up, answered = max(_LEAST_WARM_UP, full), max(_LEAST_REQUESTS, full)
    return Benchmark(rate=rate, warm_up=warm_up, answered=answered, stopping=STOPPING_RULE, seed=seed)


def _pool_load(
    estimator: ServingEstimator,
    prediction: ServingPrediction,
    pools: Pools,
    limits: Mapping[str, float],
    seed: int,
    distinct_experts: float,
) -> SimulatedLoad:
    """Simulate two pools: clients from an idle start, as in `simulate_replicas`; a rate until the stopping rule holds."""
    job = prediction.job
    inputs = pools_inputs(estimator, job, [pools], distinct_experts=distinct_experts)
    if job.rate is None:
        clients = job.concurrency or 1
        load = Benchmark(concurrency=clients, answered=max(_LEAST_REQUESTS, ROUNDS * clients), seed=seed)
    else:
        load = _at_rate(job.rate, prediction.load.running * pools.decode_workers, seed)
    return summarize_runs([(run_pools(inputs.pools, Requests.of_job(job), load), 1)], limits)
