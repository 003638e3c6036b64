"""Plans of two pools, prefill workers and decode workers, evaluated by an estimator (`disaggregated.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.link_rates import DEFAULT_LINK_FRACTION
from perfmodel.cost.serving.disaggregated import DisaggregatedLoad, Handover, TwoPools, disaggregated
from perfmodel.cost.serving.estimate import ServedPlans, ServingEstimator, prediction_of, rests_on
from perfmodel.cost.serving.memory import ServingMemory, cache_shape
from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.step import StepCosts
from perfmodel.foundation.dtypes import itemsize
from perfmodel.frameworks.engine_layouts import check_layout
from perfmodel.parallel.serving.plan import Pools, ServiceLayout, ServingColumns
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.workload.serving import ServingJob


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
