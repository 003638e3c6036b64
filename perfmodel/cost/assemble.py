"""Assembly of a step from its terms: pipeline, parameter collectives, optimizer and host constant.

    step = pipeline - sends overlapped with parameter collectives + terms outside the pipeline

A prediction and a fit assemble whole columns of plans (`step_columns`). A search tabulates most terms and adds them with the same
functions in the same order. Each row of a search therefore equals the single prediction to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assigned import assigned_grid, is_scattered
from perfmodel.cost.machine import Machine
from perfmodel.cost.memory.moments import keeps_gathered
from perfmodel.cost.microbatch import MicrobatchCost, microbatch_cost, microbatch_depends_on
from perfmodel.cost.overlap import Waits, exposed_each_microbatch, overlapped_send_time, parameter_time
from perfmodel.cost.parameters import parameter_cost, parameters_depend_on
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.program import Program
from perfmodel.cost.repeated_gathers import repeated_gather_time
from perfmodel.cost.stages import Stages, stage_columns, stages_of
from perfmodel.cost.step import RegionTimes, beat_of, ends_time, hop_time, pipeline_step_time, region_times
from perfmodel.cost.update import ParameterTerms, accumulation_time, cast_time, compression_time, optimizer_time, parameter_terms, tied_time
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.cluster_text import check_equal_chips
from perfmodel.parallel.grid import LayoutGrid, make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan

if TYPE_CHECKING:
    from perfmodel.cost.estimate import Estimator

_Value = TypeVar("_Value")


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
    profile, machine, sizes = estimator.profile, estimator.machine, estimator.programs.sizes
    gather, reduction = parameter_time(terms, regions, stages, waits, num_microbatches=num_microbatches, profile=profile)
    return OutsidePipelineTime(
        gather=gather,
        reduction=reduction,
        tied=0.0 if stages.is_folded else tied,
        optimizer=optimizer_time(terms, stages, sizes.optimizer, machine),
        accumulation=accumulation_time(terms, stages, sizes, machine, num_microbatches=num_microbatches),
        casts=cast_time(terms, stages),
        compression=compression_time(terms, stages, num_microbatches=num_microbatches),
        ends=ends_time(regions, stages),
        constant=step_constant(profile, machine),
    )


def step_constant(profile: ExecutionProfile, machine: Machine) -> float:
    """Return the host's constant time per step. [s]"""
    return profile.timing.step_time_constant + machine.host.times.get("step", 0.0)


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
    """Plans evaluated together: every term of a step that a report may show, one entry a plan. `pipeline` is without the hidden sends."""

    plans: PlanColumns
    regions: RegionTimes
    hop: Column
    overlapped_sends: Column
    pipeline: Column
    outside_pipeline: OutsidePipelineTime

    @property
    def step_time(self) -> Any:
        return self.pipeline + self.outside_pipeline.total


def plan_columns(estimator: Estimator, plans: Sequence[Plan]) -> PlanColumns:
    """Return the columns of plans that differ only in degrees, micro-batch, stages, global batch and sequence length.

    They share rules, attention, recomputation, ZeRO stage, schedule, order, and whether they are pipelined. The estimator's programs must
    serve all lengths.
    """
    profile, machine, first = estimator.profile, estimator.machine, plans[0]
    check_equal_chips(estimator.cluster)
    program = estimator.programs.program_of(first)
    # the fields that determine a plan's row of the grid and its stages
    forms = {(plan.layout, plan.micro_batch, plan.virtual_stages, plan.stage_layers, plan.ep, plan.etp) for plan in plans}
    rows = [first] if len(forms) == 1 else plans
    grid, stage_layers = _placed(estimator, rows)
    lengths = column_of(plan.job.seq_len for plan in plans)
    once = _Once(estimator=estimator, is_single=first.assignment is not None or grid.num_rows * len(lengths) == 1)
    if once.is_single and first.assignment is None:  # the program of an assignment belongs to one mesh
        depends_on = microbatch_depends_on(grid, profile), parameters_depend_on(grid)
        microbatch, layout = (tuple(np.concatenate(columns).tolist()) for columns in depends_on)
        once = replace(once, microbatch=microbatch, layout=layout)
    parameters = estimator.programs.parameter_program(
        program, first.assignment or first.rules, int(first.zero), pipelined=first.layout.pp > 1
    )

    def micro() -> MicrobatchCost:
        """Return the cost of a micro-batch, evaluated once if it is the same for all rows of the grid."""
        sizes, of_rows = column_of(plan.micro_batch for plan in rows), grid
        if grid.num_rows > 1 and all((column == column[0]).all() for column in microbatch_depends_on(grid, profile)):
            of_rows, _ = _placed(estimator, [first])
        return microbatch_cost(program, machine, of_rows, sizes, lengths)

    return PlanColumns(
        program=program,
        grid=grid,
        num_microbatches=column_of(plan.num_microbatches for plan in plans),
        micro=once(program, (*once.microbatch, first.micro_batch, *lengths), micro),
        stages=stage_columns(
            [
                stages_of(program.regions, blocks, plan.layout.pp, first.schedule.placement, first.schedule.is_simulated)
                for plan, blocks in zip(rows, stage_layers, strict=True)
            ]
        ),
        stage_layers=stage_layers[0],
        is_scattered=first.rules.scatters_residual if first.assignment is None else is_scattered(program),
        terms=once(parameters, once.layout, lambda: parameter_terms(parameters, parameter_cost(parameters, profile, machine, grid))),
        once=once,
    )


def _placed(estimator: Estimator, plans: Sequence[Plan]) -> tuple[LayoutGrid, list[tuple[int, ...]]]:
    """Return the plans' axes placed on the network tiers, and the blocks of each plan's virtual stages."""
    first, tiers = plans[0], estimator.machine.tier_sizes
    if first.assignment is not None:
        return assigned_grid(first.assignment, first.layout.pp, tiers), [estimator.programs.stage_layers(first)]

    make = partial(
        make_grid,
        {axis: [plan.layout.degree(axis) for plan in plans] for axis in DEFAULT_ORDER},
        [first.order],
        tier_sizes=tiers,
        num_key_value_heads=first.job.transformer.num_key_value_heads,
        folding=[plan.folding for plan in plans],
    )
    # a single plan's layout is placed once, whatever its batch or micro-batch
    grid = estimator.once(estimator.machine, (first.layout, first.order, first.folding), make) if len(plans) == 1 else make()
    return grid, [plan.stage_layers for plan in plans]


def step_columns(estimator: Estimator, plans: Sequence[Plan], columns: PlanColumns | None = None) -> StepColumns:
    """Return the steps of plans that share `plan_columns`, which are computed if not given."""
    profile, machine, sizes, first = estimator.profile, estimator.machine, estimator.programs.sizes, plans[0]
    columns = columns or plan_columns(estimator, plans)
    grid, micro, stages, terms, once = columns.grid, columns.micro, columns.stages, columns.terms, columns.once
    tp = grid.degree["tp"]
    m, v = columns.num_microbatches, column_of(plan.virtual_stages for plan in plans)
    regions = once(micro, ("regions", first.recompute), partial(region_times, micro, profile, first.recompute, tp))
    seq_len = column_of(plan.job.seq_len for plan in plans)
    hop = once(
        micro,
        ("hop", *once.layout),
        partial(hop_time, micro.boundary, tp, profile, machine, grid, seq_len=seq_len, is_scattered=columns.is_scattered),
    )
    tied = once(terms, (), partial(tied_time, columns.program, terms, sizes, machine, grid))
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
    pipeline = pipeline_step_time(regions, stages, shape, hop=hop, profile=profile)
    waits = exposed_each_microbatch(terms, regions, stages, schedule=schedule, num_ranks=p, profile=profile)
    overlapped_sends: Column = 0.0
    if first.layout.pp > 1:
        beat = beat_of(regions, stages, schedule=schedule, num_ranks=p, profile=profile)
        overlapped_sends = overlapped_send_time(waits.total, beat, shape, hop=hop, profile=profile)
        pipeline = pipeline - overlapped_sends
        if keeps_gathered(terms.program):
            waits = replace(waits, gathered_again=repeated_gather_time(terms, regions, stages, shape, profile))
    return StepColumns(
        plans=columns, regions=regions, hop=hop, overlapped_sends=overlapped_sends, pipeline=pipeline, outside_pipeline=time_outside(waits)
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
