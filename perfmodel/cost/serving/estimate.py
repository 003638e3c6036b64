"""Predicts plans of serving: one estimator for a model in its formats on a cluster under an engine, columns of plans at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.resolve import is_calibrated
from perfmodel.cost.serving.attention import CONTEXT_AXIS, cache_cuts
from perfmodel.cost.serving.load import ServedLoad, closed_loop, maximum_load, open_loop, static_batch
from perfmodel.cost.serving.memory import ServingMemory, serving_memory, weight_bytes
from perfmodel.cost.serving.program import ServingProgram, serving_program
from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.step import PARTS, StepCosts
from perfmodel.cost.serving.times import ServingTimes, SpeculativeTimes
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.engine import Engine, fitted_numbers
from perfmodel.frameworks.engine_layouts import cache_copies, check_layout, why_no_context
from perfmodel.hardware.calibration import NO_TILES, SCALE_OUT, SCALE_UP, SPEC_SHEET, Calibration
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.interval import ServingBasis, intervals_of
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.serving_plan import ServiceLayout, ServingColumns, ServingLayout, ServingPlan
from perfmodel.parallel.serving_prediction import PredictedLoad, ServingPrediction, Spread
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization, has_units
from perfmodel.workload.serving import ServingJob, Speculation

LEAST_TILE_ROWS = 64.0
"""Rows of the smallest tile of shipped calibrations."""
LEAST_MEASURED_RIDGE = 312e12 / 2.039e12
"""FLOPs per byte of the A100, data sheet: the least of the chips with measured kernels. [FLOP/byte]"""


@session_cache(maxsize=256)
def serving_machine(cluster: Cluster, calibration: Calibration, floor_fraction: float) -> Machine:
    """Return the rates of a chip under an engine, in 16 bits and, in `serving`, in each format; estimators share it.

    Decode is memory-bound and does not throttle: clocks are those of the data sheet. A replayed graph overlaps part of each kernel's floor,
    of which `floor_fraction` is exposed.
    """
    chip = cluster.chip
    calm = replace(
        with_few_rows(calibration, chip),
        sustained=replace(
            calibration.sustained,
            sustained_clock_fraction=1.0,
            clock_fractions={},
            attention_clock_fraction=1.0,
            exposed_floor_fraction=floor_fraction,
        ),
    )
    usual = Dtype.BF16 if Dtype.BF16 in chip.peak_flop_rate else Dtype.FP16
    return resolve_machine(cluster, calm, dtype=usual)


def with_few_rows(calibration: Calibration, chip: Chip) -> Calibration:
    """Return the calibration with a kernel for products of few rows, if it was measured on a chip with more FLOPs per byte.

        mu = r0 rho / rho0 for rho < rho0     rho  FLOP rate over memory bandwidth [FLOP/byte]

    Fits have tiles of at least r0 = 64 rows; still, a product of one row is memory-bound on every measured chip. On a chip with fewer FLOPs
    per byte (H20, GeForce, Apple's), a padded tile would take longer than reading the weights. Libraries avoid that (GEMV and split-k
    kernels). On such chips few rows are padded to the number that keeps the ratio of compute to memory of the measured chip with the least
    rho, the A100. Other chips are unchanged.
    """
    rate = chip.peak_flop_rate.get(Dtype.BF16) or chip.peak_flop_rate.get(Dtype.FP16) or max(chip.peak_flop_rate.values())
    share = rate / chip.memory.bandwidth / LEAST_MEASURED_RIDGE
    if share >= 1.0 or chip.name in calibration.chips:
        return calibration
    models = calibration.kernels.matmul or SPEC_SHEET.kernels.matmul
    few = {name: replace(model, few_rows=LEAST_TILE_ROWS * share) for name, model in models.items() if model.tiles != NO_TILES}
    return replace(calibration, kernels=replace(calibration.kernels, matmul={**models, **few}))


Array = NDArray[np.float64]
Layouts = Sequence[ServingLayout] | ServingColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedPlans:
    """Columns of plans under one load; values of a replica unless noted.

    capacity   sequences that a replica runs at once: limited by its memory and by the engine
    replicas   with requests: all, or the number of requests in flight if that is smaller
    """

    load: ServedLoad
    memory: ServingMemory
    capacity: Array
    num_chips: Array
    replicas: Array
    times: StepCosts

    @property
    def tokens_per_second_per_chip(self) -> Array:
        """Output tokens, over all chips. [1/s]"""
        return self.load.tokens_per_second * self.replicas / self.num_chips


@dataclass(slots=True, kw_only=True, eq=False)
class ServingEstimator:
    """Predicts plans of one model in its formats on one cluster under one engine. Raises InputError if the chip has no units for a format.

    engine          with its defaults on the chips of the cluster
    element_bytes   of activations and of unquantized weights
    prefill         the estimator of prefill workers on other chips; None: on the same
    plan_names      `cluster`, `engine` and `calibration` of its plans, where they are not the names of these

    `distinct_experts` of its methods: experts activated by the tokens of a step if all requests are one prompt; 0: by even routing
    """

    model: TransformerConfig
    cluster: Cluster
    calibration: Calibration
    engine: Engine
    quantization: Quantization
    cache: Dtype
    element_bytes: float = 2.0
    prefill: ServingEstimator | None = None
    plan_names: Mapping[str, str] = field(default_factory=dict)
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.engine.on(self.cluster.chip.name, self.cluster.chip.memory.capacity)
        chip = self.cluster.chip
        if not has_units(self.quantization, chip.peak_flop_rate):
            runs = ", ".join(name for name, other in QUANTIZATIONS.items() if has_units(other, chip.peak_flop_rate))
            rule = f"{chip.name} has no units for it ({self.quantization.needs})"
            raise bad_field("quantization", self.quantization.name, rule, f"use {runs} or another chip")
        self.machine = serving_machine(self.cluster, self.calibration, self.engine.kernels.floor_fraction)

    # --- pieces -------------------------------------------------------------------------------------------------------------------

    def times(self, plans: Layouts, *, model: TransformerConfig | None = None, distinct_experts: float = 0.0) -> StepCosts:
        """Return the step times of columns of plans; `model`: another model on the same chips, such as a draft model."""
        config, rows = model or self.model, columns_of(plans)
        degrees = {"tp": rows.tp, "pp": rows.pp, "dp_replicate": rows.attention_dp}
        degrees |= {"dp_shard": np.ones_like(rows.tp), CONTEXT_AXIS: rows.pcp}
        tiers = self.machine.tier_sizes
        grid = make_grid(degrees, [DEFAULT_ORDER], tier_sizes=tiers, num_key_value_heads=config.num_key_value_heads)
        of_tp, of_pcp = cache_cuts(config, tp=rows.tp, dcp=rows.dcp, pcp=rows.pcp)
        return StepCosts(
            decode_program=self.program(config, is_prompt=False),
            prompt_program=self.program(config, is_prompt=True),
            machine=self.machine,
            engine=self.engine,
            quantization=self.quantization,
            cache=self.cache,
            grid=grid,
            dcp=of_tp.astype(float),
            pcp=grid.degree[CONTEXT_AXIS],
            pcp_cut=of_pcp.astype(float),
            tp=grid.degree["tp"],
            pp=grid.degree["pp"],
            dp=grid.degree["dp_replicate"],
            expert_parts=rows.ep.astype(float),
            distinct_experts=distinct_experts,
        )

    def program(self, model: TransformerConfig, *, is_prompt: bool) -> ServingProgram:
        """Return the compiled step of a model under the engine, with the weights in their formats."""
        low_parts = self.quantization.parts(with_experts=model.parts.experts is not None)
        fuses, element_bytes = self.engine.kernels.fuses_kernels, self.element_bytes
        return serving_program(model, is_prompt=is_prompt, fuses=fuses, low_parts=low_parts, element_bytes=element_bytes)

    def memory(self, plans: Layouts, tokens: float, speculation: Speculation | None = None) -> ServingMemory:
        """Return the memory of the plans with `tokens` per sequence."""
        rows = columns_of(plans)
        draft: Any = 0.0
        if speculation is not None:
            drafting = self.program(self.drafting(speculation), is_prompt=False)
            draft = weight_bytes(
                drafting, self.quantization, tp=rows.tp.astype(float), pp=1.0, expert_cut=rows.chips_of_stage.astype(float)
            )
        return serving_memory(
            self.program(self.model, is_prompt=False),
            self.engine,
            self.quantization,
            self.cache,
            capacity=self.cluster.chip.memory.usable_capacity,  # engines apply their memory fraction to what cudaMemGetInfo reports
            tokens_of_sequence=tokens,
            plans=rows,
            max_tokens=self._max_tokens(rows),
            max_batch=self._max_batch(rows),
            draft_bytes=draft,
        )

    def drafting(self, speculation: Speculation) -> TransformerConfig:
        """Return the draft model: a separate model, or one layer of this model with its head."""
        if speculation.draft is not None:
            return speculation.draft
        kind = replace(self.model.main_kind, count=1, turn="")
        return self.model.having(num_hidden_layers=1, kinds=(kind,), num_mtp_layers=0)

    def with_drafts(self, costs: ServingTimes, plans: Layouts, speculation: Speculation | None) -> ServingTimes:
        """Return the times of verify and draft steps, with the engine's host time counted once; `costs` without speculation."""
        if speculation is None:
            return costs
        draft = self.times(plans, model=self.drafting(speculation))
        draft.engine = self.engine.having(step_time=0.0, sequence_time=0.0, layer_prefill_time=0.0)
        return SpeculativeTimes(target=costs, draft=draft, drafted=float(speculation.draft_tokens))

    # --- columns ------------------------------------------------------------------------------------------------------------------

    def serve(
        self, job: ServingJob, plans: Layouts, *, distinct_experts: float = 0.0, concurrency: NDArray[np.int64] | None = None
    ) -> ServedPlans:
        """Return the load of `job` on every plan; `concurrency`: clients of each plan, instead of the job's."""
        plans = columns_of(plans)
        costs = self.times(plans, distinct_experts=distinct_experts)
        times = self.with_drafts(costs, plans, job.speculation)
        scheduling = self.scheduling(plans, job.speculation)
        requests = Requests.of_job(job)
        memory = self.memory(plans, job.input_len.mean + job.output_len.mean, job.speculation)
        capacity = self.capacity(plans, memory)
        clients = job.concurrency if concurrency is None else concurrency
        replicas = plans.replicas.astype(float)
        if clients is not None:
            replicas = np.minimum(replicas, clients)  # the others are idle
        if job.is_static and clients is not None:
            load = static_batch(times, requests, scheduling, batch=clients / replicas, capacity=capacity)
        elif clients is not None:
            capacity = self.saturated_capacity(plans, memory, requests, job.speculation)
            load = closed_loop(times, requests, scheduling, concurrency=clients / replicas, capacity=capacity)
        elif job.rate is not None:
            load = open_loop(times, requests, scheduling, rate=job.rate / replicas, capacity=capacity)
        else:
            load = maximum_load(times, requests, scheduling, capacity=capacity)
        chips = plans.num_chips.astype(float)
        return ServedPlans(load=load, memory=memory, capacity=capacity, num_chips=chips, replicas=replicas, times=costs)

    def capacity(self, plans: Layouts, memory: ServingMemory) -> Array:
        """Return the sequences of a replica that run at once, limited by memory and engine. If none fits, return the engine's limit."""
        rows = columns_of(plans)
        limit = self._max_batch(rows) * rows.attention_dp
        return np.where(memory.fits, np.minimum(memory.sequences, limit), limit)

    def saturated_capacity(
        self, plans: Layouts, memory: ServingMemory, requests: Requests, speculation: Speculation | None = None
    ) -> Array:
        """Return the mean number of running sequences of a replica while more requests wait than fit.

            K = (N - I / 2) / z     of an engine that admits requests by present free cache

        N tokens of the cache, z `mean_cached` of a sequence, I / 2 the mean idle cache, as the next prompt does not fit. An engine that
        reserves cache for whole answers runs `capacity` sequences.
        """
        capacity = self.capacity(plans, memory)
        if self.engine.memory.reserves_answers:
            return capacity
        rows, held = columns_of(plans), self.memory(plans, float(requests.mean_cached), speculation)
        some = held.sequences - float(requests.prompt.mean / requests.mean_cached) / 2
        return np.where(memory.fits, np.maximum(np.minimum(some, self._max_batch(rows) * rows.attention_dp), capacity), capacity)

    def scheduling(self, plans: Layouts, speculation: Speculation | None = None) -> Scheduling:
        """Return the engine's scheduling rules; tokens of a step are those of all attention ranks."""
        rows = columns_of(plans)
        tokens = self._max_tokens(rows) * rows.attention_dp
        return Scheduling.of_engine(self.engine, step_tokens=tokens, ranks=rows.attention_dp.astype(float), speculation=speculation)

    def _max_batch(self, plans: ServingColumns) -> Array:
        return np.where(plans.max_batch > 0, plans.max_batch, self.engine.scheduling.max_batch).astype(float)

    def _max_tokens(self, plans: ServingColumns) -> Array:
        return np.where(plans.max_tokens > 0, plans.max_tokens, self.engine.scheduling.max_tokens).astype(float)

    # --- one plan -----------------------------------------------------------------------------------------------------------------

    def predict(self, job: ServingJob, layout: ServingLayout, *, distinct_experts: float = 0.0) -> ServingPrediction:
        """Predict equal replicas under one load. Raises InputError if the layout is not possible."""
        not_runnable = check_layout(self.model, self.engine, **layout.degrees)
        served = self.serve(job, [layout], distinct_experts=distinct_experts)
        return prediction_of(self, job, layout, served, 0, not_runnable=not_runnable)

    def plan(self, job: ServingJob, layout: ServiceLayout) -> ServingPlan:
        """Return the plan of a layout on this cluster under this engine."""
        names = {"cluster": self.cluster.name, "engine": self.engine.name} | dict(self.plan_names)
        return ServingPlan(job=job, layout=layout, **names)


def columns_of(plans: Layouts) -> ServingColumns:
    return plans if isinstance(plans, ServingColumns) else ServingColumns.of(plans)


def prediction_of(
    estimator: ServingEstimator, job: ServingJob, layout: ServingLayout, served: ServedPlans, at: int, *, not_runnable: str = ""
) -> ServingPrediction:
    """Return the prediction of column `at`; `not_runnable`: why the engine does not run the plan."""
    load, memory = served.load, served.memory
    full = float(job.input_len.most + job.output_len.most)
    fits = bool(_at(memory.sequences, at) * (job.input_len.mean + job.output_len.mean) >= full)
    running, working = float(load.running[at]), _at(served.replicas, at)
    parts = step_parts(served.times, job, running, at)
    wanted = 0.0 if job.concurrency is None else job.concurrency / layout.replicas
    notes = [f"not a plan for this engine: {not_runnable}"] if not_runnable else []
    if not fits:
        notes.append(_does_not_fit(memory, at))
    elif wanted > served.capacity[at]:
        notes.append(f"{_count(served.capacity[at])} of {_count(wanted)} sequences of a replica run at once; the others wait")
    if fits and job.rate is not None and load.is_saturated[at]:
        answered = _at(load.requests_per_second, at) * working
        notes.append(f"{job.rate:,.6g} requests a second come and {answered:,.3g} can be answered: the queue only grows; use more chips")
    if working < layout.replicas:
        in_flight = f"{_count(working)} {'request' if working == 1 else 'requests'} in flight"
        notes.append(
            f"{in_flight} for {layout.replicas} replicas: {_count(layout.replicas - working)} of them are idle; fewer replicas would do"
        )
    notes += _copies_notes(estimator, layout)
    cached = memory.sequence_bytes * min(running, float(served.capacity[at])) / layout.attention_dp
    if float(served.capacity[at]) > _at(memory.sequences, at):  # the engine admits requests until the cache is full
        cached = np.minimum(cached, np.maximum(memory.cache_capacity, 0.0))
    by_class = {name: _at(value, at) for name, value in memory.classes(cached).items()}
    by_class["total"] = sum(by_class.values())
    return ServingPrediction(
        plan=estimator.plan(job, layout),
        ttft=Spread(mean=_at(load.ttft, at), p99=_at(load.ttft_p99, at)),
        tpot=Spread(mean=_at(load.tpot, at), p99=_at(load.tpot_p99, at)),
        inter_token=Spread(mean=_at(load.tpot, at), p99=max(_at(load.inter_token_p99, at), _at(load.tpot, at))),
        request_latency=Spread(mean=_at(load.request_latency, at)),
        prefill_time=_at(load.prefill_time, at),
        load=PredictedLoad(
            running=running * working / layout.replicas,
            queued=_at(load.queue, at),
            fits=fits and bool(wanted <= served.capacity[at]),
            is_saturated=bool(load.is_saturated[at]),
        ),
        max_sequences=_at(memory.sequences, at),
        tokens_per_second_per_chip=float(served.tokens_per_second_per_chip[at]),
        requests_per_second=_at(load.requests_per_second, at) * working,
        memory=by_class,
        memory_usable=_at(memory.usable, at),
        parts=parts,
        rests_on=rests_on(estimator),
        fits=fits,
        not_runnable=not_runnable,
        intervals=_intervals(estimator, served, at),
        notes=tuple(notes),
    )


def step_parts(times: StepCosts, job: ServingJob, running: float, at: int = 0) -> dict[str, float]:
    """Return the parts of a decode step of `running` sequences at mean context. [s]"""
    new_tokens = 1.0 if job.speculation is None else 1.0 + job.speculation.draft_tokens
    parts = times.parts(max(running, 1.0), job.mean_context, new_tokens=new_tokens)
    return {name: _at(parts[name], at) for name in PARTS}


def _copies_notes(estimator: ServingEstimator, layout: ServingLayout) -> list[str]:
    """Return a note if chips store copies of the cache: their number, and the knobs that would reduce it."""
    model, copies = estimator.model, int(cache_copies(estimator.model, layout.tp)) * layout.pcp // layout.dcp
    if copies == 1:
        return []
    has_dcp = estimator.engine.runs.has_decode_context and not why_no_context(model)
    prefix = f"pcp {layout.pcp} of " if layout.pcp > 1 else ""
    if model.parts.latent is None:
        kept, cures = f"{prefix}tp {layout.tp} over {model.num_key_value_heads} key-value heads keeps {copies} copies of the cache", []
    else:
        kept, cures = f"the latent cache is whole on each of {copies} chips", ["attention dp"] if layout.pcp == 1 else []
    cures += ["dcp"] if has_dcp else []
    return [f"{kept}: {' or '.join(cures)} would cut {'them' if model.parts.latent is None else 'it'}" if cures else kept]


def _intervals(estimator: ServingEstimator, served: ServedPlans, at: int) -> dict[str, tuple[float, float]]:
    """Return intervals from the errors of published runs on the same basis; a user's engine has those of an unseen engine."""
    basis = ServingBasis(
        engine_known=estimator.engine.name in fitted_numbers(),
        chip_measured=is_calibrated(estimator.machine),
        has_experts=estimator.model.parts.experts is not None,
    )
    predicted = {name: _at(getattr(served.load, name), at) for name in ("ttft", "tpot", "request_latency")}
    predicted["tokens_per_second"] = float(served.tokens_per_second_per_chip[at])
    return intervals_of(basis, predicted)


def rests_on(estimator: ServingEstimator) -> dict[str, str]:
    """Return part -> source of its numbers."""
    rests = estimator.machine.basis.parts
    links = rests.get(SCALE_UP) or rests.get(SCALE_OUT) or "spec sheet"
    engine = f"engine: {estimator.engine.name}"
    of = dict.fromkeys(("products", "experts", "logits"), rests["matmul"])
    of |= {"attention": rests["attention"], "passes": rests["streaming"], "communication": links, "pipeline_sends": links}
    return of | {"host": engine, "memory": f"derived from the model and the plan; {engine}"}


def _does_not_fit(memory: ServingMemory, at: int) -> str:
    from perfmodel.foundation.units import format_bytes

    weights, usable, free = (_at(column, at) for column in (memory.weights, memory.usable, memory.cache_capacity))
    if free > 0:
        return f"does not fit: no request of full length has room in the {format_bytes(free)} that weights leave on each chip"
    engine_bytes = sum(_at(column, at) for name, column in memory.classes().items() if name != "weights")
    taken = f"weights take {format_bytes(weights)} and the engine {format_bytes(engine_bytes)}"
    return f"does not fit: {taken} of {format_bytes(usable)} usable on each chip"


def _count(value: Any) -> str:
    return f"{int(value):,}"


def _at(value: object, at: int) -> float:
    array = np.ravel(np.asarray(value, dtype=float))
    return float(array[at] if array.size > 1 else array[0])
