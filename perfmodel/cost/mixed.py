"""Plans on several kinds of chips: pipeline stages on different chips, replicas of different speed.

Ranks are placed on the pools of the cluster in order. The ranks of one tp and cp group have chips of one kind. The stages of a pipeline
may be on different pools, and so may the replicas of a stage. Each stage uses the rates of its own chips and the same functions as any
plan. The slowest pipeline determines the step; communication across pools takes the slowest of their links.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from perfmodel.cost.assemble import OutsidePipelineTime, PlanColumns, StepColumns, Waits, assembled_step, parameter_time, plan_columns
from perfmodel.cost.compression import CompressionCost
from perfmodel.cost.estimate import (
    Estimator,
    PlanRow,
    evaluate_memory,
    executed_flops,
    held_on_rank,
    host_memory,
    memory_fields,
    model_flops,
    rests_on,
    step_parts,
)
from perfmodel.cost.evaluate import MicrobatchCost
from perfmodel.cost.memory.plan import MemoryRow, most_reserved, scalar
from perfmodel.cost.parameters import CastTimes, FrozenBytes
from perfmodel.cost.stages import Stages, block_rows, inner_regions, mean_block, runs_of_ranks, slowest_stage, stages_on_pools
from perfmodel.cost.step import RegionTimes, ends_time, hop_time, region_times
from perfmodel.cost.update import ParameterTerms, cast_time, compression_time, tied_time, update_times
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.memory_headroom import MemoryRule, Verdict, memory_rule
from perfmodel.frameworks.runnable import not_runnable_reason
from perfmodel.parallel.layout import rank_of_stage
from perfmodel.parallel.plan import Plan, place_of, rank_at
from perfmodel.parallel.prediction import Conditions, Prediction
from perfmodel.parallel.stage_cuts import layers_of_stages
from perfmodel.workload.job import TrainingJob


@dataclass(slots=True, kw_only=True, eq=False)
class MixedEstimator(Estimator):
    """Predicts plans on a cluster of several kinds of chips; `machine` is that of the first kind.

    pools, joined   the estimator of each kind, with its own network and with the network that joins them
    """

    pools: tuple[Estimator, ...]
    joined: tuple[Estimator, ...]

    def for_job(self, job: TrainingJob) -> MixedEstimator:
        """Return the estimator of a job that differs only in batch and sequence length."""
        pools, joined = (tuple(estimator.for_job(job) for estimator in of) for of in (self.pools, self.joined))
        return replace(self, job=job, programs=self.programs.for_job(job), pools=pools, joined=joined)

    def predict_columns(
        self, plans: Sequence[Plan], *, memory_headroom: float | None = None, risk: float | None = None
    ) -> list[Prediction]:
        """Predict each plan."""
        return [_prediction(self, plan, memory_rule(memory_headroom, risk)) for plan in plans]


def mixed_estimator(estimator: Estimator) -> MixedEstimator:
    """Return the estimator as a `MixedEstimator`; raise `TypeError` for one kind of chips."""
    if not isinstance(estimator, MixedEstimator):
        raise TypeError("the estimator is of one kind of chips")
    return estimator


def pools_of(estimator: Estimator) -> tuple[Estimator, ...]:
    """Return the estimator of each kind of chips."""
    return estimator.pools if isinstance(estimator, MixedEstimator) else (estimator,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """Replicas of the model whose stages are on the same pools.

    pools      pool of each pipeline rank
    replicas   number of replicas
    """

    pools: tuple[int, ...]
    replicas: int


def pipelines_of(plan: Plan, sizes: Sequence[int]) -> tuple[Pipelines, ...]:
    """Return the pipelines of a plan whose ranks are placed, in order, on pools of `sizes` chips."""
    pool = np.repeat(np.arange(len(sizes)), sizes).reshape([plan.layout.degree(axis) for axis in reversed(plan.order)])
    axes = [plan.order[::-1].index(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    by_rank = pool.transpose(axes).reshape(plan.layout.pp, plan.layout.data_parallel, -1)
    if (by_rank.min(axis=-1) != by_rank.max(axis=-1)).any():
        group = plan.layout.cp * plan.layout.tp
        rule = f"its ranks would lie on chips of two kinds, of which the cluster has {', '.join(map(str, sizes))}"
        raise bad_field("cp*tp", group, rule, "use smaller degrees, or another order of the axes")
    counts = Counter(tuple(column) for column in by_rank[:, :, 0].T.tolist())
    return tuple(Pipelines(pools=pools, replicas=count) for pools, count in counts.items())


def _prediction(estimator: MixedEstimator, plan: Plan, rule: MemoryRule) -> Prediction:
    """Return the step of the slowest pipeline, and the memory of the chips nearest to full."""
    mixed = _Mixed(estimator, plan)
    pipelines, row = max(
        ((candidate, mixed.step(candidate)) for candidate in mixed.pipelines), key=lambda case: float(case[1].step_time[0])
    )
    memories = [(mixed.estimators[pool], held) for pool, (_, held) in mixed.memories().items()]
    fields = [memory_fields(of_pool, plan, held, rule, [of_pool.machine.memory.usable])[0] for of_pool, held in memories]
    fullest = min(range(len(fields)), key=lambda i: (_ORDER[fields[i]["verdict"]], fields[i]["fits_probability"]))
    host, held = memories[fullest]
    # all replicas together execute the equal number of micro-batches, however these are distributed
    equal = replace(row, plans=replace(row.plans, num_microbatches=mixed.columns[0].num_microbatches))
    columns = PlanRow(columns=equal, memory_row=held)
    palm, causal = model_flops(estimator, plan)
    time = scalar(row.step_time)
    peaks = [(of_pool.machine.low or of_pool.machine).peak_flop_rate for of_pool in mixed.estimators]
    peak = float(np.average(peaks, weights=[pool.num_chips for pool in estimator.cluster.pools]))
    per_second = plan.job.tokens_per_step / time / plan.num_chips
    (parts,) = step_parts(estimator, plan, row, 1)
    machine = mixed.estimators[pipelines.pools[0]].machine
    return Prediction(
        plan=plan,
        step_time=time,
        parts=parts,
        tokens_per_second_per_chip=per_second,
        mfu_palm=palm * per_second / peak,
        mfu_causal=causal * per_second / peak,
        hfu=scalar(executed_flops(estimator, plan, columns, float(plan.num_chips))) / (time * plan.num_chips * peak),
        peak_flop_rate=peak,
        memory_capacity=host.machine.memory.capacity,
        rests_on=rests_on(machine, parts),
        not_runnable=not_runnable_reason(plan, estimator.profile),
        conditions=Conditions(
            peak_dtype=str((machine.low or machine).dtype),
            price_per_hour=estimator.cluster.mean_chip(lambda chip: chip.price_per_hour),
            host_memory=scalar(host_memory(host, [plan], columns)),
        ),
        **fields[fullest],
    )


_ORDER = {Verdict.DOES_NOT_FIT: 0, Verdict.TIGHT: 1, Verdict.FITS: 2}


class _Mixed:
    """Terms of one plan on each pool, and the steps of its pipelines.

    estimators, joined   the estimator of each pool, with its own network and with the network that joins the pools
    """

    def __init__(self, estimator: MixedEstimator, plan: Plan) -> None:
        if plan.schedule.is_simulated:
            rule = "is predicted on chips of one kind: the times of its virtual stages are those of one chip"
            raise bad_field("schedule", str(plan.schedule), rule, "use 1f1b, interleaved or zero-bubble")
        self.estimator, self.plan = estimator, plan
        self.pipelines = pipelines_of(plan, [pool.num_chips for pool in estimator.cluster.pools])
        self.estimators, self.joined = estimator.pools, estimator.joined
        self.columns = tuple(plan_columns(of_pool, [plan]) for of_pool in self.estimators)
        # if the replicas of a stage are on several pools, gradients are reduced over the network between the pools
        spread = self.joined if len(self.pipelines) > 1 else self.estimators
        self.shared = tuple(self.columns) if spread is self.estimators else tuple(plan_columns(of_pool, [plan]) for of_pool in spread)
        self.spread = spread
        self.regions: list[RegionTimes] = []
        for columns in self.columns:
            make = partial(region_times, columns.micro, estimator.profile, plan.recompute, columns.grid.degree["tp"])
            self.regions.append(columns.once(columns.micro, ("regions", plan.recompute), make))
        self.runs = runs_of_ranks(self.columns[0].stages.regions, plan.stage_layers, plan.layout.pp, plan.schedule.placement)

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline: equal numbers, or by speed if the framework distributes them so."""
        plan, equal = self.plan, self.plan.num_microbatches
        if not self.estimator.profile.timing.batches_by_speed or len(self.pipelines) == 1:
            return (equal,) * len(self.pipelines)
        if any(columns.terms.program.waits for columns in self.shared):
            rule = "needs replicas that exchange weights and gradients once a step: those with fewer microbatches would wait for ever"
            raise bad_field("setting batches_by_speed", "true", rule, f"use --zero 0 or 1, not {int(plan.zero)}")
        one, two = ([float(self.step(pipelines, m).step_time[0]) for pipelines in self.pipelines] for m in (equal, equal + 1))
        beat = [b - a for a, b in zip(one, two, strict=True)]
        counts = [0] * len(self.pipelines)
        # the next micro-batch goes to the replica that finishes it first
        heap = [(one[i] - (equal - 1) * beat[i], i, 1) for i, pipelines in enumerate(self.pipelines) for _ in range(pipelines.replicas)]
        heapq.heapify(heap)
        for _ in range(equal * plan.layout.data_parallel):
            ends, i, number = heap[0]
            counts[i] = max(counts[i], number)
            heapq.heapreplace(heap, (ends + beat[i], i, number + 1))
        return tuple(max(number, 1) for number in counts)

    def step(self, pipelines: Pipelines, num_microbatches: int | None = None) -> StepColumns:
        """Return the step of one of the pipelines."""
        plan, profile, sizes = self.plan, self.estimator.profile, self.estimator.programs.sizes
        if num_microbatches is None:
            num_microbatches = self.microbatches[self.pipelines.index(pipelines)]
        m, v = (np.array([float(value)]) for value in (num_microbatches, plan.virtual_stages))
        order = [pool for i, pool in enumerate(pipelines.pools) if i == 0 or pool != pipelines.pools[i - 1]]
        first = self.columns[order[0]]
        stages = stages_on_pools(first.program.regions, plan.stage_layers, pipelines.pools, plan.schedule.placement)
        micro = _micro_of([self.columns[pool].micro for pool in order], stages.regions)
        terms = _terms_of([self.shared[pool].terms for pool in order])
        regions = _regions_of([self.regions[pool] for pool in order])
        columns = replace(first, program=micro.program, micro=micro, stages=stages, terms=terms, num_microbatches=m)
        crossing = self.joined if len(order) > 1 else self.spread
        hop = slowest_stage([self._hop(crossing[pool], self.columns[pool]) for pool in dict.fromkeys(order)])

        on: dict[int, Stages] = {}
        for pool in dict.fromkeys(order):
            runs = [runs for runs, of_rank in zip(self.runs, pipelines.pools, strict=True) if of_rank == pool]
            on[pool] = replace(self.columns[pool].stages, runs=tuple(runs) if len(runs) > 1 else (*runs, *runs))  # at least two ranks

        def time_outside(waits: Waits) -> OutsidePipelineTime:
            gather, reduction = parameter_time(terms, regions, stages, waits, num_microbatches=m, profile=profile)
            tied, optimizer, accumulation, constants = list[Any](), list[Any](), list[Any](), list[float]()
            for pool, held in on.items():
                of, machine = self.shared[pool], self.spread[pool].machine
                tied.append(tied_time(of.terms, sizes, machine, of.grid) if of.terms.program.is_tied else 0.0)
                times = update_times(of.terms, held, sizes, machine, num_microbatches=m)
                optimizer.append(times[0])
                accumulation.append(times[1])
                constants.append(profile.timing.step_time_constant + machine.host.times.get("step", 0.0))
            return OutsidePipelineTime(
                gather=gather,
                reduction=reduction,
                tied=slowest_stage(tied),
                optimizer=slowest_stage(optimizer),
                accumulation=slowest_stage(accumulation),
                casts=cast_time(terms.casts, stages) if terms.casts is not None else 0.0,
                compression=compression_time(terms, stages, num_microbatches=m) if terms.compression is not None else 0.0,
                ends=ends_time(regions, stages) if regions.ends else 0.0,
                constant=max(constants),
            )

        return assembled_step(columns, regions, hop, time_outside, plan, profile, num_microbatches=m, virtual_stages=v)

    def _hop(self, estimator: Estimator, columns: PlanColumns) -> Any:
        seq_len, scattered = float(self.plan.job.seq_len), columns.is_scattered
        # pools of one host are joined by fewer tiers than each has by itself
        grid = columns.grid if len(estimator.cluster.tiers) == len(columns.grid.hop) else plan_columns(estimator, [self.plan]).grid
        of, tp, profile, machine = columns.micro, columns.grid.degree["tp"], estimator.profile, estimator.machine
        make = partial(hop_time, of.boundary, tp, profile, machine, grid, seq_len=seq_len, is_scattered=scattered)
        return estimator.once(of, ("hop", *columns.once.layout), make)

    def memories(self) -> dict[int, tuple[list[int], MemoryRow]]:
        """Return the pipeline ranks on each pool, and their memory."""
        ranks: dict[int, list[int]] = {}
        for pipelines in self.pipelines:
            for rank, pool in enumerate(pipelines.pools):
                if rank not in ranks.setdefault(pool, []):
                    ranks[pool].append(rank)
        memories = {}
        for pool, on in sorted(ranks.items()):
            estimator = self.estimators[pool]
            row = evaluate_memory(estimator, self.plan, self.columns[pool])
            if self.plan.layout.pp > 1:
                distinct = on if len(on) > 1 else [*on, *on]
                held = [held_on_rank(estimator, self.plan, rank, row=row) for rank in distinct]
                stages = replace(row.of.stages, runs=tuple(self.runs[rank] for rank in distinct))
                row = replace(
                    row,
                    of=replace(row.of, stages=stages, static=[holding.static for _, holding, _ in held]),
                    kept=[kept for *_, kept in held],
                    ranks=tuple(holding for _, holding, _ in held),
                    total=tuple(most_reserved(holding, kept) for _, holding, kept in held),
                )
            memories[pool] = on, row
        return memories

    def fuller_than_usable(self) -> dict[int, float]:
        """Return the pipeline ranks that exceed the usable memory of their chips, with needed over usable memory."""
        ratios: dict[int, float] = {}
        for pool, (ranks, row) in self.memories().items():
            for rank, total in zip(ranks, row.total, strict=False):
                ratio = scalar(total) / self.estimators[pool].machine.memory.usable
                if ratio > 1.0:
                    ratios[rank] = max(ratio, ratios.get(rank, 0.0))
        return ratios


def mixed_step_time(estimator: MixedEstimator, plan: Plan) -> float:
    """Return the step time of the slowest pipeline. [s]"""
    mixed = _Mixed(estimator, plan)
    return max(float(mixed.step(pipelines).step_time[0]) for pipelines in mixed.pipelines)


def memories_of_pools(estimator: Estimator, plan: Plan) -> list[tuple[Estimator, MemoryRow]]:
    """Return the memory of a plan on each kind of chips, with its estimator."""
    if not isinstance(estimator, MixedEstimator):
        return [(estimator, evaluate_memory(estimator, plan))]
    return [(estimator.pools[pool], row) for pool, (_, row) in _Mixed(estimator, plan).memories().items()]


def steps_of_pipelines(estimator: MixedEstimator, plan: Plan) -> dict[tuple[int, ...], StepColumns]:
    """Return the step of each kind of pipeline, by the pools of its ranks."""
    mixed = _Mixed(estimator, plan)
    return {pipelines.pools: mixed.step(pipelines) for pipelines in mixed.pipelines}


def pools_of_pipeline(estimator: Estimator, plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the pools of the ranks in the pipeline of a rank; chips of one kind are one pool."""
    ends, indices = np.cumsum([pool.num_chips for pool in estimator.cluster.pools]), place_of(plan, rank)
    ranks = [rank_at(plan, {**indices, "pp": stage}) for stage in range(plan.layout.pp)]
    return tuple(np.searchsorted(ends, ranks, side="right").tolist())


def placement_text(estimator: MixedEstimator, plan: Plan) -> str:
    """Return a sentence on the layers of each pipeline's stages and its micro-batches."""
    mixed = _Mixed(estimator, plan)
    names = [pool.name for pool in estimator.cluster.pools]
    held = [sum(plan.stage_layers[stage] for stage in plan.stages_of_rank(rank)) for rank in range(plan.layout.pp)]
    sentences = []
    for pipelines, number in zip(mixed.pipelines, mixed.microbatches, strict=True):
        layers = ", ".join(
            f"{'+'.join(str(layers) for layers, pool in zip(held, pipelines.pools, strict=True) if pool == on)} on {names[on]}"
            for on in dict.fromkeys(pipelines.pools)
        )
        often = f"{pipelines.replicas} replicas" if len(mixed.pipelines) > 1 else "layers of the stages"
        sentences.append(f"{often}: {layers}" + (f", {number} microbatches each" if len(mixed.pipelines) > 1 else ""))
    return "; ".join(sentences)


def balanced_plan(estimator: MixedEstimator, plan: Plan) -> Plan:
    """Return the plan with its layers distributed over the stages by the speed of their chips, as far as their memory permits."""
    p = plan.layout.pp
    if p == 1:
        return plan
    mixed = _Mixed(estimator, plan)
    stages = mixed.columns[0].stages
    layer, ends = [], []
    for pool in range(len(mixed.estimators)):
        times = mixed.regions[pool]
        both = [scalar(f + b) for f, b in zip(times.forward, times.backward, strict=True)]
        layer.append(scalar(mean_block(tuple(both), stages, stages.total)))
        ends.append((sum(both[: stages.inner.start]), sum(both[stages.inner.stop :])))

    def slowest(of: Callable[[int], float], rank: int) -> float:
        return max(of(pipelines.pools[rank]) for pipelines in mixed.pipelines)

    layer_times = [slowest(layer.__getitem__, rank) for rank in range(p)]
    end_times = [0.0] * p
    end_times[0] += slowest(lambda pool: ends[pool][0], 0)
    last = rank_of_stage(p * plan.virtual_stages - 1, p, plan.schedule.placement)
    end_times[last] += slowest(lambda pool: ends[pool][1], last)
    most = [sum(plan.stage_layers)] * p
    for _ in range(8):
        held = _layers_by_speed(sum(plan.stage_layers), layer_times, end_times, most)
        if held is None:
            return plan
        plan = replace(plan, stage_layers=layers_of_stages(held, plan.virtual_stages, plan.schedule.placement))
        over = _Mixed(estimator, plan).fuller_than_usable()
        if not over:
            break
        for rank, ratio in over.items():
            most[rank] = min(int(held[rank] / ratio), held[rank] - 1)
    return plan


def _layers_by_speed(number: int, layer_times: Sequence[float], end_times: Sequence[float], most: Sequence[int]) -> list[int] | None:
    """Return the layers of each rank that minimise the time of the slowest; None if `most` layers of all ranks are too few.

    Each layer goes to the rank whose time is then the least. For equal layers this gives the least maximum.
    """
    held = [0] * len(layer_times)
    for _ in range(number):
        free = [rank for rank in range(len(layer_times)) if held[rank] < most[rank]]
        if not free:
            return None
        rank = min(free, key=lambda rank: end_times[rank] + (held[rank] + 1) * layer_times[rank])
        held[rank] += 1
    return held


# --- terms of several pools, one after another ------------------------------------------------------------------


def _joined_fields(parts: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: tuple(chain(*(getattr(part, name) for part in parts))) for name in names}


def _micro_of(parts: Sequence[MicrobatchCost], regions: tuple[Any, ...]) -> MicrobatchCost:
    """Return the micro-batch columns that a report reads, by region."""
    names = [name for name in _ROWS if getattr(parts[0], name) is not None]
    rows: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    program = replace(parts[0].program, regions=regions, inner=inner_regions(regions), is_block=block_rows(regions))
    return replace(parts[0], program=program, **rows)


_ROWS = (
    *("matmul", "attention", "streaming", "communication", "collectives", "launches", "saved", "flops"),
    *("waits", "concurrent", "weight_gradients"),
)


def _regions_of(parts: Sequence[RegionTimes]) -> RegionTimes:
    regions = RegionTimes(**_joined_fields(parts, ("forward", "backward", "ends", "weights")))
    if not any(part.free_forward for part in parts):
        return regions
    free = _joined_fields(parts, ("window_forward", "window_backward"))
    return replace(regions, free_forward=free["window_forward"], free_backward=free["window_backward"])


def _terms_of(parts: Sequence[ParameterTerms]) -> ParameterTerms:
    joined = _joined_fields(parts, ("publish", "full", "shard", "padded", "summed"))
    for name in ("gather_forward", "gather_backward", "tp_sum", "reduce"):  # by how often they happen
        events = [getattr(part, name) for part in parts]
        joined[name] = {times: tuple(chain(*(by_times[times] for by_times in events))) for times in events[0]}
    frozen = [part.frozen for part in parts if part.frozen is not None]
    casts = [part.casts for part in parts if part.casts is not None]
    if frozen:
        joined["frozen"] = FrozenBytes(**_joined_fields(frozen, ("full", "shard", "padded")), tied=frozen[0].tied)
    compressed = [part.compression for part in parts if part.compression is not None]
    if compressed:
        joined["compression"] = CompressionCost(**_joined_fields(compressed, ("time", "kept", "copy")))
    if casts:
        joined["casts"] = CastTimes(**_joined_fields(casts, ("first", "forward", "backward", "update")))
    return replace(parts[0], **joined)
