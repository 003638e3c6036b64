"""A plan of serving as a simulation has it: percentiles over requests, and how many kept their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.simulate import Places, simulate
from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.serving.prediction import ServingPrediction


def with_simulation(
    estimator: ServingEstimator,
    prediction: ServingPrediction,
    *,
    ttft_limit: float = float("inf"),
    tpot_limit: float = float("inf"),
    seed: int = 0,
) -> ServingPrediction:
    """The same plan and load with times over requests as an engine that runs step by step has them (`simulate.py`), of one replica.

    The limits are those that `goodput` counts. Raises InputError for a plan that does not fit, or for a batch that is not refilled.
    """
    job, plan = prediction.job, prediction.plan
    if not prediction.fits:
        raise bad_field("plan", plan.label(), "does not fit, so that no request runs", "simulate one that fits")
    if job.is_static or (job.concurrency is None and job.rate is None):
        raise bad_field("concurrency", None, "a simulation needs clients or arrivals", "give --concurrency or --rate")
    costs = estimator.with_drafts(estimator.times([plan]), [plan], job.speculation)
    tokens = job.input_len.mean + job.output_len.mean
    scheduling = estimator.scheduling([plan], job.speculation)
    found = simulate(
        costs,
        Requests.of_job(job),
        replace(scheduling, step_tokens=float(np.ravel(scheduling.step_tokens)[0])),
        Places(
            max_sequences=(plan.max_batch or estimator.engine.max_batch) * plan.attention_dp,
            cache_tokens=prediction.max_sequences * tokens,
            block_tokens=estimator.engine.block_tokens,
        ),
        concurrency=None if job.concurrency is None else max(round(job.concurrency / plan.replicas), 1),
        rate=None if job.rate is None else job.rate / plan.replicas,
        ttft_limit=ttft_limit,
        tpot_limit=tpot_limit,
        seed=seed,
    )
    has_limits = min(ttft_limit, tpot_limit) < float("inf")
    return replace(
        prediction,
        ttft=found.ttft,
        tpot=found.tpot,
        inter_token=found.inter_token,
        request_latency=found.request_latency,
        running=found.running,
        queued=found.queue,
        tokens_per_second_per_chip=found.tokens_per_second * plan.replicas / plan.num_chips,
        requests_per_second=found.requests_per_second * plan.replicas,
        goodput=found.goodput * plan.replicas if has_limits else None,
        kept_fraction=found.kept_fraction if has_limits else None,
    )
