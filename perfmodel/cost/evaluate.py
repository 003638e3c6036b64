"""Rows priced on columns: the time of every piece of work and collective, added up by segment.

Reductions over rows go through reduceat, which adds row by row in a fixed order, so that one column alone and the same column among many
give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import (
    attention_backward_time,
    attention_time,
    backward_width,
    convolution_time,
    forward_width,
    grouped_product_time,
    matmul_time,
    streaming_time,
)
from perfmodel.cost.context import attention_share
from perfmodel.cost.machine import MEBIBYTE, Machine
from perfmodel.cost.rows import Amounts, Rows, TimedRows
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.copies import Copies
from perfmodel.hardware.calibration import COLLECTIVE_CODE, LATENT_KERNEL
from perfmodel.parallel.grid import LayoutGrid

Array = NDArray[np.float64]

LOW_BYTES = 1.0
"""[byte] Of an element of operands in 8 bits; in 4 bits scales and the output weigh as much again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTimes:
    """[segments, columns] seconds; convolutions count among matmul.

    communication   [traffic segments, columns]
    between_nodes   the same, of collectives whose group leaves the innermost network tier: how long they hold the links beyond it; None
                    where no group does
    """

    matmul: Array
    attention: Array
    streaming: Array
    communication: Array
    between_nodes: Array | None


def amount_values(amounts: Amounts, grid: LayoutGrid, microbatch: Array | float = 1.0) -> tuple[Array, Array]:
    """[amounts, columns] values of every amount, and [masks, columns] sizes of every group of axes."""
    sizes = np.array([grid.size(mask) for mask in amounts.masks])
    return values_of_sizes(amounts, sizes, microbatch), sizes


def values_of_sizes(amounts: Amounts, sizes: Array, microbatch: Array | float = 1.0) -> Array:
    """[amounts, columns] values where the sizes of the groups, [masks, columns], are known."""
    samples = np.where(amounts.per_sample, microbatch, 1.0)
    padded = np.ceil(amounts.padded_size / sizes[amounts.padded_axes])
    values = amounts.base * samples * padded / sizes[amounts.axes]
    return values if amounts.times is None else values * sizes[amounts.times]


def by_segment(values: Array, rows: Rows, num_segments: int, num_columns: int) -> Array:
    """Sums over the rows of each segment."""
    total = np.zeros((num_segments, num_columns))
    if rows.names:
        total[rows.present] = np.add.reduceat(values, rows.starts, axis=0)
    return total


def row_times(rows: TimedRows, machine: Machine, grid: LayoutGrid, amount: Array, sizes: Array) -> RowTimes:
    """The time of every segment; `amount` and `sizes` as `amount_values` gives them."""
    matmul = _products(rows, rows.matmul, matmul_time, machine, amount, sizes, itemsize=rows.activation_bytes)
    for products, time, at, itemsize in (
        (rows.grouped, grouped_product_time, machine, rows.activation_bytes),
        (rows.low, matmul_time, machine.low, LOW_BYTES),
        (rows.low_grouped, grouped_product_time, machine.low, LOW_BYTES),
    ):
        if products.names:
            matmul += _products(rows, products, time, at or machine, amount, sizes, itemsize=itemsize)
    if rows.convolution.names:
        matmul += _convolution(rows, machine, amount, sizes)
    communication, between_nodes = _communication(rows, machine, grid, amount, sizes)
    return RowTimes(
        matmul=matmul,
        attention=_attention(rows, machine, amount, sizes),
        streaming=_streaming(rows, machine, amount, sizes),
        communication=communication,
        between_nodes=between_nodes,
    )


def summed(time: Any, rows: Rows, num_segments: int) -> Array:
    """By segment, each row as often as it repeats."""
    return by_segment(time if rows.repeats is None else time * rows.repeats, rows, num_segments, time.shape[1])


def _products(
    rows: TimedRows, products: Rows, time_of: Callable[..., Any], machine: Machine, amount: Array, sizes: Array, *, itemsize: float
) -> Array:
    if not products.names:
        return np.zeros((rows.num_segments, amount.shape[1]))
    mm = products.columns
    time = time_of(
        batch=amount[mm["batch"]],
        m=amount[mm["m"]],
        n=amount[mm["n"]],
        k=amount[mm["k"]],
        itemsize=itemsize,
        machine=machine,
    )
    return summed(time + _host_time(products, sizes, machine), products, rows.num_segments)


def _convolution(rows: TimedRows, machine: Machine, amount: Array, sizes: Array) -> Array:
    mm = rows.convolution.columns
    time = convolution_time(
        batch=amount[mm["batch"]],
        m=amount[mm["m"]],
        n=amount[mm["n"]],
        k=amount[mm["k"]],
        num_bytes=np.add.reduceat(amount[rows.convolution.accesses], rows.convolution.access_starts, axis=0),
        itemsize=rows.activation_bytes,
        machine=machine,
    )
    return summed(time + _host_time(rows.convolution, sizes, machine), rows.convolution, rows.num_segments)


def _attention(rows: TimedRows, machine: Machine, amount: Array, sizes: Array) -> Array:
    total = np.zeros((rows.num_segments, amount.shape[1]))
    at = rows.attention.columns
    for row, segment in enumerate(rows.attention.segments):
        evaluate = attention_backward_time if at["backward"][row] else attention_time
        is_latent = at["head_dim"][row] != at["value_head_dim"][row] and LATENT_KERNEL in machine.attention
        chunks = sizes[rows.amounts.axes[at["queries"][row]]]
        time = evaluate(
            batch=amount[at["batch"][row]],
            heads=amount[at["heads"][row]],
            kv_heads=amount[at["kv_heads"][row]],
            query_length=amount[at["queries"][row]],
            key_length=amount[at["keys"][row]],
            head_dim=at["head_dim"][row],
            causal_fraction=attention_share(rows.attention_habits[at["habits"][row]], chunks, amount[at["keys"][row]]),
            itemsize=rows.activation_bytes,
            machine=machine,
            kernel=LATENT_KERNEL if is_latent else rows.attention_kernel,
            value_head_dim=at["value_head_dim"][row],
        )
        total[segment] = total[segment] + (time + machine.launch_time)
    return total


def _streaming(rows: TimedRows, machine: Machine, amount: Array, sizes: Array) -> Array:
    if not rows.streaming.names:
        return np.zeros((rows.num_segments, amount.shape[1]))
    st = rows.streaming.columns
    time = streaming_time(
        num_bytes=np.add.reduceat(amount[rows.streaming.accesses], rows.streaming.access_starts, axis=0),
        num_elements=amount[st["elements"]],
        kernel_class=st["kernel"][:, None],
        machine=machine,
        backward=st["backward"][:, None],
    )
    return summed(time + _host_time(rows.streaming, sizes, machine), rows.streaming, rows.num_segments)


def _communication(rows: TimedRows, machine: Machine, grid: LayoutGrid, amount: Array, sizes: Array) -> tuple[Array, Array | None]:
    """`communication` and `between_nodes` of `RowTimes`."""
    if not rows.traffic.names:
        return np.zeros((rows.num_traffic_segments, amount.shape[1])), None
    tr = rows.traffic.columns
    num_bytes, size = amount[tr["amount"]], sizes[tr["group"]]
    inside = [tier[tr["group"]] for tier in members_inside(rows.amounts.masks, grid)]
    if rows.has_sends:
        is_send = (tr["kind"] == COLLECTIVE_CODE[CollectiveKind.SEND_RECV])[:, None]
        # neighbours across the outermost cut set the pace: a tier that holds the whole group holds both ends
        pair = np.minimum(size, 2.0)
        inside = [np.where(is_send, np.where(members < size, 1.0, pair), members) for members in inside]
        size = np.where(is_send, pair, size)
    shares = distinct_shares(rows.copies, tr["copies"], size, inside) if rows.copies else None
    time = collective_time(tr["kind"][:, None], num_bytes, group_size=size, inside=inside, machine=machine, exchanged=shares)
    total = summed(time + redistribution_time(num_bytes, size, machine), rows.traffic, rows.num_traffic_segments)
    leaves = inside[0] < size
    return total, summed(np.where(leaves, time, 0.0), rows.traffic, rows.num_traffic_segments) if leaves.any() else None


def distinct_shares(kinds: Sequence[Copies], which: NDArray[np.int64], size: Array, inside: Sequence[Array]) -> list[Array]:
    """For each tier: of its local buffer, what a chip sends there in an all-to-all; of rows in copies one for each place.

    which   of each row: 0, or which of `kinds` its copies are, from 1

    Places are the domains of the tier inside, of which a chip has one itself: D (1 - 1/P) of the `chosen` copies.
    """
    found, inner = [], np.ones_like(size)
    for members in inside:
        share = (members - inner) / size
        for number, copies in enumerate(kinds, 1):
            own = which == number
            places = size[own] / inner[own]
            distinct = copies.distinct(places) / copies.chosen * (1.0 - 1.0 / places)
            share[own] = np.where(members[own] > inner[own], distinct, 0.0)
        found.append(share)
        inner = members
    return found


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


def members_inside(masks: tuple[frozenset[str], ...], grid: LayoutGrid) -> list[Array]:
    """[masks, columns] members of every group inside one domain of each tier."""
    by_mask = [grid.group_inside(mask) for mask in masks]
    return [np.array([by_mask[i][tier] for i in range(len(masks))]) for tier in range(len(grid.inside))]


def product_flops(rows: TimedRows, amount: Array) -> Array:
    """[segments, columns] FLOP of products on one chip, a multiply-add counted twice; causal attention counts what it computes."""
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
        width = (backward_width if at["backward"][row] else forward_width)(at["head_dim"][row], at["value_head_dim"][row])
        habits = rows.attention_habits[at["habits"][row]]
        total[segment] = total[segment] + calls * square * width * habits.fraction
    return total


__all__ = [
    "RowTimes",
    "amount_values",
    "by_segment",
    "members_inside",
    "product_flops",
    "redistribution_time",
    "row_times",
    "values_of_sizes",
]
