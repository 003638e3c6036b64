"""Cost of one micro-batch on one chip, by region: time of operators and redistributions, and bytes saved for backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import amount_values, counts_across, has_several, members_inside, product_flops, row_times, summed
from perfmodel.cost.machine import Machine
from perfmodel.cost.program import BY_HAND, FUSED_MATRICES, SAVED, Program
from perfmodel.cost.rows import TimedRows
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.grid import LayoutGrid

Array = NDArray[np.float64]

_FINE_INNER = ("cp", "tp_kv", "tp_q")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchCost:
    """Columns of one micro-batch.

    matmul, attention, streaming   [segments, rows] seconds of work; segment = region * len(PHASES) + phase, both as `program.py` lists them
    communication                  [segments * len(COMM), rows] seconds, by class of communication within a segment
    collectives                    the same rows, number of collectives that the host issues
    waits                          the same rows, number of collectives whose sizes the host waits for; None: there are none
    launches                       [segments, rows] kernel launches
    saved                          [regions * len(SAVED), rows] bytes saved for backward
    peaks                          [cases, rows] bytes of the moments of `Peaks`, in addition to the saved bytes
    boundary, logits               bytes of a stage boundary; logit elements
    flops                          [segments, rows] FLOP of matrix products on one chip, a multiply-add counted twice
    concurrent                     [segments, rows] seconds of work that may overlap with exchanges; None: there is none
    weight_gradients               [2 regions, rows] seconds of products of weight gradients, as in `Program`; None: they are not separate
    between_nodes                  as communication: seconds that it occupies links beyond the innermost network tier; None: there is none
    host_bandwidth                 link between a chip and its host's memory, one direction [byte/s]
    host_is_chip                   the host computes too, so launch time never overlaps
    crosses_nodes                  1 where the pipeline leaves the innermost network tier, else 0
    """

    program: Program
    matmul: Array
    attention: Array
    streaming: Array
    communication: Array
    collectives: Array
    launches: Array
    saved: Array
    boundary: Array
    logits: Array
    peaks: Array
    flops: Array
    host_bandwidth: float
    host_is_chip: bool
    crosses_nodes: Array
    between_nodes: Array | None
    waits: Array | None = None
    concurrent: Array | None = None
    weight_gradients: Array | None = None


def saved_classes(micro: MicrobatchCost) -> Array:
    """Return the bytes of saved tensors, [classes of `SAVED`, regions, rows]."""
    return micro.saved.reshape(-1, len(SAVED), micro.saved.shape[-1]).swapaxes(0, 1)


def kept_bytes(micro: MicrobatchCost, recompute: Recompute) -> Array:
    """Return [regions, rows] saved activation memory of one pass of each region; only blocks are recomputed. [byte]"""
    keep, dropped, boundary, entering, _ = saved_classes(micro)
    kept = (keep + boundary) + dropped
    if recompute is Recompute.NONE:
        return kept
    return np.where(micro.program.is_block, keep + boundary if recompute is Recompute.SELECTIVE else boundary + entering, kept)


def microbatch_depends_on(grid: LayoutGrid, profile: ExecutionProfile) -> list[Array]:
    """Return the columns of a grid that determine a micro-batch's cost: rows that agree in all of them cost the same."""
    columns = [grid.degree["tp"], grid.degree["cp"]]
    if profile.timing.host_layer_time_per_tp_across_nodes > 0:
        columns.append(pipeline_crosses_nodes(grid))
    for tier in grid.inside:
        columns += map(tier.__getitem__, _FINE_INNER)
    folded = [axis for axis in EXPERT_AXES if axis in grid.fine]
    for sizes in (grid.fine, *grid.inside) if folded else ():
        columns += [sizes[axis] for axis in folded]
    return columns


def microbatch_cost(program: Program, machine: Machine, grid: LayoutGrid, microbatch: Array, seq_len: Array | float) -> MicrobatchCost:
    """Evaluate `program` on every row of the grid.

    microbatch   sequences of one data-parallel rank, for each row
    seq_len      tokens of a sequence; unused for a network, whose graph contains its sizes
    """
    amount, sizes = amount_values(program.rows.amounts, grid, microbatch, seq_len)
    times = row_times(program.rows, machine, members_inside(program.rows, grid), amount, sizes)
    saved = summed(amount[program.saved.columns["amount"]], program.saved, len(program.regions) * len(SAVED))
    # terms of a redistribution count if its group has more than one rank
    live = amount[program.peaks.amount] * program.peaks.factor * counts_across(program.peaks.group, sizes)
    moments = np.add.reduceat(live, program.peaks.starts, axis=0)
    launches = np.repeat(program.launches, amount.shape[1], axis=1)
    for at, group, number in program.launches_across:
        launches[at] += number * has_several(group, sizes)
    for forward, backward, matrices in program.softmaxes:
        by_hand = BY_HAND * np.minimum(amount[matrices] % FUSED_MATRICES, 1.0)
        launches[forward] += by_hand
        launches[backward] += by_hand
    # collectives of groups of more than one rank, and those before which the host waits for counted sizes
    traffic, number, counted = program.rows.traffic, program.rows.num_traffic_segments, program.rows.traffic.columns["counted"]
    issued = has_several(traffic.columns["group"], sizes)
    return MicrobatchCost(
        program=program,
        matmul=times.matmul,
        attention=times.attention,
        streaming=times.streaming,
        communication=times.communication,
        collectives=summed(issued, traffic, number),
        launches=launches,
        saved=saved,
        boundary=amount[program.boundary[0]] if len(program.boundary) == 1 else amount[list(program.boundary)].mean(axis=0),
        logits=amount[program.logits],
        peaks=np.asarray(np.maximum.reduceat(moments, program.peaks.of, axis=0)),
        flops=product_flops(program.rows, amount),
        host_bandwidth=machine.host.bandwidth,
        host_is_chip=machine.host.is_chip,
        crosses_nodes=pipeline_crosses_nodes(grid),
        between_nodes=times.between_nodes,
        waits=summed(issued * counted[:, None], traffic, number) if counted.any() else None,
        concurrent=None if program.concurrent is None else _work(program.concurrent, machine, grid, microbatch, seq_len),
        weight_gradients=None if program.weight_gradients is None else _work(program.weight_gradients, machine, grid, microbatch, seq_len),
    )


def _work(rows: TimedRows, machine: Machine, grid: LayoutGrid, microbatch: Array, seq_len: Array | float) -> Array:
    amount, sizes = amount_values(rows.amounts, grid, microbatch, seq_len)
    times = row_times(rows, machine, members_inside(rows, grid), amount, sizes)
    return (times.matmul + times.attention) + times.streaming


def pipeline_crosses_nodes(grid: LayoutGrid) -> Array:
    """Return 1.0 where the pipeline ranks of a column do not all lie in one domain of the innermost tier."""
    return np.where((grid.degree["pp"] > 1) & (grid.hop[0] < 2), 1.0, 0.0)
