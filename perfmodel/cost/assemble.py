"""Assembly of a step from its terms: pipeline, exposed parameter collectives and sends, optimizer and host constant.

    step = pipeline - sends overlapped with parameter collectives + terms outside the pipeline

A prediction and a fit assemble whole columns of plans (`step_columns`). A search tabulates most terms and adds them with the same
functions in the same order. Each row of a search therefore equals the single prediction to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assigned import assigned_grid, is_scattered
from perfmodel.cost.evaluate import MicrobatchCost, microbatch_cost, microbatch_depends_on
from perfmodel.cost.parameters import parameter_cost, parameters_depend_on
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.program import Program
from perfmodel.cost.repeated_gathers import repeated_gather_time
from perfmodel.cost.stages import Ranks, Stages, neighbour, plus, region_sum, slowest_stage, stage_columns, stage_sums, stages_of
from perfmodel.cost.step import RegionTimes, beat_with, ends_time, exposed_sends, hop_time, pipeline_step_time, region_times
from perfmodel.cost.update import ParameterTerms, cast_time, compression_time, parameter_terms, tied_time, update_times
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.cluster_text import check_equal_chips
from perfmodel.parallel.grid import LayoutGrid, make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.schedule_table import AnySchedule

if TYPE_CHECKING:
    from perfmodel.cost.estimate import Estimator

_Value = TypeVar("_Value")

_DEGREES = attrgetter(*(f"layout.{axis}" for axis in DEFAULT_ORDER))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutsidePipelineTime:
    """Time of a step outside its pipeline, independent of the schedule. [s]"""

    gather: Column
    reduction: Column
    tied: Column
    optimizer: Column
    accumulation: Column
    casts: Column
    compression: Column
    ends: Column
    constant: float

    @property
    def total(self) -> Any:
        """Sum in a fixed order, so that a search can add the terms once for all schedules."""
        updates = (((self.gather + self.reduction) + self.tied) + self.optimizer) + self.accumulation + self.casts + self.compression
        return updates + self.ends + self.constant


def outside_pipeline(
    estimator: Estimator,
    terms: ParameterTerms,
    tied: Column,
    regions: RegionTimes,
    stages: Stages,
    waits: Waits,
    *,
    num_microbatches: Column,
) -> OutsidePipelineTime:
    """Return exposed parameter collectives, optimizer, accumulation, casts, compression, unpaired exchanges and the host constant."""
    profile, machine, m = estimator.profile, estimator.machine, num_microbatches
    gather, reduction = parameter_time(terms, regions, stages, waits, num_microbatches=m, profile=profile)
    optimizer, accumulation = update_times(terms, stages, estimator.programs.sizes, machine, num_microbatches=m)
    return OutsidePipelineTime(
        gather=gather,
        reduction=reduction,
        tied=0.0 if stages.is_folded else tied,
        optimizer=optimizer,
        accumulation=accumulation,
        casts=cast_time(terms.casts, stages) if terms.casts is not None else 0.0,
        compression=compression_time(terms, stages, num_microbatches=m) if terms.compression is not None else 0.0,
        ends=ends_time(regions, stages) if regions.ends else 0.0,
        constant=profile.timing.step_time_constant + machine.host.times.get("step", 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanColumns:
    """Common terms of the step time and the memory of plans, one entry a plan; one entry in all if the plans agree in a term.

    stage_layers   blocks of the first plan's virtual stages
    is_scattered   whether stage boundaries are sharded over tp
    """

    program: Program
    grid: LayoutGrid
    num_microbatches: Column
    micro: MicrobatchCost
    stages: Stages
    stage_layers: tuple[int, ...]
    is_scattered: bool
    terms: ParameterTerms
    once: _Once

    def of(self, estimator: Estimator) -> PlanColumns:
        """Return the same columns for another estimator with these programs and this machine."""
        return replace(self, once=replace(self.once, estimator=estimator))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """Plans evaluated together: every term of a step that a report may show, one entry a plan.

    pipeline   without the sends that overlap with parameter collectives
    sends      exposed sends of the pipeline
    """

    plans: PlanColumns
    regions: RegionTimes
    hop: Column
    sends: Column
    pipeline: Column
    outside_pipeline: OutsidePipelineTime
    step_time: Any


def plan_columns(estimator: Estimator, plans: Sequence[Plan]) -> PlanColumns:
    """Return the columns of plans that differ only in degrees, micro-batch, stages, global batch and sequence length.

    They share rules, attention, recomputation, ZeRO stage, schedule, order, and whether they are pipelined. The estimator's programs must
    serve all lengths.
    """
    profile, machine, first = estimator.profile, estimator.machine, plans[0]
    if estimator.cluster.pools:
        check_equal_chips(estimator.cluster)
    program = estimator.programs.program_of(first)
    rows = plans
    if len(plans) > 1:
        # the fields that determine a plan's row of the grid and its stages
        forms = {(plan.layout, plan.micro_batch, plan.virtual_stages, plan.stage_layers, plan.ep, plan.etp) for plan in plans}
        rows = [first] if len(forms) == 1 else plans
    grid, stage_layers = _placed(estimator, rows)
    sizes, lengths = column_of(map(attrgetter("micro_batch"), rows)), column_of(map(attrgetter("job.seq_len"), plans))
    once = _Once(estimator=estimator, is_single=first.assignment is not None or grid.num_rows * len(lengths) == 1)
    if once.is_single and first.assignment is None:  # the program of an assignment belongs to one mesh
        microbatch, layout = np.concatenate(microbatch_depends_on(grid, profile)), np.concatenate(parameters_depend_on(grid))
        once = replace(once, microbatch=tuple(microbatch.tolist()), layout=tuple(layout.tolist()))
    parameters = estimator.programs.parameter_program(
        program, first.assignment or first.rules, int(first.zero), pipelined=first.layout.pp > 1
    )
    of_rows = grid
    if grid.num_rows > 1 and all((column == column[0]).all() for column in microbatch_depends_on(grid, profile)):
        of_rows, _ = _placed(estimator, [first])  # a micro-batch costs the same for all rows
    make_micro = partial(microbatch_cost, program, machine, of_rows, sizes, lengths)
    cost = once(parameters, once.layout, partial(parameter_cost, parameters, profile, machine, grid))
    stages = [
        stages_of(program.regions, blocks, plan.layout.pp, first.schedule.placement, first.schedule.is_simulated)
        for plan, blocks in zip(rows, stage_layers, strict=True)
    ]
    return PlanColumns(
        program=program,
        grid=grid,
        num_microbatches=column_of(map(attrgetter("num_microbatches"), plans)),
        micro=once(program, (*once.microbatch, first.micro_batch, *lengths), make_micro),
        stages=stages[0] if len(stages) == 1 else stage_columns(stages),
        stage_layers=stage_layers[0],
        is_scattered=first.rules.scatters_residual if first.assignment is None else is_scattered(program),
        terms=once(cost, (), partial(parameter_terms, parameters, cost)),
        once=once,
    )


def _placed(estimator: Estimator, plans: Sequence[Plan]) -> tuple[LayoutGrid, list[tuple[int, ...]]]:
    """Return the plans' axes placed on the network tiers, and the blocks of each plan's virtual stages."""
    first, tiers = plans[0], estimator.machine.tier_sizes
    if first.assignment is not None:
        return assigned_grid(first.assignment, first.layout.pp, tiers), [estimator.programs.stage_layers(first)]

    make = partial(
        make_grid,
        dict(zip(DEFAULT_ORDER, np.array([*map(_DEGREES, plans)]).T, strict=True)),
        [first.order],
        tier_sizes=tiers,
        num_key_value_heads=first.job.transformer.num_key_value_heads,
        folding=[*map(attrgetter("folding"), plans)],
    )
    # a single plan's layout is placed once, whatever its batch or micro-batch
    grid = estimator.once(estimator.machine, (first.layout, first.order, first.folding), make) if len(plans) == 1 else make()
    return grid, [*map(attrgetter("stage_layers"), plans)]


def step_columns(estimator: Estimator, plans: Sequence[Plan], columns: PlanColumns | None = None) -> StepColumns:
    """Return the steps of plans that share `plan_columns`, which are computed if not given."""
    profile, machine, sizes, first = estimator.profile, estimator.machine, estimator.programs.sizes, plans[0]
    columns = columns or plan_columns(estimator, plans)
    grid, micro, stages, terms, once = columns.grid, columns.micro, columns.stages, columns.terms, columns.once
    tp = grid.degree["tp"]
    m, v = columns.num_microbatches, column_of(map(attrgetter("virtual_stages"), plans))
    regions = once(micro, ("regions", first.recompute), partial(region_times, micro, profile, first.recompute, tp))
    seq_len = column_of(map(attrgetter("job.seq_len"), plans))
    hop = once(
        micro,
        ("hop", *once.layout),
        partial(hop_time, micro.boundary, tp, profile, machine, grid, seq_len=seq_len, is_scattered=columns.is_scattered),
    )
    tied = once(terms, (), partial(tied_time, terms, sizes, machine, grid)) if terms.program.is_tied else 0.0
    time_outside = partial(outside_pipeline, estimator, terms, tied, regions, stages, num_microbatches=m)
    return assembled_step(columns, regions, hop, time_outside, first, profile, num_microbatches=m, virtual_stages=v)


def assembled_step(
    columns: PlanColumns,
    regions: RegionTimes,
    hop: Column,
    time_outside: Callable[[Waits], OutsidePipelineTime],
    first: Plan,
    profile: ExecutionProfile,
    *,
    num_microbatches: Column,
    virtual_stages: Column,
) -> StepColumns:
    """Return the step of plans like `first`. time_outside: time outside the pipeline, given the waits for gathers and reductions."""
    stages, terms, p = columns.stages, columns.terms, columns.grid.degree["pp"]
    schedule = first.schedule
    shape = Pipeline(schedule=schedule, num_ranks=p, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    times = pipeline_step_time(regions, stages, shape, hop=hop, profile=profile)
    pipeline, sends, waits = times.time, times.sends, Waits()
    if terms.program.waits:
        waits = exposed_each_microbatch(terms, regions, stages, schedule=schedule, num_ranks=p, profile=profile)
        if first.layout.pp > 1:
            overlapped = overlapped_send_time(waits.total, times.beat, shape, hop=hop, profile=profile)
            pipeline, sends = pipeline - overlapped, sends - overlapped
    if first.layout.pp > 1 and terms.program.keeps_gathered:
        waits = replace(waits, gathered_again=repeated_gather_time(terms, regions, stages, shape, profile))
    outside = time_outside(waits)
    return StepColumns(
        plans=columns,
        regions=regions,
        hop=hop,
        sends=sends,
        pipeline=pipeline,
        outside_pipeline=outside,
        step_time=pipeline + outside.total,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Once:
    """Cache of terms of one plan, keyed by the values that they depend on. Terms of several plans or lengths are always recomputed.

    microbatch, layout   columns that the cost of a micro-batch, and of parameters, depends on
    """

    estimator: Estimator
    is_single: bool
    microbatch: tuple[float, ...] = ()
    layout: tuple[float, ...] = ()

    def __call__(self, of: object, depends_on: tuple[Any, ...], make: Callable[[], _Value]) -> _Value:
        return self.estimator.once(of, depends_on, make) if self.is_single else make()


def column_of(values: Iterable[float]) -> NDArray[np.float64]:
    """Return the values as an array, or one entry if all are equal."""
    column = np.fromiter(values, dtype=np.float64)
    return column[:1] if (column == column[0]).all() else column


# --- exposed parameter collectives and sends -------------------------------------------------------------------------------
#
# The overlap window of a collective is the full time of a pass, host time and waits included. Other collectives that overlap with the pass
# are subtracted from it, and so is the time in which operators' own collectives occupy the inter-node links. A link therefore carries one
# collective at a time, and faster hardware is never slower (`tests/laws/test_faster_is_never_slower.py`).


def _exposed_time(communication: Column, compute: Column, *, hides: bool, share: float = 0.0) -> Any:
    """Return the exposed time of communication next to compute. share: part of the overlapped time that slows down the compute."""
    if not hides:
        return communication
    exposed = np.maximum(communication - compute, 0.0)
    return exposed + share * np.minimum(communication, compute) if share else exposed


def parameter_time(
    terms: ParameterTerms,
    regions: RegionTimes,
    stages: Stages,
    waits: Waits,
    *,
    num_microbatches: Column,
    profile: ExecutionProfile,
) -> tuple[Any, Any]:
    """Return the exposed parameter gathers and the exposed gradient reductions (with publishing) of a step. [s]

    A gather overlaps with the region before it: a layer's with the previous layer, the first layer's with the embedding, the head's with
    the last layer. The first gather of a stage is exposed. In backward, gathers and reductions share the links.

        reductions once a step                    max(0, t - window) + s min(t, window)
        unsharded gradients, every micro-batch    m max(0, t - window) + s min(t, window)

    waits   exposed gathers and reductions of every micro-batch
    window  backward of the last micro-batch, less its own gathers and reductions
    s       share of the overlappable time that stays exposed
    """
    m = num_microbatches
    overlaps = terms.zero in profile.communication.overlaps_gradients
    slowdown = profile.timing.compute_slowdown_under_communication
    happens = terms.program.happens
    gather = m * waits.gather + waits.gathered_again
    if ("gather_forward", "step") in happens or ("gather_backward", "step") in happens:
        gather = gather + slowest_stage(plus(*_exposed_gathers(terms, regions, stages, "step", profile)))
    reduction = m * waits.reduction
    windows = left = _backward_windows(terms, regions, profile)
    # share of the overlap with the last micro-batch's backward that stays exposed
    share = min(profile.exposed_share(terms.zero) + slowdown, 1.0)
    if ("reduce", "microbatch") in happens:
        reduce = terms.reduce["microbatch"]
        if overlaps and terms.zero == 0 and share:
            pairs = zip(stage_sums(reduce, stages), stage_sums(left, stages), strict=True)
            reduction = reduction + share * slowest_stage(tuple(np.minimum(t, w) for t, w in pairs))
        windows = tuple(np.maximum(window - time, 0.0) for window, time in zip(left, reduce, strict=True))
    if ("reduce", "step") in happens:
        once = stage_sums(terms.reduce["step"], stages)
        if overlaps:
            # reductions once a step overlap with what the last micro-batch's own gathers and reductions leave of the window;
            # a rank whose waits are below the pipeline's increase in pace gains the difference
            rank_windows = stage_sums(windows, stages)
            if terms.program.waits:
                rank_windows = plus(rank_windows, tuple(np.maximum(waits.total - wait, 0.0) for wait in waits.per_rank))
            once = tuple(np.maximum(t - w, 0.0) + share * np.minimum(t, w) for t, w in zip(once, rank_windows, strict=True))
        reduction = reduction + slowest_stage(once)
    if ("publish", "step") in happens:
        reduction = reduction + profile.timing.publish_factor * slowest_stage(stage_sums(terms.publish, stages))
    for times, sums in terms.tp_sum.items():
        if ("sum", times) in happens:
            # sums over tp are exposed: the reduction over the data axes depends on them
            exposed_sums = slowest_stage(stage_sums(sums, stages))
            reduction = reduction + (m * exposed_sums if times == "microbatch" else exposed_sums)
    return gather, reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Time that every micro-batch's gathers and reductions add to the pipeline's pace. [s]

    per_rank         exposed time of each rank alone
    gathered_again   exposed time of repeated gathers in a step (`repeated_gather_time`)
    """

    gather: Column = 0.0
    reduction: Column = 0.0
    per_rank: Ranks = ()
    gathered_again: Column = 0.0

    @property
    def total(self) -> Any:
        return self.gather + self.reduction


def exposed_each_microbatch(
    terms: ParameterTerms,
    regions: RegionTimes,
    stages: Stages,
    *,
    schedule: AnySchedule,
    num_ranks: Column,
    profile: ExecutionProfile,
) -> Waits:
    """Return the exposed time of every micro-batch's gathers and reductions.

    A rank that computes less than the slowest can wait for the difference without slowing down the pipeline.
    """
    happens, weight = terms.program.happens, profile.timing.uneven_stage_weight
    gather: Column = 0.0
    reduction: Column = 0.0
    per_rank: Ranks = (0.0,) * stages.num_ranks
    if not terms.program.waits:
        return Waits()
    gathers = ("gather_forward", "microbatch") in happens or ("gather_backward", "microbatch") in happens
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    is_mean = weight != 1.0  # otherwise the totals are unused
    totals: tuple[Any, Any] = (0.0, 0.0)
    if is_mean:
        totals = region_sum(regions.forward, stages.total_sum), region_sum(regions.backward, stages.total_sum)
    beat = beat_with(f, b, totals, schedule, num_ranks, weight)
    if gathers:
        exposed_f, exposed_b = _exposed_gathers(terms, regions, stages, "microbatch", profile)
        f, b, per_rank = plus(f, exposed_f), plus(b, exposed_b), plus(exposed_f, exposed_b)
        if is_mean:
            totals = totals[0] + _over_ranks(exposed_f, num_ranks), totals[1] + _over_ranks(exposed_b, num_ranks)
        longer = beat_with(f, b, totals, schedule, num_ranks, weight)
        gather, beat = longer - beat, longer
    if ("reduce", "microbatch") in happens:
        left, reduce = _backward_windows(terms, regions, profile), terms.reduce["microbatch"]
        hides, slowdown = terms.zero in profile.communication.overlaps_gradients, profile.timing.compute_slowdown_under_communication
        on_ranks: Ranks
        if hides and terms.zero == 0:
            # unsharded gradients are reduced in buckets, which overlap with backward of any layer of the stage and the next micro-batch
            pairs = zip(stage_sums(reduce, stages), stage_sums(left, stages), strict=True)
            on_ranks = tuple(np.maximum(t - w, 0.0) for t, w in pairs)
        else:
            share = min(profile.late_share(terms.zero) + slowdown, 1.0)
            by_region = tuple(_exposed_time(t, w, hides=hides, share=share) for t, w in zip(reduce, left, strict=True))
            on_ranks = stage_sums(by_region, stages)
        if is_mean:
            totals = totals[0], totals[1] + _over_ranks(on_ranks, num_ranks)
        reduction = beat_with(f, plus(b, on_ranks), totals, schedule, num_ranks, weight) - beat
        per_rank = plus(per_rank, on_ranks)
    return Waits(gather=gather, reduction=reduction, per_rank=per_rank)


def _over_ranks(values: Ranks, num_ranks: Column) -> Any:
    """Return the sum over the ranks of a pipeline, with every middle rank as large as the largest of them."""
    return values[0] + np.where(num_ranks > 1, values[-1] + (num_ranks - 2.0) * slowest_stage(values[1:-1]), 0.0)


def _exposed_gathers(
    terms: ParameterTerms, regions: RegionTimes, stages: Stages, times: str, profile: ExecutionProfile
) -> tuple[Ranks, Ranks]:
    """Return the exposed gathers of one micro-batch, or of one step, on each rank: forward and backward. [s]

    Casts of gathered weights are added every micro-batch, fully exposed.

    In steady state a block's gather overlaps with the block before it. The first block's gather overlaps with the region before all blocks.
    If that exposes more, the difference counts with that region: with the embedding, or with the last region on a rank that begins with
    blocks.
    """
    hides, slowdown = profile.communication.prefetches_parameters, profile.timing.compute_slowdown_under_communication
    f, b, graph_regions = terms.gather_forward[times], terms.gather_backward[times], stages.regions
    last = len(graph_regions) - 1

    def exposed(gather: Column, compute: Column) -> Any:
        return _exposed_time(gather, compute, hides=hides, share=slowdown)

    before = [neighbour(graph_regions, i, -1) for i in range(len(graph_regions))]
    steady = [exposed(f[i], regions.window_forward[before[i]]) if before[i] >= 0 else f[i] for i in range(len(graph_regions))]
    forward, later = list(steady), dict[int, Any]()
    for i in range(1, len(graph_regions)):
        if before[i] != i - 1:
            more = exposed(f[i], regions.window_forward[i - 1]) - steady[i]
            if graph_regions[i - 1].is_block:
                later[i] = more
            else:
                forward[i - 1] = forward[i - 1] + more
    if last and graph_regions[last - 1].is_block and not graph_regions[last].is_block:
        forward[last] = forward[last] + (1.0 - stages.is_single) * (f[last - 1] - steady[last - 1])
    # in backward, the gathers of both end regions are exposed
    after = [neighbour(graph_regions, i, 1) for i in range(len(graph_regions))]
    backward = tuple(
        b[i] if after[i] > last or (i in (0, last) and not graph_regions[i].is_block) else exposed(b[i], regions.window_backward[after[i]])
        for i in range(len(graph_regions))
    )
    if terms.casts is not None and times == "microbatch":
        forward, backward = list(plus(tuple(forward), terms.casts.forward)), plus(backward, terms.casts.backward)
    on_ranks = stage_sums(tuple(forward), stages)
    for i, more in later.items():
        # on ranks that run both kinds, one after the other
        on_ranks = tuple(
            value + np.minimum(runs[i], 1.0) * np.minimum(runs[i - 1], 1.0) * more
            for value, runs in zip(on_ranks, stages.runs, strict=True)
        )
    return on_ranks, stage_sums(backward, stages)


def _backward_windows(terms: ParameterTerms, regions: RegionTimes, profile: ExecutionProfile) -> tuple[Any, ...]:
    """Return the backward time of each region, less the gathers that overlap with it. [s]"""
    if not (profile.communication.prefetches_parameters and ("gather_backward", "microbatch") in terms.program.happens):
        return regions.window_backward
    gathers = terms.gather_backward["microbatch"]
    return tuple(np.maximum(time - gather, 0.0) for time, gather in zip(regions.window_backward, gathers, strict=True))


def overlapped_send_time(exposed: Column, beat: Column, pipeline: Pipeline, *, hop: Column, profile: ExecutionProfile) -> Any:
    """Return the time of pace-setting sends that overlaps with exposed gathers and reductions. [s]

    A stage that waits for its parameters leaves that time to its sends. Neither is compute, so no compute is counted twice.

    exposed  the total of `exposed_each_microbatch`    beat  `beat_of`   [s]
    """
    alone, overlapped = (exposed_sends(hop, busy / pipeline.virtual_stages, pipeline, profile) for busy in (beat, beat + exposed))
    return alone - overlapped
