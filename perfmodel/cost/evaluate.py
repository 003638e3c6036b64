"""Evaluation of rows on columns of plans: the time of every piece of work and collective, summed by segment; cost of a micro-batch.

Reductions over rows use reduceat, which adds row by row in a fixed order. One column alone and the same column among many give the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import (
    attention_share,
    attention_time,
    convolution_time,
    grouped_product_time,
    head_width,
    matmul_time,
    streaming_time,
    table_entries,
)
from perfmodel.cost.machine import MEBIBYTE, Machine
from perfmodel.cost.program import BY_HAND, FUSED_MATRICES, SAVED, Program
from perfmodel.cost.rows import PRODUCT, Amounts, Rows, TimedRows
from perfmodel.cost.serving.attention import cached_attention_time, shared_cache_time
from perfmodel.cost.serving.engine_step import EngineStep, engine_collective_time
from perfmodel.cost.serving.experts import exchange_time, routed_experts_time
from perfmodel.cost.serving.kernels import weight_product_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.copies import Copies
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import COLLECTIVE_CODE, LATENT_KERNEL
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.grid import LayoutGrid

Array = NDArray[np.float64]

LOW_BYTES = 1.0
"""Bytes of an element of 8-bit operands. For 4-bit operands, the scales and the output add the same amount again. [byte]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTimes:
    """[segments, columns] seconds; convolutions count as matmul.

    experts         fused expert calls of a serving step; no rows for a training step
    communication   [traffic segments, columns]
    between_nodes   the same, for collectives whose group leaves the innermost network tier: how long they occupy the links beyond it; None:
                    no group does
    """

    matmul: Array
    attention: Array
    streaming: Array
    experts: Array
    communication: Array
    between_nodes: Array | None


def amount_values(amounts: Amounts, grid: LayoutGrid, microbatch: Array | float = 1.0, seq_len: Array | float = 1.0) -> tuple[Array, Array]:
    """Return [amounts, columns] values of every amount, and [masks, columns] sizes of every group of axes.

    seq_len   tokens of a sequence; unused for amounts of a network, whose graph contains its sizes
    """
    sizes = np.array([*map(grid.size, amounts.masks)])
    batch = np.where(amounts.batch[:, None] > 0, microbatch, 1.0)
    length = np.atleast_1d(np.asarray(seq_len, dtype=np.float64))
    powers = [np.ones_like(length)]
    for _ in range(int(amounts.length_power.max(initial=0))):
        powers.append(powers[-1] * length)  # unlike `**`, repeated multiplication keeps integers exact
    return values_of_sizes(amounts, sizes, batch * np.array(powers)[amounts.length_power]), sizes


def values_of_sizes(amounts: Amounts, sizes: Array, counted: Array) -> Array:
    """Return [amounts, columns] values from group sizes and from samples and tokens.

    sizes     [masks, columns] sizes of the groups of axes
    counted   [amounts, columns] samples times tokens of each amount
    """
    padded = np.ceil(amounts.padded_size / sizes[amounts.padded_axes])
    divisor = sizes[amounts.axes] if amounts.parts is None else sizes[amounts.axes] * amounts.parts
    values = amounts.base * counted * padded / divisor
    return values if amounts.times is None else values * sizes[amounts.times]


def row_times(
    rows: TimedRows, machine: Machine, inside: Sequence[Array], amount: Array, sizes: Array, step: EngineStep | None = None
) -> RowTimes:
    """Return the time of every segment.

    amount, sizes   as returned by `amount_values`
    inside          as returned by `members_inside`
    step            step of a serving engine whose kernels and host run these rows; None: a training step
    """
    num_columns = amount.shape[1]
    work: dict[str, Array] = dict(zip(("matmul", "streaming", "attention"), np.zeros((3, rows.num_segments, num_columns)), strict=True))
    for kind, timed, time in work_times(rows, machine, amount, sizes, step):
        work[kind] = work[kind] + summed(time, timed, rows.num_segments)
    matmul, streaming, attention = work["matmul"], work["streaming"], work["attention"]
    communication, between_nodes = np.zeros((rows.num_traffic_segments, num_columns)), None
    if rows.traffic.names:
        time, on_links, leaves = traffic_times(rows, machine, inside, amount, sizes, step)
        communication = summed(time, rows.traffic, rows.num_traffic_segments)
        if leaves.any():
            between_nodes = summed(np.where(leaves > 0, on_links, 0.0), rows.traffic, rows.num_traffic_segments)
    experts = np.zeros((rows.num_segments if rows.experts else 0, num_columns))
    if step is not None:
        for cached in rows.cached:
            heads = amount[cached.heads], amount[cached.kv_heads]
            attention[cached.segment] += cached_attention_time(cached.work, *heads, step, machine)
            communication[cached.segment] += shared_cache_time(cached.work, *heads, step, machine)
        for routed in rows.experts:
            experts[routed.segment] += routed_experts_time(routed.work, step, machine)
            communication[routed.segment] += exchange_time(routed.work, step, machine)
    return RowTimes(
        matmul=matmul,
        attention=attention,
        streaming=streaming,
        experts=experts,
        communication=communication,
        between_nodes=between_nodes,
    )


def work_times(
    rows: TimedRows, machine: Machine, amount: Array, sizes: Array, step: EngineStep | None = None
) -> Iterator[tuple[str, Rows, Array]]:
    """Yield rows of work by kind (matmul, streaming, attention), with the time of each row, [rows, columns]."""
    for products, time in product_times(rows, machine, amount, step):
        yield "matmul", products, time + _host_time(products, sizes, machine, step)
    if (convolution := rows.convolution).names:
        dims = {name: amount[convolution.columns[name]] for name in PRODUCT}
        num_bytes = np.add.reduceat(amount[convolution.accesses], convolution.access_starts, axis=0)
        time = convolution_time(**dims, num_bytes=num_bytes, itemsize=rows.activation_bytes, machine=machine)
        yield "matmul", convolution, time + _host_time(convolution, sizes, machine)
    if rows.streaming.names:
        time = streaming_times(rows, machine, amount) + _host_time(rows.streaming, sizes, machine, step)
        across = rows.streaming.columns["across"]
        yield "streaming", rows.streaming, time * counts_across(across, sizes) if across.any() else time
    if rows.attention.names:
        yield "attention", rows.attention, _attention(rows, machine, amount, sizes)


def has_several(groups: NDArray[np.int64] | int, sizes: Array) -> Array:
    """Return 1 where the group of axes has more than one rank, else 0. sizes: of the groups, by mask."""
    return np.minimum(sizes[groups] - 1.0, 1.0)


def counts_across(groups: NDArray[np.int64], sizes: Array) -> Array:
    """Return [rows, columns] `has_several`, and 1 where the row has no group."""
    return np.where((groups == 0)[:, None], 1.0, has_several(groups, sizes))


def summed(time: Any, rows: Rows, num_segments: int) -> Array:
    """Return the sum by segment, each row multiplied by its repeats."""
    total = np.zeros((num_segments, time.shape[1]))
    if rows.names:
        values = time if rows.repeats is None else time * rows.repeats
        total[rows.present] = np.add.reduceat(values, rows.starts, axis=0)
    return total


def product_times(rows: TimedRows, machine: Machine, amount: Array, step: EngineStep | None = None) -> Iterator[tuple[Rows, Array]]:
    """Yield each non-empty class of products with the time of each row, [rows, columns]."""
    low = machine.low or machine
    classes: tuple[tuple[Rows, Callable[..., Any]], ...] = (
        (rows.matmul, partial(matmul_time, itemsize=rows.activation_bytes, machine=machine)),
        (rows.grouped, partial(grouped_product_time, itemsize=rows.activation_bytes, machine=machine)),
        (rows.low, partial(matmul_time, itemsize=LOW_BYTES, machine=low)),
        (rows.low_grouped, partial(grouped_product_time, itemsize=LOW_BYTES, machine=low)),
    )
    if step is not None:
        classes = tuple(
            (products, partial(weight_product_time, machine=machine, **step.product(low))) for products, low in products_of(rows)
        )
    for products, time_of in classes:
        if products.names:
            yield products, time_of(**product_sizes(products, amount))


def products_of(rows: TimedRows) -> tuple[tuple[Rows, bool], ...]:
    """Return the products of a serving step, and whether their weights are quantized."""
    return (rows.matmul, False), (rows.low, True)


def product_sizes(products: Rows, amount: Array) -> dict[str, Array]:
    """Return batch, m, n, k of each row, [rows, columns]; n is the sum over the products of a call."""
    sizes: dict[str, Array] = {}
    for name in PRODUCT:
        sizes[name] = amount[products.columns[name]]
    if len(products.accesses):
        sizes["n"] = np.add.reduceat(amount[products.accesses], products.access_starts, axis=0)
    return sizes


def _attention(rows: TimedRows, machine: Machine, amount: Array, sizes: Array) -> Array:
    """Return [rows, columns] times of fused attention."""
    times = []
    at = rows.attention.columns
    for row in range(len(rows.attention.names)):
        is_latent = at["head_dim"][row] != at["value_head_dim"][row] and LATENT_KERNEL in machine.attention
        chunks = sizes[rows.amounts.axes[at["queries"][row]]]
        time = attention_time(
            batch=amount[at["batch"][row]],
            heads=amount[at["heads"][row]],
            kv_heads=amount[at["kv_heads"][row]],
            query_length=amount[at["queries"][row]],
            key_length=amount[at["keys"][row]],
            head_dim=at["head_dim"][row],
            causal_fraction=attention_share(rows.attention_behaviours[at["behaviour"][row]], chunks, amount[at["keys"][row]]),
            itemsize=rows.activation_bytes,
            machine=machine,
            kernel=LATENT_KERNEL if is_latent else rows.attention_kernel,
            value_head_dim=at["value_head_dim"][row],
            is_backward=bool(at["backward"][row]),
        )
        times.append(time + machine.host.launch_time)
    return np.stack(times)


def streaming_times(rows: TimedRows, machine: Machine, amount: Array) -> Array:
    """Return [rows, columns] times of passes over memory."""
    st = rows.streaming.columns
    time = streaming_time(
        num_bytes=np.add.reduceat(amount[rows.streaming.accesses], rows.streaming.access_starts, axis=0),
        num_elements=amount[st["elements"]],
        kernel_class=st["kernel"][:, None],
        machine=machine,
        backward=st["backward"][:, None],
    )
    if st["fused"].any():
        table = machine.streaming.table
        floor_time = table_entries(table, st["kernel"][:, None], has_columns=table.ndim > 2)[0]
        time = time - floor_time * st["fused"][:, None]
    return np.asarray(time)


def traffic_times(
    rows: TimedRows, machine: Machine, inside: Sequence[Array], amount: Array, sizes: Array, step: EngineStep | None = None
) -> tuple[Array, Array, Array]:
    """Return [rows, columns] of collectives: time, the part of it on links, and 1 where they leave the innermost network tier."""
    tr = rows.traffic.columns
    num_bytes, size = amount[tr["amount"]], sizes[tr["group"]]
    inside = [*np.array(inside)[:, tr["group"]]]
    if rows.has_sends:
        is_send = (tr["kind"] == COLLECTIVE_CODE[CollectiveKind.SEND_RECV])[:, None]
        # neighbours across the outermost boundary set the pace: a tier that holds the whole group holds both ends
        pair = np.minimum(size, 2.0)
        inside = [np.where(is_send, np.where(members < size, 1.0, pair), members) for members in inside]
        size = np.where(is_send, pair, size)
    if step is not None:
        time = engine_collective_time(tr["kind"][:, None], num_bytes, (size, inside), machine, step.kernels)
        return time, time, np.zeros(time.shape)
    shares = distinct_shares(rows.copies, tr["copies"], size, inside) if rows.copies else None
    time = collective_time(tr["kind"][:, None], num_bytes, group_size=size, inside=inside, machine=machine, exchanged=shares)
    return time + redistribution_time(num_bytes, size, machine), time, np.where(inside[0] < size, 1.0, 0.0)


def distinct_shares(kinds: Sequence[Copies], which: NDArray[np.int64], size: Array, inside: Sequence[Array]) -> list[Array]:
    """Return the share of its local buffer that a chip sends through each tier in an all-to-all.

    Rows that are replicated are sent once to each domain: D (1 - 1/P) of the `chosen` copies. P is the number of domains of the tier
    inside, of which one is the chip's own.

    which   for each row: 0, or the index of its copies in `kinds`, from 1
    """
    shares, inner = [], np.ones_like(size)
    for members in inside:
        share = (members - inner) / size
        for number, copies in enumerate(kinds, 1):
            has_copies = which == number
            places = size[has_copies] / inner[has_copies]
            distinct = copies.distinct(places) / copies.chosen * (1.0 - 1.0 / places)
            share[has_copies] = np.where(members[has_copies] > inner[has_copies], distinct, 0.0)
        shares.append(share)
        inner = members
    return shares


def _host_time(rows: Rows, sizes: Array, machine: Machine, step: EngineStep | None = None) -> Any:
    """Return the exposed host time of each row: launch and distributed-tensor handling; 0 in a serving step (its engine has it). [s]"""
    if step is not None:
        return 0.0
    distributed = machine.host.times.get("dtensor_op", 0.0)
    if distributed == 0.0:
        return machine.host.launch_time
    return machine.host.launch_time + distributed * np.minimum(sizes[rows.columns["mesh"]] - 1.0, 1.0)


def redistribution_time(num_bytes: Array, group_size: Array, machine: Machine) -> Any:
    """Return the overhead of an activation collective: host time of its issue and wait, and copies of its buffer (2^20 bytes a MiB). [s]"""
    once, per_mebibyte = machine.host.times.get("redistribution", 0.0), machine.host.times.get("redistribution_mebibyte", 0.0)
    if once == 0.0 and per_mebibyte == 0.0:
        return 0.0
    return np.minimum(group_size - 1.0, 1.0) * (once + num_bytes * (per_mebibyte / MEBIBYTE))


def members_inside(rows: TimedRows, grid: LayoutGrid) -> list[Array]:
    """Return [masks, columns] members of every group inside one domain of each tier; none for rows without traffic."""
    if not rows.traffic.names:
        return []
    return [*map(np.array, zip(*map(grid.group_inside, rows.amounts.masks), strict=True))]


def product_flops(rows: TimedRows, amount: Array) -> Array:
    """Return [segments, columns] FLOP of products on one chip, a multiply-add counted twice. Causal attention counts computed scores."""
    total = np.zeros((rows.num_segments, amount.shape[1]))
    for products in (rows.matmul, rows.grouped, rows.low, rows.low_grouped, rows.convolution):
        if products.names:
            mm = products.columns
            flops = 2.0 * amount[mm["batch"]] * amount[mm["m"]] * amount[mm["n"]] * amount[mm["k"]]
            total += summed(flops, products, rows.num_segments)
    at = rows.attention.columns
    for row, segment in enumerate(rows.attention.segments):
        square = amount[at["batch"][row]] * amount[at["heads"][row]] * amount[at["queries"][row]] * amount[at["keys"][row]]
        calls = 10.0 if at["backward"][row] else 4.0  # five products backward (one of them recomputes the scores), two forward
        width = head_width(at["head_dim"][row], at["value_head_dim"][row], is_backward=bool(at["backward"][row]))
        mask = rows.attention_behaviours[at["behaviour"][row]].mask
        total[segment] = total[segment] + calls * square * width * (1.0 if mask is None else mask.over(amount[at["keys"][row]]).fraction)
    return total


__all__ = [
    "RowTimes",
    "amount_values",
    "members_inside",
    "product_flops",
    "product_sizes",
    "product_times",
    "products_of",
    "redistribution_time",
    "row_times",
    "streaming_times",
    "summed",
    "traffic_times",
    "values_of_sizes",
    "work_times",
]


# --- one micro-batch ------------------------------------------------------------

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
    folded = [*filter(grid.fine.__contains__, EXPERT_AXES)]
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
    live, group = amount[program.peaks.amount] * program.peaks.factor, program.peaks.group
    live = live * counts_across(group, sizes) if group.any() else live
    moments = np.add.reduceat(live, program.peaks.starts, axis=0)
    launches = np.repeat(program.launches, amount.shape[1], axis=1)
    for at, across, number in program.launches_across:
        launches[at] += number * has_several(across, sizes)
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
