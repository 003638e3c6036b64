"""Which cells of a block of plans a framework can run: `frameworks/runnable.py` says it of one plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.layout import Dispatcher, Recompute
from perfmodel.planner.uniform.space import LayoutRows, PipelineChoice, Space

Cells = NDArray[np.bool_]


def runnable_layouts(space: Space, rows: LayoutRows, rules: RuleSet, dispatcher: Dispatcher, *, zero: int, seq_len: int) -> Cells:
    """Layouts of which the framework of a space surely runs this ZeRO stage; rules with another name than its own it may run, too."""
    runs, pipelined = space.runs, rows.pp > 1
    replicated = (rows.dp_shard > 1) & (rows.dp_replicate > 1)
    some = [runs.admits_zero(zero, pipelined=pipelined, replicated=False), runs.admits_zero(zero, pipelined=pipelined, replicated=True)]
    found = np.where(replicated, some[1], some[0])
    if zero not in runs.zero_beside_axes:
        found &= ((rows.tp == 1) & (rows.cp == 1)) | (rows.data_parallel * rows.cp == 1)
    for axis, degrees in (("pp", np.array(rows.pp)), ("tp", rows.tp), ("cp", rows.cp)):
        if axis not in runs.axes:
            found &= degrees == 1
    if space.balanced_context:
        found &= (rows.cp == 1) | (seq_len % (2 * rows.cp) == 0)
    if rules.scatters_residual and not runs.sequence_parallel:
        found &= rows.tp == 1
    if dispatcher is Dispatcher.FLEX and not runs.has_flex:
        found &= rows.ep == 1
    return found & (not runs.rules or rules.name in runs.rules)


def runnable_ways(
    space: Space,
    micro_batches: Sequence[int],
    recomputes: Sequence[Recompute],
    choices: Sequence[PipelineChoice],
    rows: LayoutRows,
    batch: int,
) -> Cells:
    """[micro-batches, recompute, schedules] that the framework of a space runs of these layouts."""
    runs = space.runs
    by_recompute = np.array([str(recompute) in runs.recompute for recompute in recomputes])
    if rows.pp == 1:
        return np.broadcast_to(by_recompute[None, :, None], (len(micro_batches), len(recomputes), len(choices)))
    counts = batch // (rows.data_parallel * np.array(micro_batches))
    by_choice = [str(each.schedule) in runs.schedules and (runs.uneven_stages or len(set(each.stage_layers)) == 1) for each in choices]
    enough = (counts >= rows.pp) | runs.few_microbatches
    return np.asarray(enough[:, None, None] & by_recompute[None, :, None] & np.array(by_choice)[None, None, :])
