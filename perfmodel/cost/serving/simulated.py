"""A plan of serving as a simulation has it: percentiles over requests, and how many kept their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.pools import pools_inputs
from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.simulate import GoodputLimits, Places, SimulatedLoad, simulate
from perfmodel.cost.serving.simulate_pools import TwoPools, simulate_pools
from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.serving.prediction import ServingPrediction


def with_simulation(
    estimator: ServingEstimator, prediction: ServingPrediction, *, limits: GoodputLimits | None = None, seed: int = 0
) -> ServingPrediction:
    """The same plan and load with times over requests as engines that run step by step have them: one replica (`simulate.py`), or all
    workers of two pools (`simulate_pools.py`).

    The limits are those that `goodput` counts. Raises InputError for a plan that does not fit, or for a batch that is not refilled.
    """
    job, plan = prediction.job, prediction.plan
    if not prediction.fits:
        raise bad_field("plan", plan.label(), "does not fit, so that no request runs", "simulate one that fits")
    if job.is_static or (job.concurrency is None and job.rate is None):
        raise bad_field("concurrency", None, "a simulation needs clients or arrivals", "give --concurrency or --rate")
    limits = limits or GoodputLimits()
    apart = plan.pools is not None
    of_pools = _of_pools(estimator, prediction, limits, seed) if apart else None
    found = of_pools or simulate_replica(estimator, prediction, limits=limits, seed=seed)
    copies = 1 if apart else plan.replicas
    running_in = plan.pools.decode_workers if plan.pools is not None else 1
    return replace(
        prediction,
        ttft=found.ttft,
        tpot=found.tpot,
        inter_token=found.inter_token,
        request_latency=found.request_latency,
        running=found.running / running_in,
        queued=found.queue / running_in,
        tokens_per_second_per_chip=found.tokens_per_second * copies / plan.num_chips,
        requests_per_second=found.requests_per_second * copies,
        goodput=found.goodput * copies if limits.are_given else None,
        kept_fraction=found.kept_fraction if limits.are_given else None,
    )


def simulate_replica(
    estimator: ServingEstimator,
    prediction: ServingPrediction,
    *,
    limits: GoodputLimits | None = None,
    seed: int = 0,
    answered: int | None = None,
    warm_up: int | None = None,
) -> SimulatedLoad:
    """One replica of the plan under its share of the load; `answered` and `warm_up` requests as `simulate` has them."""
    job, plan = prediction.job, prediction.plan
    costs = estimator.with_drafts(estimator.times([plan]), [plan], job.speculation)
    tokens = job.input_len.mean + job.output_len.mean
    scheduling = estimator.scheduling([plan], job.speculation)
    return simulate(
        costs,
        Requests.of_job(job),
        replace(scheduling, step_tokens=float(np.ravel(scheduling.step_tokens)[0])),
        Places(
            max_sequences=(plan.max_batch or estimator.engine.max_batch) * plan.attention_dp,
            cache_tokens=prediction.max_sequences * tokens,
            block_tokens=estimator.engine.block_tokens,
            reserves_output=estimator.engine.reserves_answers,
        ),
        concurrency=None if job.concurrency is None else max(round(job.concurrency / plan.replicas), 1),
        rate=None if job.rate is None else job.rate / plan.replicas,
        answered=answered,
        warm_up=warm_up,
        limits=limits,
        seed=seed,
    )


def _of_pools(estimator: ServingEstimator, prediction: ServingPrediction, limits: GoodputLimits, seed: int) -> SimulatedLoad:
    job, pools = prediction.job, prediction.plan.pools
    assert pools is not None
    of = pools_inputs(estimator, job, [pools])
    return simulate_pools(
        TwoPools(
            prefill=of.prefill_times,
            decode=of.decode_times,
            scheduling=of.scheduling,
            prefill_scheduling=of.prefill_scheduling,
            workers=of.workers,
            capacity=int(of.capacity[0]),
            handover=of.handover,
        ),
        Requests.of_job(job),
        concurrency=job.concurrency,
        rate=job.rate,
        limits=limits,
        seed=seed,
    )
