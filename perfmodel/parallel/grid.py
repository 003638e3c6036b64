"""Layouts as columns: sizes of the axes, and members of each axis inside one domain of each network tier.

The same formula prices one plan and a million: a single plan is a grid of one row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from perfmodel.parallel.algebra.folding import expert_parts
from perfmodel.parallel.layout import DEFAULT_ORDER

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGrid:
    """Columns with one entry per row.

    degree    axis of the layout -> its size; 1 for a free mesh, which has no pipeline
    fine      axis of shardings -> its size (of layouts: tp = tp_kv * tp_q, tp_kv the part that divides the key-value heads)
    inside    for each network tier, innermost first: fine axis -> members inside one domain of the tier
    hop       for each network tier: 1 + share of neighbouring pipeline ranks in one domain of the tier; 2: the whole pipeline
    """

    degree: Mapping[str, Column]
    fine: Mapping[str, Column]
    inside: tuple[Mapping[str, Column], ...]
    hop: tuple[Column, ...]

    @property
    def num_rows(self) -> int:
        return len(self.degree["pp"])

    def size(self, axes: Collection[str]) -> Column:
        """Return the number of members of the group over these axes."""
        return _product(self.fine, axes, self.degree["pp"])

    def group_inside(self, axes: Collection[str]) -> list[Column]:
        """Return the members of the group inside one domain of each tier: the product over its axes of the members inside."""
        return list(map(_product, self.inside, repeat(axes), repeat(self.degree["pp"])))


def _product(sizes: Mapping[str, Column], axes: Collection[str], like: Column) -> Column:
    """Return the product of the sizes of axes, or ones of the shape of `like`. Sizes are integers, so the order does not matter."""
    result: Column | None = None
    for axis, size in sizes.items():
        if axis in axes:
            result = size if result is None else result * size
    return np.ones_like(like) if result is None else result


def make_grid(
    degrees: Mapping[str, Sequence[int] | NDArray[np.int64]],
    orders: Sequence[tuple[str, ...]],
    *,
    order_index: Sequence[int] | NDArray[np.int64] | None = None,
    tier_sizes: Sequence[int],
    num_key_value_heads: int,
    folding: Sequence[tuple[int, int] | None] = (),
) -> LayoutGrid:
    """Return the grid of layouts with these degrees; row r has the order orders[order_index[r]], innermost first.

    folding   (ep, etp) of each row, of a model with experts (`algebra/folding.py`)

    An axis of stride t and size n has min(n, max(1, floor(D / t))) members inside a domain of D chips.
    """
    degree = {axis: np.asarray(degrees[axis], dtype=np.float64) for axis in DEFAULT_ORDER}
    num_rows = len(degree["pp"])
    index = np.zeros(num_rows, dtype=np.int64) if order_index is None else np.asarray(order_index)
    stride = {axis: np.ones(num_rows) for axis in DEFAULT_ORDER}
    for i, order in enumerate(orders):
        rows = index == i
        running = np.ones(int(rows.sum()))
        for axis in order:
            stride[axis][rows] = running
            running = running * degree[axis][rows]
    tp = np.asarray(degree["tp"], dtype=np.int64)
    tp_kv = np.gcd(tp, num_key_value_heads).astype(np.float64)
    tp_q = degree["tp"] / tp_kv
    fine = {"dp_replicate": degree["dp_replicate"], "dp_shard": degree["dp_shard"], "cp": degree["cp"], "tp_kv": tp_kv, "tp_q": tp_q}
    fine_stride = {axis: stride[axis] for axis in ("dp_replicate", "dp_shard", "cp")}
    fine_stride["tp_q"] = stride["tp"]
    fine_stride["tp_kv"] = stride["tp"] * tp_q
    if any(folding):
        ep, etp = np.array([*filter(None, folding)], dtype=np.float64).T
        _fold(fine, fine_stride, ep, etp)
    inside: list[Mapping[str, Column]] = []
    hop: list[Column] = []
    for size in tier_sizes:
        inside.append({axis: np.minimum(fine[axis], np.maximum(1.0, np.floor(size / fine_stride[axis]))) for axis in fine})
        hop.append(1.0 + neighbours_together(stride["pp"], degree["pp"], size))
    return LayoutGrid(degree=degree, fine=fine, inside=tuple(inside), hop=tuple(hop))


def neighbours_together(stride: Column, ranks: Column, size: int) -> Column:
    """Return the share of neighbouring ranks at this stride that lie in one domain of `size` chips.

    1 - (ceil(n / m) - 1) / (n - 1) of n ranks, m = floor(size / stride) of them in a domain
    """
    apart = np.ceil(ranks / np.maximum(np.floor(size / stride), 1.0)) - 1.0
    return 1.0 - apart / np.maximum(ranks - 1.0, 1.0)


def _fold(fine: dict[str, Column], stride: dict[str, Column], ep: Column, etp: Column) -> None:
    """Split each axis in place into the part that shards experts and the rest.

    The rest is the inner part of tp and the outer part of the other axes. The data part is of dp_shard, or of dp_replicate where dp_shard
    is 1.
    """
    parts = expert_parts(tp_kv=fine["tp_kv"], tp_q=fine["tp_q"], cp=fine["cp"], ep=ep, etp=etp)
    shards = fine["dp_shard"] > 1
    stride["dp_ep"] = np.where(shards, stride["dp_shard"], stride["dp_replicate"])
    for axis, takes in (("dp_shard", shards), ("dp_replicate", ~shards)):
        taken = np.where(takes, parts["dp_ep"], 1.0)
        fine[axis] = fine[axis] / taken
        stride[axis] = stride[axis] * taken
    stride["cp_ep"] = stride["cp"]
    fine["cp"], stride["cp"] = fine["cp"] / parts["cp_ep"], stride["cp"] * parts["cp_ep"]
    for axis in ("tp_kv", "tp_q"):
        fine[axis] = fine[axis] / parts[f"{axis}_ep"]
        stride[f"{axis}_ep"] = stride[axis] * fine[axis]
    fine |= parts


def free_grid(sizes: Mapping[str, Column], inside: Sequence[Mapping[str, Column]], num_rows: int) -> LayoutGrid:
    """Return a grid of axes with any names and no order: the size of each, and its members inside one domain of each tier."""
    one = np.ones(num_rows)
    return LayoutGrid(degree=dict.fromkeys(DEFAULT_ORDER, one), fine=sizes, inside=tuple(inside), hop=tuple(one for _ in inside))
