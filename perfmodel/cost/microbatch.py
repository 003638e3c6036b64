"""What one microbatch costs on one chip: time of operators and of redistributions, and bytes kept for backward, by region.

A `Program` evaluated on columns. Reductions over rows go through reduceat, which adds row by row in a fixed order, so that one
plan alone and the same plan among many give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import attention_backward_time, attention_time, matmul_time, streaming_time
from perfmodel.cost.context import attention_share
from perfmodel.cost.machine import MEBIBYTE, Machine
from perfmodel.cost.program import COMM, PHASES, SAVED, Program, Rows
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.graph import REGIONS

Array = NDArray[np.float64]

_SEGMENTS = len(REGIONS) * len(PHASES)
_FINE_INNER = ("cp", "tp_kv", "tp_q")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchCost:
    """Columns of one microbatch.

    matmul, attention, streaming   [segments, rows] seconds of work; segment = region * len(PHASES) + phase, both as `program.py` lists them
    communication                  [segments * len(COMM), rows] seconds, a segment's classes of communication one after another
    saved                          [regions * len(SAVED), rows] bytes, likewise
    peaks                          [cases * 2 + 1, rows] bytes over what is kept, of backward passes (`peak_index`) and a layer's forward
    boundary, logits               bytes of a stage boundary; logit elements
    flops                          [segments, rows] FLOP of matrix products on one chip, a multiply-add counted twice
    crosses_nodes                  1 where the pipeline leaves the innermost network tier, else 0
    """

    matmul: Array
    attention: Array
    streaming: Array
    communication: Array
    saved: Array
    boundary: Array
    logits: Array
    peaks: Array
    flops: Array
    crosses_nodes: Array


def amounts(program: Program, grid: LayoutGrid, microbatch: Array) -> tuple[Array, Array]:
    """[amounts, rows] values of every amount, and [masks, rows] sizes of every group of axes."""
    a = program.amounts
    sizes = np.array([grid.size(mask) for mask in a.masks])
    samples = np.where(a.per_sample, microbatch, 1.0)
    padded = np.ceil(a.padded_size / sizes[a.padded_axes])
    return a.base * samples * padded / sizes[a.axes], sizes


def microbatch_depends_on(grid: LayoutGrid, profile: ExecutionProfile) -> list[Array]:
    """The columns of a grid on which a microbatch's cost depends: rows that agree in all of them cost the same."""
    columns = [grid.degree["tp"], grid.degree["cp"]]
    if profile.host_layer_time_per_tp_across_nodes > 0:
        columns.append(pipeline_crosses_nodes(grid))
    for tier in grid.inside:
        columns += [tier[axis] for axis in _FINE_INNER]
    return columns


def _by_segment(values: Array, rows: Rows, num_segments: int, num_columns: int) -> Array:
    total = np.zeros((num_segments, num_columns))
    if len(rows.starts):
        total[rows.present] = np.add.reduceat(values, rows.starts, axis=0)
    return total


def microbatch_cost(program: Program, machine: Machine, grid: LayoutGrid, microbatch: Array) -> MicrobatchCost:
    """Evaluate `program` on every row of the grid, with that row's microbatch (sequences for one data-parallel rank)."""
    amount, sizes = amounts(program, grid, microbatch)
    columns = amount.shape[1]
    itemsize = program.activation_bytes
    mm = program.matmul.columns
    matmul = matmul_time(
        batch=amount[mm["batch"]], m=amount[mm["m"]], n=amount[mm["n"]], k=amount[mm["k"]], itemsize=itemsize, machine=machine
    )
    work_matmul = _by_segment(matmul + _host_time(program.matmul, sizes, machine), program.matmul, _SEGMENTS, columns)
    work_attention = np.zeros((_SEGMENTS, columns))
    at = program.attention.columns
    for row, segment in enumerate(program.attention.segments):
        evaluate = attention_backward_time if at["backward"][row] else attention_time
        chunks = sizes[program.amounts.axes[at["queries"][row]]]
        time = evaluate(
            batch=amount[at["batch"][row]],
            heads=amount[at["heads"][row]],
            kv_heads=amount[at["kv_heads"][row]],
            query_length=amount[at["queries"][row]],
            key_length=amount[at["keys"][row]],
            head_dim=at["head_dim"][row],
            causal_fraction=attention_share(program.attention_habits[at["habits"][row]], chunks),
            itemsize=itemsize,
            machine=machine,
            kernel=program.attention_kernel,
        )
        work_attention[segment] = work_attention[segment] + (time + machine.launch_time)
    st = program.streaming.columns
    num_bytes = np.add.reduceat(amount[program.access_amounts], program.access_starts, axis=0)
    streaming = streaming_time(
        num_bytes=num_bytes,
        num_elements=amount[st["elements"]],
        kernel_class=st["kernel"][:, None],
        machine=machine,
        backward=st["backward"][:, None],
    )
    work_streaming = _by_segment(streaming + _host_time(program.streaming, sizes, machine), program.streaming, _SEGMENTS, columns)
    tr = program.traffic.columns
    if len(program.traffic.segments):
        inside = _inside(program, grid)
        time = collective_time(
            tr["kind"][:, None],
            amount[tr["amount"]],
            group_size=sizes[tr["group"]],
            inside=[tier[tr["group"]] for tier in inside],
            machine=machine,
        )
        time = time + redistribution_time(amount[tr["amount"]], sizes[tr["group"]], machine)
        communication = _by_segment(time, program.traffic, _SEGMENTS * len(COMM), columns)
    else:
        communication = np.zeros((_SEGMENTS * len(COMM), columns))
    saved = _by_segment(amount[program.saved.columns["amount"]], program.saved, len(REGIONS) * len(SAVED), columns)
    return MicrobatchCost(
        matmul=work_matmul,
        attention=work_attention,
        streaming=work_streaming,
        communication=communication,
        saved=saved,
        boundary=amount[program.boundary],
        logits=amount[program.logits],
        peaks=_peaks(program, amount, sizes),
        flops=_flops(program, amount),
        crosses_nodes=pipeline_crosses_nodes(grid),
    )


def _peaks(program: Program, amount: Array, sizes: Array) -> Array:
    """The largest moment of each case. A term of a redistribution counts where its group has more than one rank."""
    peaks = program.peaks
    counts = np.where((peaks.group == 0)[:, None], 1.0, np.minimum(sizes[peaks.group] - 1.0, 1.0))
    moments = np.add.reduceat(amount[peaks.amount] * peaks.factor * counts, peaks.starts, axis=0)
    return np.asarray(np.maximum.reduceat(moments, peaks.of, axis=0))


def _host_time(rows: Rows, sizes: Array, machine: Machine) -> Any:
    """Host time of each row that nothing hides: launching it, and handling its tensors where they are distributed objects. [s]"""
    distributed = machine.host_times.get("dtensor_op", 0.0)
    if distributed == 0.0:
        return machine.launch_time
    return machine.launch_time + distributed * np.minimum(sizes[rows.columns["mesh"]] - 1.0, 1.0)


def redistribution_time(num_bytes: Array, group_size: Array, machine: Machine) -> Any:
    """Around a collective of activations: host time of its issue and wait, and copies of its buffer (2^20 bytes a MiB). [s]"""
    once, per_mebibyte = machine.host_times.get("redistribution", 0.0), machine.host_times.get("redistribution_mebibyte", 0.0)
    if once == 0.0 and per_mebibyte == 0.0:
        return 0.0
    return np.minimum(group_size - 1.0, 1.0) * (once + num_bytes * (per_mebibyte / MEBIBYTE))


def pipeline_crosses_nodes(grid: LayoutGrid) -> Array:
    """1.0 where not all pipeline ranks of a column lie in one domain of the innermost tier."""
    return np.where((grid.degree["pp"] > 1) & (grid.hop[0] < 2), 1.0, 0.0)


def _inside(program: Program, grid: LayoutGrid) -> list[Array]:
    masks = program.amounts.masks
    by_mask = [grid.group_inside(mask) for mask in masks]
    return [np.array([by_mask[i][tier] for i in range(len(masks))]) for tier in range(len(grid.inside))]


def executed_flops(program: Program, grid: LayoutGrid, microbatch: Array) -> Array:
    """[segments, rows] FLOP of matrix products on one chip; causal attention counts what it computes."""
    return _flops(program, amounts(program, grid, microbatch)[0])


def _flops(program: Program, amount: Array) -> Array:
    columns = amount.shape[1]
    mm = program.matmul.columns
    flops = 2.0 * amount[mm["batch"]] * amount[mm["m"]] * amount[mm["n"]] * amount[mm["k"]]
    total = _by_segment(flops, program.matmul, _SEGMENTS, columns)
    at = program.attention.columns
    for row, segment in enumerate(program.attention.segments):
        square = amount[at["batch"][row]] * amount[at["heads"][row]] * amount[at["queries"][row]] * amount[at["keys"][row]]
        products = 10.0 if at["backward"][row] else 4.0  # five products backward (one of them recomputes the scores), two forward
        habits = program.attention_habits[at["habits"][row]]
        total[segment] = total[segment] + products * square * at["head_dim"][row] * habits.fraction
    return total
