"""Cells of a block of plans that a framework can run: `frameworks/runnable.py` for many plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.frameworks.runnable import ZeroRuns, combines_axes
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.choices import Dispatcher, Recompute, num_rounds
from perfmodel.planner.uniform.space import LayoutRows, PipelineChoice, Space

Array = NDArray[np.float64]
Cells = NDArray[np.bool_]


def with_other_axes(rows: LayoutRows) -> Cells:
    """Return the layouts that combine other axes with state that could be sharded (`combines_axes`)."""
    return np.asarray(combines_axes(tp=rows.tp, cp=rows.cp, pp=rows.pp, ep=rows.ep, data=rows.dp_replicate * rows.dp_shard))


def _hybrid(rows: LayoutRows) -> Cells:
    """Return the layouts with replicas of sharded state (HSDP)."""
    return (rows.dp_shard > 1) & (rows.dp_replicate > 1)


def admitted_zero(stages: ZeroRuns, rows: LayoutRows, zero: int) -> Cells:
    """Return the layouts for which the framework has this ZeRO stage."""
    some, every = (stages.admits(zero, pipelined=rows.pp > 1, replicated=replicated) for replicated in (True, False))
    admitted = np.where(_hybrid(rows), some, every) & ((rows.num_chips == 1) | (zero in stages.zero_of_ranks))
    replicas, sharded = (stages.admits_axes(zero, replicas_alone=replicas_alone) for replicas_alone in (True, False))
    return admitted & (~with_other_axes(rows) | np.where((rows.dp_shard == 1) & (rows.dp_replicate > 1), replicas, sharded))


def runnable_layouts(space: Space, rows: LayoutRows, rules: RuleSet, dispatcher: Dispatcher, *, zero: int, seq_len: int) -> Cells:
    """Return the layouts for which the framework surely runs this ZeRO stage; it may also run rules under another name than its own."""
    runs = space.runs
    runnable = admitted_zero(runs.sharding, rows, zero)
    for axis, degrees in (("pp", np.array(rows.pp)), ("tp", rows.tp), ("cp", rows.cp), ("ep", rows.ep)):
        if axis not in runs.axes:
            runnable &= degrees == 1
    if space.balanced_context:
        runnable &= (rows.cp == 1) | (seq_len % (2 * rows.cp) == 0)
    if rules.scatters_residual and not runs.sequence_parallel:
        runnable &= rows.tp == 1
    if not (runs.has_flex if dispatcher is Dispatcher.FLEX else str(dispatcher) in runs.exchanges):
        runnable &= rows.ep == 1
    some, every = (not (names := runs.rules_for(hybrid=hybrid)) or rules.name in names for hybrid in (True, False))
    return runnable & np.where(_hybrid(rows), some, every)


def runnable_ways(
    space: Space, recomputes: Sequence[Recompute], kinds: NDArray[np.int64], choices: Sequence[PipelineChoice], m: Array, pp: int
) -> Cells:
    """Return the cells [rows, 1, 1, schedules] that a framework runs, for rows of these kinds of recomputation and `m` microbatches."""
    runs = space.runs
    by_recompute = np.array([str(recompute) in runs.recompute for recompute in recomputes])[kinds].reshape(m.shape)
    if pp == 1:
        return by_recompute
    pipelines = runs.pipelines
    by_choice = [
        way.schedule.listed_as in pipelines.schedules and (pipelines.uneven_stages or len(set(way.stage_layers)) == 1) for way in choices
    ]
    enough = (m >= pp) | pipelines.few_microbatches
    in_rounds = (m % num_rounds(m, pp) == 0) | np.array([way.schedule.listed_as not in pipelines.full_rounds for way in choices])
    return np.asarray(enough & by_recompute & in_rounds & np.array(by_choice))
