"""Predict a plan: the estimator of one job on one cluster, and the breakdown of a single row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from perfmodel.cost.assemble import PlanColumns, StepColumns, plan_columns, step_columns
from perfmodel.cost.machine import Machine
from perfmodel.cost.memory.chip import ActivationBytes, kept_by_moment, static_memory
from perfmodel.cost.memory.moments import At, activation_terms
from perfmodel.cost.memory.offload import on_chip
from perfmodel.cost.memory.plan import (
    MemoryRow,
    RankMemory,
    RankMemoryTerms,
    adding_up,
    entries,
    fullest_by_class,
    memory_by_class,
    memory_row,
    most_reserved,
    rank_memory_terms,
    scalar,
)
from perfmodel.cost.pipeline import live_layers
from perfmodel.cost.program import PHASES
from perfmodel.cost.programs import Programs
from perfmodel.cost.stages import rank_runs, slowest_stage, stage_sums, total_pass
from perfmodel.cost.step import (
    beat_of,
    element_bytes,
    exposed_communication,
    exposed_sends,
    hidden_exchanges,
    pace,
    recomputed_phases,
    shown_communication,
    shown_exchanges,
)
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.memory_headroom import MemoryRule, fit_probability, memory_rule
from perfmodel.frameworks.memory_uncertainty import uncertainty_of_memory
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.releases import at_release
from perfmodel.hardware.calibration import SCALE_OUT, SCALE_UP
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.algebra.traffic_classes import COMM, EXCHANGED, SHOWN_COMM
from perfmodel.parallel.interval import TAIL
from perfmodel.parallel.layout import AttentionKernel, Recompute
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.projection import NO_PROJECTION, projection_of
from perfmodel.workload.routing import EVEN
from perfmodel.workload.training import Method
from perfmodel.workload.transformer import causal_mask

_Value = TypeVar("_Value")

_MOST_MADE = 4096
"""Costs of microbatches and of parameters that an estimator keeps, a few kB each."""


@dataclass(slots=True, kw_only=True, eq=False)
class Estimator:
    """Predicts plans of one job on one cluster.

    programs   compiled for the job under the profile; those of another estimator of equal jobs may be shared
    """

    job: TrainingJob
    cluster: Cluster
    machine: Machine
    profile: ExecutionProfile
    programs: Programs
    _made: dict[tuple[Any, ...], tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    def once(self, of: Any, depends_on: tuple[Any, ...], make: Callable[[], _Value]) -> _Value:
        """Cached result of `make` for `of` and the values that it depends on. The cache is cleared when it is full."""
        key = (id(of), *depends_on)
        if key not in self._made:
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            self._made[key] = of, make()  # `of` is kept, so that no other object takes its id
        value: _Value = self._made[key][1]
        return value

    def for_job(self, job: TrainingJob) -> Estimator:
        """Return the estimator of a job that differs in its batch and its sequence length alone, with the kept costs of its programs."""
        other = replace(self, job=job, programs=self.programs.for_job(job))
        other._made = self._made if other.programs.compiled is self.programs.compiled else {}
        return other

    def shared_by_columns(self, plan: Plan) -> tuple[Any, ...]:
        """Return the fields in which plans of a job agree that `predict_columns` takes together."""
        of_plan = tuple(getattr(plan, each.name) for each in fields(plan) if each.name != "job")
        of_job = tuple(getattr(plan.job, each.name) for each in fields(plan.job) if each.name != "seq_len")
        return id(self.machine), id(self.programs.compiled), *of_plan, *of_job

    def predict(self, plan: Plan, *, memory_headroom: float | None = None, risk: float | None = None) -> Prediction:
        """The plan's step, with every part named.

        memory_headroom   share of the usable memory that a plan that fits leaves free
        risk              in its place, the probability that a plan that fits does not
        """
        return self.predict_columns([plan], memory_headroom=memory_headroom, risk=risk)[0]

    def predict_columns(
        self, plans: Sequence[Plan], *, memory_headroom: float | None = None, risk: float | None = None
    ) -> list[Prediction]:
        """`predict` of plans that differ in their sequence length alone, each a column; its programs must serve all of them.

        Or of one plan for each machine of an estimator whose cluster has columns (`foundation.columns.as_columns`).
        """
        lengths = [plan.job.seq_len for plan in plans]
        row = evaluate_plan(self, plans[0], lengths if len(set(lengths)) > 1 else ())
        return _predictions(self, plans, row, memory_rule(memory_headroom, risk))


def make_estimator(
    job: TrainingJob,
    cluster: Cluster,
    machine: Machine,
    profile: ExecutionProfile,
    network_at: Callable[[int], Graph] | None = None,
) -> Estimator:
    profile = at_release(profile, job, cluster.chip.name)
    machine = with_rates_of(profile, machine)
    if machine.low is not None:
        machine = replace(machine, low=with_rates_of(profile, machine.low))
    low = projection_of(job.transformer, job.train) if job.train.method is Method.GALORE else NO_PROJECTION
    programs = Programs(
        job=job,
        profile=profile,
        sizes=element_bytes(job.policy, job.optimizer, profile, low),
        any_operand_order=cluster.chip.any_operand_order,
        network_at=network_at,
    )
    return Estimator(job=job, cluster=cluster, machine=machine, profile=profile, programs=programs)


def with_kept_programs(estimator: Estimator) -> Estimator:
    """Return the estimator with the graphs and programs that former estimators of an equal job compiled, and later ones will use."""
    programs = estimator.programs
    if programs.network_at is not None:
        return estimator  # the graphs come from a function: equal jobs may have others
    return replace(estimator, programs=programs.kept())


def with_rates_of(profile: ExecutionProfile, machine: Machine) -> Machine:
    """The machine with the framework's matrix multiplies and its generation of fused attention, where the calibration's differ."""
    attention = profile.rates.attention_rate_fraction * machine.attention_generations.get(profile.kernels.attention_kernel, 1.0)
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
    """The machine with what the framework's generation of fused attention reaches over many keys."""
    rates = machine.long_attention.get(profile.kernels.attention_kernel)
    long = None if rates is None else (rates[0] * profile.rates.attention_rate_fraction, rates[1] * profile.rates.attention_rate_fraction)
    if all(kernel.long == long for kernel in machine.attention.values()):
        return machine
    return replace(machine, attention={name: replace(kernel, long=long) for name, kernel in machine.attention.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRow:
    """One plan evaluated: the terms of its step as columns, and its memory."""

    columns: StepColumns
    memory_row: MemoryRow

    @property
    def step_time(self) -> float:
        return float(self.columns.step_time[0])


def evaluate_plan(estimator: Estimator, plan: Plan, seq_lens: Sequence[int] = ()) -> PlanRow:
    """seq_lens: as `plan_columns` has them."""
    columns = plan_columns(estimator, [plan], seq_lens)
    return PlanRow(columns=step_columns(estimator, [plan], columns), memory_row=_memory_row(estimator, plan, columns))


def evaluate_memory(estimator: Estimator, plan: Plan, columns: PlanColumns | None = None, *, seq_lens: Sequence[int] = ()) -> MemoryRow:
    """Its memory alone, as `evaluate_plan` has it; of `plan_columns`, which are made where they are not given."""
    return _memory_row(estimator, plan, columns or plan_columns(estimator, [plan], seq_lens))


def _memory_row(estimator: Estimator, plan: Plan, columns: PlanColumns) -> MemoryRow:
    micro, tp = columns.micro, columns.grid.degree["tp"]
    make = partial(activation_terms, micro, plan.recompute, estimator.profile, tp)
    return memory_row(plan, columns, columns.once(micro, ("activations", plan.recompute), make), estimator=estimator)


def _predictions(estimator: Estimator, plans: Sequence[Plan], row: PlanRow, rule: MemoryRule) -> list[Prediction]:
    machine, first, number = estimator.machine, plans[0], len(plans)
    counted = machine.low or machine  # what most FLOP are computed in
    time, peak = scalar(row.columns.step_time), counted.peak_flop_rate
    tokens = _column_of(plan.job.tokens_per_step for plan in plans)
    by_length = {plan.job.seq_len: plan for plan in plans}
    flops = {length: model_flops(estimator, plan) for length, plan in by_length.items()}
    reasons = {length: estimator.profile.not_runnable_reason(plan) for length, plan in by_length.items()}
    palm, causal = (_column_of(values) for values in zip(*(flops[plan.job.seq_len] for plan in plans), strict=True))
    scale = tokens / (time * first.num_chips * peak)
    parts = step_parts(estimator, first, row.columns, number)
    capacities, usable = entries(machine.memory_capacity, number), entries(machine.memory_usable, number)
    # what is the same in all columns, and what is not
    shared: dict[str, Any] = {
        "peak_dtype": str(counted.dtype),
        "rests_on": rests_on(machine, parts[0]),
        "price_per_hour": estimator.cluster.chip.price_per_hour,
    }
    columns = {
        "step_time": time,
        "tokens_per_second_per_chip": tokens / time / first.num_chips,
        "mfu_palm": palm * scale,
        "mfu_causal": causal * scale,
        "hfu": executed_flops(estimator, first, row) / (time * first.num_chips * peak),
        "peak_flop_rate": peak,
        "host_memory": host_memory(estimator, first, row),
    }
    values = zip(*(entries(each, number) for each in columns.values()), strict=True)
    held = zip(*(entries(each, number) for each in (row.memory_row.of.outside, *row.memory_row.total)), strict=True)
    memories: dict[tuple[float, ...], dict[str, Any]] = {}
    found = []
    for i, (plan, value, key) in enumerate(zip(plans, values, held, strict=True)):
        key = (*key, usable[i], plan.job.seq_len)
        if key not in memories:
            memories[key] = memory_fields(estimator, plan, row.memory_row, rule, usable[i], i)
        named = dict(zip(columns, value, strict=True))
        fields = {**shared, **named, **memories[key], "not_runnable": reasons[plan.job.seq_len]}
        found.append(Prediction(plan=plan, **fields, parts=parts[i], memory_capacity=capacities[i]))
    return found


def _column_of(values: Iterable[float]) -> Column:
    """A number where all values are the same."""
    found = [float(value) for value in values]
    return found[0] if all(value == found[0] for value in found) else np.array(found)


def memory_fields(estimator: Estimator, plan: Plan, row: MemoryRow, rule: MemoryRule, usable: float, column: int = 0) -> dict[str, Any]:
    """The fields of a prediction that follow from the memory of the plan, one of the columns, and what is usable."""
    memory, _, moment = fullest_by_class(row, column)
    uncertainty = uncertainty_of_memory(estimator.profile)
    ranks = row.needs(plan, uncertainty, column)
    return {
        "memory": memory,
        "memory_moment": moment,
        "memory_usable": usable,
        "memory_low": max(rank.at_least(uncertainty.ratio_at(TAIL)) for rank in ranks),
        "memory_high": max(rank.at_most(uncertainty.ratio_at(1.0 - TAIL)) for rank in ranks),
        "fits_probability": fit_probability(ranks, usable, uncertainty),
        "verdict": rule.verdict(ranks, usable, uncertainty),
    }


def host_memory(estimator: Estimator, plan: Plan, row: PlanRow) -> Column:
    """Bytes that the fullest chip would hold itself if nothing lay in the host's memory: what is kept, weights and optimizer states."""
    profile = on_chip(estimator.profile)
    if profile == estimator.profile:
        return 0.0
    sizes = element_bytes(estimator.job.policy, estimator.job.optimizer, profile, estimator.programs.sizes.projection)
    programs = replace(estimator.programs, profile=profile, sizes=sizes)
    alone = evaluate_memory(replace(estimator, profile=profile, programs=programs), plan, seq_lens=row.columns.plans.seq_lens)

    def staying(of: MemoryRow, rank: int) -> Any:
        return scalar(sum(of.ranks[rank].static)) + scalar(of.kept[rank][At.BLOCKS][0])

    held = row.memory_row
    return scalar(slowest_stage((0.0, *(staying(alone, rank) - staying(held, rank) for rank in range(len(held.ranks))))))


def model_flops(estimator: Estimator, plan: Plan) -> tuple[float, float]:
    """FLOP of the model for one token, forward and backward: as PaLM counts them, and with causal attention counted once. [FLOP]

    A frozen weight has 4 of 6, for no gradient of it is made. A network's are three times those of a forward pass, of one sample.
    """
    job = plan.job
    if plan.assignment is not None:
        sample = 3.0 * estimator.programs.network(plan.micro_batch).flops / plan.micro_batch
        return sample, sample
    model = job.transformer
    if not model.is_plain:
        written = estimator.programs.graph(AttentionKernel.FLASH, rank_rows=EVEN)  # whose scores are told apart
        flops = estimator.once(written, ("flops",), lambda: written.flops_by_length)
        whole, causal = (sum(each.at(job.seq_len, causal=causal) for each in flops) for causal in (False, True))
        return 3.0 * whole / job.seq_len, 3.0 * causal / job.seq_len
    # the output matrix multiplies every token, tied or not; the tables at the input are looked up
    counted = estimator.once(model, (), lambda: model.num_parameters_non_embedding)
    dense = 6.0 * (counted + model.vocab_size * model.hidden_size)
    graph = estimator.programs.graph(plan.attention, plan.dispatcher)
    frozen = estimator.once(graph, ("frozen",), lambda: graph.num_frozen_in_products)
    if frozen:
        # the model's are frozen, what is trained comes beside them
        dense = (dense - 2.0 * frozen) + 6.0 * graph.num_trained_parameters
    # a query of a layer with a window is multiplied with no more keys than that
    mask = causal_mask(model, job.seq_len)
    attention = 12.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * job.seq_len
    return dense + attention * mask.visible, dense + attention * mask.fraction


def executed_flops(estimator: Estimator, plan: Plan, row: PlanRow) -> Column:
    """FLOP of all chips in one step, with what is recomputed."""
    executed = row.columns.plans.micro.flops
    flops: list[Any] = executed[:, 0].tolist() if executed.shape[1] == 1 else list(executed)
    total: Column = 0.0
    for region, it in enumerate(row.columns.plans.program.regions):
        by_phase = {phase: flops[region * len(PHASES) + i] for i, phase in enumerate(PHASES)}
        once = sum(by_phase.values())
        if it.is_block:
            once += sum(by_phase[phase] for phase in recomputed_phases(plan.recompute, estimator.profile))
        total += once * scalar(row.columns.plans.stages.total[region])
    layout = plan.layout
    ranks = plan.assignment.num_chips if plan.assignment is not None else layout.data_parallel * layout.cp * layout.tp
    return total * plan.num_microbatches * ranks


#: Parts of a step, in the order in which they are shown. They add up to the step time.
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
)


def step_parts(estimator: Estimator, plan: Plan, columns: StepColumns, number: int, rank: int | None = None) -> list[dict[str, float]]:
    """Exposed seconds on a pipeline rank of each of so many machines; None: the critical one."""
    stages, regions = columns.plans.stages, columns.regions
    both = [scalar(f + b) for f, b in zip(stage_sums(regions.forward, stages), stage_sums(regions.backward, stages), strict=True)]
    critical = [each.index(max(each)) for each in zip(*(entries(times, number) for times in both), strict=True)]
    found: list[dict[str, float]] = [{}] * number
    steps = entries(scalar(columns.step_time), number)
    for place in set(critical):
        detail = _exposed(estimator, plan, columns, both, place, rank)
        values = zip(*(entries(times, number) for times in detail.values()), strict=True)
        for i, times in enumerate(values):
            if critical[i] == place:
                shown = {name: 0.0 if abs(time) < 1e-13 * steps[i] else time for name, time in zip(detail, times, strict=True)}
                found[i] = adding_up(shown, steps[i])
    return found


def _exposed(estimator: Estimator, plan: Plan, columns: StepColumns, both: list[Any], critical: int, rank: int | None) -> dict[str, Any]:
    """Parts of a step whose critical rank is `critical`, by machine. both: forward and backward of a microbatch on each rank. [s]"""
    profile = estimator.profile
    stages, regions, micro, beside = columns.plans.stages, columns.regions, columns.plans.micro, columns.beside
    m, p = float(plan.num_microbatches), float(plan.layout.pp)
    weights, own = stages.runs[critical], both[critical]
    if rank is not None:
        weights = rank_runs(stages.regions, estimator.programs.stage_layers(plan), plan.layout.pp, rank)
        passes = zip(weights, regions.forward, regions.backward, strict=True)
        own = sum(runs * scalar(forward + backward) for runs, forward, backward in passes if runs)
    detail: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
    again = recomputed_phases(plan.recompute, profile)
    work_times = (micro.matmul + micro.attention) + micro.streaming
    works = work_times[:, 0].tolist() if work_times.shape[1] == 1 else list(work_times)
    shown = [exposed_communication(profile, name) for name in COMM]
    for region, it in enumerate(columns.plans.program.regions):
        if not weights[region]:
            continue
        for i, phase in enumerate(PHASES):
            segment = region * len(PHASES) + i
            times = 1.0 + (1.0 if it.is_block and phase in again else 0.0)
            work = works[segment]
            detail["backward" if phase == "backward" else "forward"] += work * weights[region]
            detail["recompute"] += work * (times - 1.0) * weights[region]
            for j, name in enumerate(COMM):
                time = scalar(shown_communication(micro, profile, segment, j)) * shown[j]
                if name == "regather":
                    time *= 0.0 if it.is_block and plan.recompute is Recompute.FULL else 1.0
                if name in ("regather", "input_gradient"):
                    name = "tensor_parallel"
                detail[f"{name}_communication"] += time * times * weights[region]
    total_f, total_b = scalar(total_pass(regions.forward, stages)), scalar(total_pass(regions.backward, stages))
    steady = both[critical]
    if profile.timing.uneven_stage_weight != 1.0:
        steady = scalar(pace(tuple(both), total_f + total_b, p, profile.timing.uneven_stage_weight))
    if profile.communication.hides_exchanges:
        detail[f"{EXCHANGED}_communication"] = sum(
            weights[region] * scalar(shown_exchanges(micro, profile, plan.recompute, region))
            for region, it in enumerate(columns.plans.program.regions)
            if it.is_block and weights[region]
        )
    elif columns.plans.micro.beside is not None:
        detail[f"{EXCHANGED}_communication"] -= sum(
            weights[region] * scalar(sum(hidden_exchanges(micro, profile, plan.recompute, region)))
            for region, it in enumerate(columns.plans.program.regions)
            if it.is_block and weights[region]
        )
    device = sum(detail.values())
    detail["host"] = own - device
    scale = m * steady / both[critical]
    for name in detail:
        detail[name] *= scale
    virtual = float(plan.virtual_stages)
    sends = scalar(
        exposed_sends(
            columns.hop,
            beat_of(regions, stages, schedule=plan.schedule, num_ranks=p, profile=profile) / virtual,
            schedule=plan.schedule,
            num_ranks=p,
            num_microbatches=m,
            virtual_stages=virtual,
            profile=profile,
        )
    )
    sends -= scalar(columns.hidden_sends)
    detail["pipeline_communication"] = sends
    detail["pipeline_bubble"] = scalar(columns.pipeline) - sends - scale * own if p > 1 else 0.0
    detail["parameter_gather"] = scalar(beside.gather)
    detail["gradient_reduction"] = scalar(beside.reduction) + scalar(beside.tied)
    detail["gradient_accumulation"] = scalar(beside.accumulation)
    detail["optimizer"] = scalar(beside.optimizer)
    detail["weight_casts"] = scalar(beside.casts)
    detail[f"{EXCHANGED}_communication"] += scalar(beside.ends)
    detail["host"] += beside.constant
    if plan.assignment is not None and not plan.assignment.has_named_axes:
        # axes of no name are neither: all that operators send to each other
        moved = detail.pop("tensor_parallel_communication") + detail.pop("context_parallel_communication")
        detail = {"redistributions": moved} | detail
    if columns.plans.terms.casts is None:
        del detail["weight_casts"]
    if plan.folding is None:
        del detail[f"{EXCHANGED}_communication"]
    return detail


def rank_parts(estimator: Estimator, plan: Plan, columns: StepColumns, rank: int) -> dict[str, float]:
    """Exposed seconds of a step on a pipeline rank, by part; the critical rank has those of the prediction. [s]"""
    return step_parts(estimator, plan, columns, 1, rank)[0]


def rank_times(estimator: Estimator, plan: Plan) -> tuple[float, ...]:
    """Forward and backward of one microbatch on each pipeline rank, with collectives of activations and the host's floor. [s]"""
    regions, stages = (columns := step_columns(estimator, [plan])).regions, columns.plans.stages
    found = []
    for rank in range(plan.layout.pp):
        runs = rank_runs(stages.regions, estimator.programs.stage_layers(plan), plan.layout.pp, rank)
        found.append(sum(times * scalar(f + b) for times, f, b in zip(runs, regions.forward, regions.backward, strict=True)))
    return tuple(found)


def memory_on_rank(estimator: Estimator, plan: Plan, rank: int) -> tuple[float, str, dict[str, float]]:
    """Memory of a pipeline rank: activations in flight when its first backward begins, the moment of its peak, and the bytes by class."""
    saved, holding, kept = held_on_rank(estimator, plan, rank, factor=1.0)
    return saved, *memory_by_class(holding, kept)


def reserved_on_rank(estimator: Estimator, plan: Plan, rank: int) -> tuple[float, str, dict[str, float]]:
    """`memory_on_rank` with what the allocator holds beyond its tensors and what lies outside of it, as a prediction has them."""
    saved, holding, kept = held_on_rank(estimator, plan, rank)
    moment, values = memory_by_class(holding, kept)
    total = most_reserved(holding, kept)
    values["framework"] = scalar(holding.outside)
    values["allocator"] = max(total - sum(values.values()), 0.0)
    return saved, moment, values


def held_on_rank(
    estimator: Estimator, plan: Plan, rank: int, factor: float | None = None, *, found: MemoryRow | None = None
) -> tuple[float, RankMemoryTerms, ActivationBytes]:
    """Activations in flight when the first backward pass begins, and what a pipeline rank holds. [byte]

    factor   what the allocator holds over what comes and goes; None: the profile's
    found    `evaluate_memory` of the plan
    """
    found = found or evaluate_memory(estimator, plan)
    of, p = found.of, plan.layout.pp
    stages = of.stages
    place = stages.num_ranks - 1 if rank == p - 1 else 0 if rank == 0 else 1
    stage_layers = estimator.programs.stage_layers(plan)
    runs = rank_runs(stages.regions, stage_layers, p, rank)
    stages = replace(stages, runs=(*stages.runs[:place], runs, *stages.runs[place + 1 :]))
    live = live_layers(schedule=plan.schedule, chunks=stage_layers[rank::p], rank=rank, num_ranks=p, num_microbatches=plan.num_microbatches)
    kept_of = partial(
        kept_by_moment,
        of.activations,
        stages,
        found.pipelining,
        estimator.profile,
        rank=place,
        index=float(rank),
        activation_bytes=of.activation_bytes,
    )
    # the last rank's first backward pass is that of what follows the blocks
    saved = kept_of(live=replace(live, most=live.at_first, fewer_at_last=0.0))[At.BLOCKS]
    static = static_memory(of.terms, stages, of.sizes, num_replicas=of.num_replicas)
    holding = rank_memory_terms(replace(of, stages=stages, static=static, factor=of.factor if factor is None else factor), place, live)
    return scalar(saved[0]), holding, kept_of(live=live)


def rank_memories(estimator: Estimator, plan: Plan, columns: PlanColumns | None = None) -> tuple[RankMemory, ...]:
    """The first, the fullest middle and the last pipeline rank; without a pipeline the one there is, three times."""
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
    rests = machine.rests_on
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
    }
    return {name: of[name] for name in parts} | {"memory": "derived from the plan; allocator: profile; framework: calibration, profile"}
