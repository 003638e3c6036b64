"""Which cells of a block of plans a framework can run: `frameworks/runnable.py` says it of one plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.frameworks.runnable import Runs
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.layout import Dispatcher, Recompute
from perfmodel.planner.uniform.space import LayoutRows, PipelineChoice, Space

Array = NDArray[np.float64]
Cells = NDArray[np.bool_]


def admitted_zero(runs: Runs, rows: LayoutRows, zero: int) -> Cells:
    """Layouts beside whose axes the framework has this ZeRO stage."""
    pipelined, beside = rows.pp > 1, ((rows.tp > 1) | (rows.cp > 1)) & (rows.dp_replicate * rows.dp_shard * rows.cp > 1)
    some, every = (runs.admits_zero(zero, pipelined=pipelined, replicated=replicated) for replicated in (True, False))
    found = np.where((rows.dp_shard > 1) & (rows.dp_replicate > 1), some, every)
    return found if zero in runs.zero_beside_axes else found & ~beside


def runnable_layouts(space: Space, rows: LayoutRows, rules: RuleSet, dispatcher: Dispatcher, *, zero: int, seq_len: int) -> Cells:
    """Layouts of which the framework of a space surely runs this ZeRO stage; rules with another name than its own it may run, too."""
    runs = space.runs
    found = admitted_zero(runs, rows, zero)
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
    space: Space, recomputes: Sequence[Recompute], kinds: NDArray[np.int64], choices: Sequence[PipelineChoice], m: Array, pp: int
) -> Cells:
    """[rows, 1, 1, schedules] that the framework of a space runs, of rows of these kinds of recomputation and `m` microbatches."""
    runs = space.runs
    by_recompute = np.array([str(recompute) in runs.recompute for recompute in recomputes])[kinds].reshape(m.shape)
    if pp == 1:
        return by_recompute
    by_choice = [str(each.schedule) in runs.schedules and (runs.uneven_stages or len(set(each.stage_layers)) == 1) for each in choices]
    enough = (m >= pp) | runs.few_microbatches
    return np.asarray(enough & by_recompute & np.array(by_choice))
