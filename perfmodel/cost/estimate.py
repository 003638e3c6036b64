"""Prediction of a plan: the estimator of one job on one cluster, and the breakdown of one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from perfmodel.cost.assemble import PlanColumns, StepColumns, column_of, plan_columns, step_columns
from perfmodel.cost.machine import Machine, is_machine_of
from perfmodel.cost.memory.chip import MEMORY, ActivationBytes, LiveLayers, kept_on_rank, live_layers, static_memory
from perfmodel.cost.memory.moments import ActivationTerms, At, activation_terms
from perfmodel.cost.memory.plan import (
    MemoryRow,
    RankMemory,
    RankMemoryTerms,
    adding_up,
    entries_of,
    fullest_by_class,
    memory_by_class,
    memory_row,
    most_reserved,
    rank_memory_terms,
    scalar,
)
from perfmodel.cost.program import PHASES
from perfmodel.cost.programs import Programs
from perfmodel.cost.stages import plus, rank_runs, region_sum, slowest_stage, stage_sums
from perfmodel.cost.step import (
    by_phase,
    exposed_communication,
    exposed_exchange_times,
    overlapped_exchange_times,
    pace,
    passes_of,
    recomputed_phases,
)
from perfmodel.cost.update import element_bytes, on_chip
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.memory_headroom import MemoryRule, fit_probability, memory_rule
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import ExecutionProfile, uncertainty_of_memory
from perfmodel.frameworks.releases import at_release
from perfmodel.frameworks.runnable import not_runnable_reason
from perfmodel.hardware.calibration import SCALE_OUT, SCALE_UP
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.algebra.sharding import COMM, EXCHANGED, SHOWN_COMM
from perfmodel.parallel.choices import AttentionKernel, Recompute
from perfmodel.parallel.interval import TAIL
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Conditions, Prediction
from perfmodel.workload.causal import CausalWindow
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.projection import NO_PROJECTION, projection_of
from perfmodel.workload.routing import EVEN
from perfmodel.workload.training import Method

_Value = TypeVar("_Value")

_MAX_CACHED = 4096
"""Entries of an estimator's cache of micro-batch and parameter costs, a few kB each."""


#: Fields of plans and jobs in which plans must agree for one call of `Estimator.predict_columns`.
_SHARED_BY_COLUMNS = attrgetter(
    *("layout.pp", "layout.cp", "layout.tp"),
    *(knob.name for knob in fields(Plan) if knob.name not in ("job", "num_chips", "layout")),
    *(f"job.{knob.name}" for knob in fields(TrainingJob) if knob.name not in ("global_batch", "seq_len")),
)


@dataclass(slots=True, kw_only=True, eq=False)
class Estimator:
    """Predicts plans of one job on one cluster. Estimators of equal jobs may share the compiled `programs`."""

    job: TrainingJob
    cluster: Cluster
    machine: Machine
    profile: ExecutionProfile
    programs: Programs
    _cache: dict[tuple[Any, ...], tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    def once(self, of: object, depends_on: tuple[Any, ...], make: Callable[[], _Value]) -> _Value:
        """Return the cached result of `make` for `of` and the values that it depends on. A full cache is cleared."""
        key = (id(of), *depends_on)
        entry = self._cache.get(key)
        if entry is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            entry = self._cache[key] = of, make()  # keep a reference to `of`: no other object can reuse its id
        value: _Value = entry[1]
        return value

    def for_job(self, job: TrainingJob) -> Estimator:
        """Return the estimator of a job that differs only in batch and sequence length; it shares the cached costs."""
        if job == self.job:
            return self
        other = replace(self, job=job, programs=self.programs.for_job(job))
        other._cache = self._cache if other.programs.compiled is self.programs.compiled else {}
        return other

    def on_chips(self, num_chips: int) -> Estimator | None:
        """Return the estimator on another number of chips of the cluster; None if its tiers or its machine depend on the number.

        It shares the cached costs. A cluster that was extended for its own number of chips has other tiers for fewer.
        """
        cluster = self.cluster
        is_same_network = not cluster.pools and cluster.num_chips <= num_chips <= cluster.max_chips
        if not is_same_network or not is_machine_of(cluster, num_chips, self.machine):
            return None
        other = replace(self, cluster=replace(cluster, num_chips=num_chips))
        other._cache = self._cache
        return other

    def shared_by_columns(self, plan: Plan) -> tuple[Any, ...]:
        """Return the fields in which plans must agree for one call of `predict_columns`."""
        return id(self.machine), id(self.profile), id(self.programs.compiled), *_SHARED_BY_COLUMNS(plan)

    def predict(self, plan: Plan, *, memory_headroom: float | None = None, risk: float | None = None) -> Prediction:
        """Predict the plan's step with every part named.

        memory_headroom   share of the usable memory that must stay free for a plan to fit
        risk              alternative rule: highest probability that a fitting plan runs out of memory
        """
        return self.predict_columns([plan], memory_headroom=memory_headroom, risk=risk)[0]

    def predict_columns(
        self, plans: Sequence[Plan], *, memory_headroom: float | None = None, risk: float | None = None
    ) -> list[Prediction]:
        """Predict plans that agree in `shared_by_columns`, each as a column; the programs must serve all lengths.

        Alternatively predict one plan for each machine of a cluster that has columns (`foundation.columns.as_columns`).
        """
        terms = plan_columns(self, plans)
        row = PlanRow(columns=step_columns(self, plans, terms), memory_row=evaluate_memory(self, plans[0], terms))
        machine, first, number = self.machine, plans[0], len(plans)
        counted = machine.low or machine  # the dtype of most FLOPs
        time, peak = scalar(row.columns.step_time), counted.peak_flop_rate
        flops: dict[int, tuple[float, float]] = {}  # by sequence length
        reasons: dict[int, str] = {}
        counts = []
        for plan in plans:
            if plan.job.seq_len not in flops:
                flops[plan.job.seq_len] = model_flops(self, plan)
            if id(plan) not in reasons:
                reasons[id(plan)] = not_runnable_reason(plan, self.profile)
            counts.append((plan.job.tokens_per_step, plan.num_chips, *flops[plan.job.seq_len]))
        tokens, num_chips, palm, causal = map(scalar, map(column_of, zip(*counts, strict=True)))
        scale = tokens / (time * num_chips * peak)
        columns = {
            "step_time": time,
            "tokens_per_second_per_chip": tokens / time / num_chips,
            "mfu_palm": palm * scale,
            "mfu_causal": causal * scale,
            "hfu": executed_flops(self, first, row, num_chips) / (time * num_chips * peak),
            "peak_flop_rate": peak,
            "memory_capacity": machine.memory.capacity,
        }
        parts = step_parts(self, first, row.columns, number)
        usable, held = zip(*entries_of((machine.memory.usable, host_memory(self, plans, row)), number), strict=True)
        memories = memory_fields(self, first, row.memory_row, memory_rule(memory_headroom, risk), usable)
        based, price = rests_on(machine, parts[0]), self.cluster.chip.price_per_hour
        predictions = []
        for i, values in enumerate(entries_of(columns.values(), number)):
            fields = {**dict(zip(columns, values, strict=True)), **memories[i], "rests_on": based, "not_runnable": reasons[id(plans[i])]}
            conditions = Conditions(peak_dtype=str(counted.dtype), price_per_hour=price, host_memory=held[i])
            predictions.append(Prediction(plan=plans[i], **fields, parts=parts[i], conditions=conditions))
        return predictions


def make_estimator(
    job: TrainingJob,
    cluster: Cluster,
    machine: Machine,
    profile: ExecutionProfile,
    network_at: Callable[[int], Graph] | None = None,
) -> Estimator:
    """Return the estimator of a job. The machine gets the rates of the framework, and the profile those of its release."""
    if profile.release:
        profile = at_release(profile, job, cluster.chip.name)
    machine = with_rates_of(profile, machine)
    if machine.low is not None:
        machine = replace(machine, low=with_rates_of(profile, machine.low))
    low = projection_of(job.transformer, job.train) if job.train.method is Method.GALORE else NO_PROJECTION
    programs = Programs(
        job=job,
        profile=profile,
        sizes=element_bytes(job.policy, job.optimizer, profile, low),
        any_operand_order=cluster.chip.units.any_operand_order,
        network_at=network_at,
    )
    return Estimator(job=job, cluster=cluster, machine=machine, profile=profile, programs=programs)


def with_kept_programs(estimator: Estimator) -> Estimator:
    """Return the estimator with the graphs and programs that estimators of equal jobs share."""
    programs = estimator.programs
    if programs.network_at is not None:
        return estimator  # the function may return other graphs for equal jobs
    return replace(estimator, programs=programs.kept())


@session_cache(maxsize=64)
def with_rates_of(profile: ExecutionProfile, machine: Machine) -> Machine:
    """Return the machine with the framework's matmul rates, attention kernel and algorithms of collectives, where these differ."""
    if profile.communication.flat_rings:
        machine = replace(machine, links=machine.links.flat())
    attention = profile.rates.attention_rate_fraction * machine.fused_attention.generations.get(profile.kernels.attention_kernel, 1.0)
    matmul = profile.rates.matmul_rate_fraction
    if attention != 1.0:
        rates = {name: replace(kernel, flop_rate=kernel.flop_rate * attention) for name, kernel in machine.attention.items()}
        machine = replace(machine, attention=rates)
    machine = with_long_attention(profile, machine)
    if machine.dtype is Dtype.FP8:
        matmul *= profile.rates.fp8_matmul_rate_fraction
    if matmul == 1.0:
        return machine
    peak = machine.peak_flop_rate
    plain, grouped = (
        replace(rates, flop_rate=np.minimum(rates.flop_rate * matmul, np.maximum(rates.flop_rate, peak)))
        for rates in (machine.matmul, machine.grouped_matmul.matmul)
    )
    return replace(machine, matmul=plain, grouped_matmul=replace(machine.grouped_matmul, matmul=grouped))


def with_long_attention(profile: ExecutionProfile, machine: Machine) -> Machine:
    """Return the machine with the long-sequence rates of the framework's generation of fused attention."""
    rates = machine.fused_attention.long.get(profile.kernels.attention_kernel)
    long = None if rates is None else (rates[0] * profile.rates.attention_rate_fraction, rates[1] * profile.rates.attention_rate_fraction)
    if all(kernel.long == long for kernel in machine.attention.values()):
        return machine
    return replace(machine, attention={name: replace(kernel, long=long) for name, kernel in machine.attention.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRow:
    """Evaluated plans: the terms of their steps as columns, and their memory."""

    columns: StepColumns
    memory_row: MemoryRow

    @property
    def step_time(self) -> float:
        return float(self.columns.step_time[0])


def evaluate_plan(estimator: Estimator, plan: Plan) -> PlanRow:
    """Evaluate the step and the memory of one plan."""
    columns = plan_columns(estimator, [plan])
    return PlanRow(columns=step_columns(estimator, [plan], columns), memory_row=evaluate_memory(estimator, plan, columns))


def evaluate_memory(estimator: Estimator, plan: Plan, columns: PlanColumns | None = None) -> MemoryRow:
    """Evaluate only the memory of one plan. columns: its `plan_columns`, computed if not given."""
    columns = columns or plan_columns(estimator, [plan])
    micro, tp = columns.micro, columns.grid.degree["tp"]
    make = partial(activation_terms, micro, plan.recompute, estimator.profile, tp)
    return memory_row(plan, columns, columns.once(micro, ("activations", plan.recompute), make), estimator=estimator)


def memory_fields(estimator: Estimator, plan: Plan, row: MemoryRow, rule: MemoryRule, usable: Sequence[float]) -> list[dict[str, Any]]:
    """Return the memory fields of a prediction for each column of the row, the same objects for equal numbers.

    plan     one of the plans of the row
    usable   usable memory of each column   [byte]
    """
    uncertainty, number = uncertainty_of_memory(estimator.profile), len(usable)
    low, high = uncertainty.ratio_at(TAIL), uncertainty.ratio_at(1.0 - TAIL)
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    fields = []
    for key in zip(fullest_by_class(row, number), row.needs_by_column(plan, uncertainty, number), usable, strict=True):
        if key not in known:
            (moment, total, by_class), ranks, limit = key
            # with the memory outside the allocator, and the memory that it reserves
            memory = dict(zip(MEMORY, by_class, strict=True)) | {"framework": float(ranks[0].outside)}
            reserved = total - sum(memory.values())
            memory["allocator"] = reserved if reserved > 1e-12 * total else 0.0
            known[key] = {
                "memory": {**adding_up(memory, total), "total": total},
                "memory_moment": moment,
                "memory_usable": limit,
                "memory_low": max(rank.at_least(low) for rank in ranks),
                "memory_high": max(rank.at_most(high) for rank in ranks),
                "fits_probability": fit_probability(ranks, limit, uncertainty),
                "verdict": rule.verdict(ranks, limit, uncertainty),
            }
        fields.append(known[key])
    return fields


def host_memory(estimator: Estimator, plans: Sequence[Plan], row: PlanRow) -> Column:
    """Return the bytes that offloading keeps in host memory, for the rank with most: activations, weights, optimizer state. [byte]"""
    activations, state = estimator.profile.activations, estimator.profile.state
    if not (activations.offloads_checkpoints or activations.offloads_activations or state.offloads_optimizer or state.offloads_parameters):
        return 0.0
    profile = on_chip(estimator.profile)
    sizes = element_bytes(estimator.job.policy, estimator.job.optimizer, profile, estimator.programs.sizes.optimizer.projection)
    programs = replace(estimator.programs, profile=profile, sizes=sizes)
    on_chips = replace(estimator, profile=profile, programs=programs)
    not_offloaded = evaluate_memory(on_chips, plans[0], plan_columns(on_chips, plans))

    def staying(of: MemoryRow, rank: int) -> Any:
        return scalar(sum(of.ranks[rank].static)) + scalar(of.kept[rank][At.BLOCKS][0])

    held = row.memory_row
    return scalar(slowest_stage((0.0, *(staying(not_offloaded, rank) - staying(held, rank) for rank in range(len(held.ranks))))))


def model_flops(estimator: Estimator, plan: Plan) -> tuple[float, float]:
    """Return the model FLOPs per token, forward and backward: by PaLM's convention, and with causal attention counted once. [FLOP]

    A frozen weight counts 4 FLOP of 6, because it has no weight gradient. A network counts three forward passes of one sample.
    """
    job = plan.job
    if plan.assignment is not None:
        sample = 3.0 * estimator.programs.network(plan.micro_batch).flops / plan.micro_batch
        return sample, sample
    model = job.transformer
    if not model.is_plain:
        written = estimator.programs.graph(AttentionKernel.FLASH, rank_rows=EVEN)  # FLASH counts attention scores separately
        flops = estimator.once(written, ("flops",), lambda: written.flops_by_length)
        full, causal = (sum(polynomial.at(job.seq_len, causal=causal) for polynomial in flops) for causal in (False, True))
        return 3.0 * full / job.seq_len, 3.0 * causal / job.seq_len
    # the output matrix multiplies every token, tied or not; input embeddings are lookups
    counted = estimator.once(model, (), partial(getattr, model, "num_parameters_non_embedding"))
    dense = 6.0 * (counted + model.vocab_size * model.hidden_size)
    if not job.train.is_full:
        graph = estimator.programs.graph(plan.attention, plan.dispatcher)
        frozen = estimator.once(graph, ("frozen",), lambda: graph.num_frozen_in_products)
        if frozen:
            # the model's weights are frozen; trained adapters come in addition
            dense = (dense - 2.0 * frozen) + 6.0 * graph.num_trained_parameters
    # with a sliding window, a query is multiplied with the keys of the window only
    form = model.attention
    window = CausalWindow(window=form.window, windowed_fraction=model.sliding_layer_fraction, is_chunked=bool(form.attention_chunk))
    mask = window.over(job.seq_len)
    attention = 12.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * job.seq_len
    return dense + attention * mask.visible, dense + attention * mask.fraction


def executed_flops(estimator: Estimator, plan: Plan, row: PlanRow, num_chips: Column) -> Column:
    """Return the executed FLOPs of all chips in one step of plans like `plan`, with recomputation. [FLOP]"""
    columns = row.columns.plans
    flops = passes_of(by_phase(columns.micro.flops), 0.0, columns.program, estimator.profile, plan.recompute)
    total = region_sum(tuple(flops[0] + flops[1]), columns.stages.total_sum)
    return scalar(total) * scalar(columns.num_microbatches) * (num_chips / plan.layout.pp)


#: Parts of a step in display order. They sum to the step time.
PARTS = (
    "forward",
    "backward",
    "recompute",
    *(f"{name}_communication" for name in SHOWN_COMM),
    "host",
    "pipeline_bubble",
    "pipeline_communication",
    "parameter_gather",
    "gradient_reduction",
    "gradient_accumulation",
    "optimizer",
    "weight_casts",
    "gradient_compression",
)


def step_parts(
    estimator: Estimator, plan: Plan, columns: StepColumns, number: int, runs: Sequence[float] | None = None
) -> list[dict[str, float]]:
    """Return the exposed time of each part on a pipeline rank, for each of `number` machines. [s]

    runs   number of times that the rank runs each region; None: of the critical rank
    """
    stages, regions = columns.plans.stages, columns.regions
    pass_times = [*map(scalar, plus(stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)))]
    critical = np.argmax(entries_of(pass_times, number), axis=1).tolist()
    parts: list[dict[str, float]] = [{}] * number
    steps = np.broadcast_to(scalar(columns.step_time), number).tolist()
    for slowest in set(critical):
        detail = _part_times(estimator, plan, columns, pass_times, slowest, runs)
        for i, times in enumerate(entries_of(detail.values(), number)):
            if critical[i] == slowest:
                shown = np.where(np.abs(times) < 1e-13 * steps[i], 0.0, times).tolist()
                parts[i] = adding_up(dict(zip(detail, shown, strict=True)), steps[i])
    return parts


def _part_times(
    estimator: Estimator, plan: Plan, columns: StepColumns, pass_times: list[Any], critical: int, runs: Sequence[float] | None
) -> dict[str, Any]:
    """Return the parts of a step as columns of machines. pass_times: forward and backward of a micro-batch on each rank. [s]"""
    profile = estimator.profile
    stages, regions, micro, outside = columns.plans.stages, columns.regions, columns.plans.micro, columns.outside_pipeline
    m, p = scalar(columns.plans.num_microbatches), float(plan.layout.pp)
    weights, rank_time = stages.runs[critical] if runs is None else runs, pass_times[critical]
    if runs is not None:
        passes = zip(weights, regions.forward, regions.backward, strict=True)
        rank_time = sum(times * scalar(forward + backward) for times, forward, backward in passes if times)
    detail: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
    recomputed = recomputed_phases(plan.recompute, profile)
    work_times = (micro.matmul + micro.attention) + micro.streaming
    works = work_times[:, 0].tolist() if work_times.shape[1] == 1 else list(work_times)
    sent = exposed_communication(micro, profile)
    for region, graph_region in enumerate(columns.plans.program.regions):
        if not weights[region]:
            continue
        for i, phase in enumerate(PHASES):
            segment = region * len(PHASES) + i
            times = 1.0 + (1.0 if graph_region.is_block and phase in recomputed else 0.0)
            work = works[segment]
            detail["backward" if phase == "backward" else "forward"] += work * weights[region]
            detail["recompute"] += work * (times - 1.0) * weights[region]
            for j, name in enumerate(COMM):
                time = scalar(sent[segment * len(COMM) + j])
                if name == "regather":
                    time *= 0.0 if graph_region.is_block and plan.recompute is Recompute.FULL else 1.0
                if name in ("regather", "input_gradient"):
                    name = "tensor_parallel"
                detail[f"{name}_communication"] += time * times * weights[region]
    total_f, total_b = scalar(region_sum(regions.forward, stages.total_sum)), scalar(region_sum(regions.backward, stages.total_sum))
    steady = pass_times[critical]
    if profile.timing.uneven_stage_weight != 1.0:
        steady = scalar(pace(tuple(pass_times), total_f + total_b, p, profile.timing.uneven_stage_weight))
    exchanges = None
    if profile.exchanges.hides_exchanges:
        detail[f"{EXCHANGED}_communication"] = 0.0
        exchanges = exposed_exchange_times(micro, profile, plan.recompute)
    elif micro.concurrent is not None:
        exchanges = -overlapped_exchange_times(micro, profile, plan.recompute).sum(axis=0)
    for region, graph_region in enumerate(columns.plans.program.regions):
        if exchanges is not None and graph_region.is_block and weights[region]:
            detail[f"{EXCHANGED}_communication"] += weights[region] * scalar(exchanges[region])
    device = sum(detail.values())
    detail["host"] = rank_time - device
    scale = m * steady / pass_times[critical]
    for name in detail:
        detail[name] *= scale
    sends = scalar(columns.sends)
    detail["pipeline_communication"] = sends
    detail["pipeline_bubble"] = scalar(columns.pipeline) - sends - scale * rank_time if p > 1 else 0.0
    detail["parameter_gather"] = scalar(outside.gather)
    detail["gradient_reduction"] = scalar(outside.reduction) + scalar(outside.tied)
    detail["gradient_accumulation"] = scalar(outside.accumulation)
    detail["optimizer"] = scalar(outside.optimizer)
    detail["weight_casts"] = scalar(outside.casts)
    detail["gradient_compression"] = scalar(outside.compression)
    detail[f"{EXCHANGED}_communication"] += scalar(outside.ends)
    detail["host"] += outside.constant
    if plan.assignment is not None and not plan.assignment.has_named_axes:
        # unnamed axes are neither tp nor cp: all communication between operators is one part
        moved = detail.pop("tensor_parallel_communication") + detail.pop("context_parallel_communication")
        detail = {"redistributions": moved} | detail
    if columns.plans.terms.casts is None:
        del detail["weight_casts"]
    if columns.plans.terms.compression is None:
        del detail["gradient_compression"]
    if plan.folding is None:
        del detail[f"{EXCHANGED}_communication"]
    return detail


def rank_parts(estimator: Estimator, plan: Plan, columns: StepColumns, runs: Sequence[float]) -> dict[str, float]:
    """Return the exposed time of a step on a pipeline rank, by part. The critical rank has the parts of the prediction. [s]

    runs   number of times that the rank runs each region
    """
    return step_parts(estimator, plan, columns, 1, runs)[0]


def rank_times(estimator: Estimator, plan: Plan) -> tuple[float, ...]:
    """Return the forward and backward time of one micro-batch on each pipeline rank, with activation collectives and host time. [s]"""
    regions, stages = (columns := step_columns(estimator, [plan])).regions, columns.plans.stages
    rank_times = []
    for rank in range(plan.layout.pp):
        runs = rank_runs(stages.regions, estimator.programs.stage_layers(plan), plan.layout.pp, rank, plan.schedule.placement)
        rank_times.append(sum(times * scalar(f + b) for times, f, b in zip(runs, regions.forward, regions.backward, strict=True)))
    return tuple(rank_times)


def memory_on_rank(estimator: Estimator, plan: Plan, rank: int) -> tuple[float, str, dict[str, float]]:
    """Return the memory of a pipeline rank: activations in flight at its first backward pass, the moment of its peak, bytes by class."""
    saved, holding, kept = held_on_rank(estimator, plan, rank, factor=1.0)
    return saved, *memory_by_class(holding, kept)


def reserved_on_rank(estimator: Estimator, plan: Plan, rank: int) -> tuple[float, str, dict[str, float]]:
    """Return `memory_on_rank` with the allocator's reserve and the memory outside the allocator, as in a prediction."""
    saved, holding, kept = held_on_rank(estimator, plan, rank)
    moment, values = memory_by_class(holding, kept)
    total = most_reserved(holding, kept)
    values["framework"] = scalar(holding.outside)
    values["allocator"] = max(total - sum(values.values()), 0.0)
    return saved, moment, values


def held_on_rank(
    estimator: Estimator, plan: Plan, rank: int, factor: float | None = None, *, row: MemoryRow | None = None
) -> tuple[float, RankMemoryTerms, ActivationBytes]:
    """Return the activations in flight at the first backward pass, and the memory that a pipeline rank holds. [byte]

    factor   reserved over allocated bytes of transient memory; None: the profile's
    row      `evaluate_memory` of the plan
    """
    row = row or evaluate_memory(estimator, plan)
    of, p = row.of, plan.layout.pp
    stages = of.stages
    position = stages.num_ranks - 1 if rank == p - 1 else 0 if rank == 0 else 1
    stage_layers = estimator.programs.stage_layers(plan)
    runs = rank_runs(stages.regions, stage_layers, p, rank, plan.schedule.placement)
    stages = replace(stages, runs=(*stages.runs[:position], runs, *stages.runs[position + 1 :]))
    chunks = [stage_layers[stage] for stage in plan.stages_of_rank(rank)]
    live = live_layers(schedule=plan.schedule, chunks=chunks, rank=rank, num_ranks=p, num_microbatches=plan.num_microbatches)

    def kept_of(activations: ActivationTerms, live: LiveLayers) -> ActivationBytes:
        given = activations, stages, row.pipeline, estimator.profile
        return kept_on_rank(*given, rank=position, index=float(rank), live=live, activation_bytes=of.activation_bytes)

    # the first backward pass of the last rank is that of the regions after the blocks
    at_first = replace(live, most=live.at_first, fewer_at_last=0.0)
    saved = kept_of(replace(of.activations, postponed=()), at_first)[At.BLOCKS]
    static = static_memory(of.terms, stages, of.sizes, num_replicas=of.num_replicas)
    holding = rank_memory_terms(replace(of, stages=stages, static=static, factor=of.factor if factor is None else factor), position, live)
    return scalar(saved[0]), holding, kept_of(of.activations, live)


def rank_memories(estimator: Estimator, plan: Plan, columns: PlanColumns | None = None) -> tuple[RankMemory, ...]:
    """Return the memory of the first, the fullest middle and the last pipeline rank. Without a pipeline: the only rank, three times."""
    row = evaluate_memory(estimator, plan, columns)
    figures = []
    for rank, kept, total in zip(row.ranks, row.kept, row.total, strict=True):
        _, values = memory_by_class(rank, kept)
        allocated = sum(values.values()) + estimator.profile.allocator.workspace_bytes
        figures.append(RankMemory(allocated=allocated, reserved=scalar(total - row.of.outside)))
    if plan.layout.pp == 1:
        return (max(figures, key=lambda figure: figure.reserved),) * 3
    return figures[0], max(figures[1:-1], key=lambda figure: figure.reserved), figures[-1]


def rests_on(machine: Machine, parts: Mapping[str, float]) -> dict[str, str]:
    """Return the basis of each part and of the memory: data sheet, prior, calibration or profile."""
    rests = machine.basis.parts
    inner, outer = rests.get(SCALE_UP) or rests[SCALE_OUT], rests.get(SCALE_OUT) or rests[SCALE_UP]  # a cluster may lack one kind of tier
    of = {
        "forward": rests["matmul"],
        "backward": rests["matmul"],
        "recompute": rests["matmul"],
        "tensor_parallel_communication": inner,
        "context_parallel_communication": inner,
        "redistributions": outer,
        f"{EXCHANGED}_communication": outer,
        "host": "profile",
        "pipeline_bubble": rests["matmul"],
        "pipeline_communication": outer,
        "parameter_gather": outer,
        "gradient_reduction": outer,
        "gradient_accumulation": rests["streaming"],
        "optimizer": rests["streaming"],
        "weight_casts": rests["streaming"],
        "gradient_compression": rests["streaming"],
    }
    return {name: of[name] for name in parts} | {"memory": "derived from the plan; allocator: profile; framework: calibration, profile"}
