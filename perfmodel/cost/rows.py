"""Timed rows: one row with symbolic sizes for each piece of an operator's work and each collective of activations.

Every size is an *amount*: base * |batch dim| * seq_len ** power / parts * ceil(padded / |padded axes|) / |axes|. Rows are independent of
what the axes are: those of a layout, of a free mesh, or of one operator's configurations, whose axes are its dims. `cost/evaluate.py`
evaluates rows on columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, starmap
from operator import attrgetter, itemgetter

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.compute import AttentionBehaviour
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.copies import Copies
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.options import HEAD_TAIL
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import COLLECTIVE_CODE, KERNEL_CODE, KernelClass
from perfmodel.parallel.algebra.derive import Amount, amount_of, extent_amount
from perfmodel.parallel.algebra.sharding import TENSOR_AXES, Sharding
from perfmodel.workload.graph import Graph, Operator, TensorRole
from perfmodel.workload.work import CacheAttention, Data, Extent, FusedAttention, Product, RoutedExperts, Stream, Work

DATA_AXES = frozenset(("dp_replicate", "dp_shard"))

#: Data axes and the part of them that experts may take: a micro-batch is counted for each of their ranks.
BATCH_AXES = DATA_AXES | {"dp_ep"}

#: Sizes of a product [m, k] x [k, n].
PRODUCT = ("batch", "m", "n", "k")
_ATTENTION = ("batch", "heads", "kv_heads", "queries", "keys")
#: Sizes of a piece of work that are columns of its row.
_SIZES: dict[type, tuple[str, ...]] = {Product: PRODUCT, FusedAttention: _ATTENTION, CacheAttention: ("heads", "kv_heads")}
#: Kind of rows -> their columns.
_COLUMNS = {
    **dict.fromkeys(("matmul", "grouped", "low", "low_grouped", "convolution"), (*PRODUCT, "mesh")),
    "attention": (*_ATTENTION, "head_dim", "value_head_dim", "behaviour", "backward"),
    "streaming": ("kernel", "elements", "mesh", "backward", "fused", "element_flops", "across"),
    "traffic": ("kind", "group", "amount", "copies", "counted"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Amounts:
    """[amounts, 1] arrays; axes as indices into `masks`, batch into `batch_dims` (0: none).

    length_power   power of the sequence length
    parts          number of parts that a token is divided into; None: no amount divides it
    times          axes that multiply; None: there are none
    """

    base: NDArray[np.float64]
    batch: NDArray[np.int64]
    batch_dims: tuple[str, ...]
    length_power: NDArray[np.int64]
    parts: NDArray[np.float64] | None
    axes: NDArray[np.int64]
    padded_size: NDArray[np.float64]
    padded_axes: NDArray[np.int64]
    masks: tuple[frozenset[str], ...]
    times: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one kind, sorted by segment; `starts` and `present` are for reduceat. `repeats` [rows, 1]: number of runs; None: one each.

    accesses   amounts of each row, from `access_starts` on: what a streaming row reads or writes, the tensors of a convolution, n of each
               product of a fused call
    """

    names: tuple[str, ...]
    segments: NDArray[np.int64]
    starts: NDArray[np.intp]
    present: NDArray[np.int64]
    columns: dict[str, NDArray[np.int64]]
    repeats: NDArray[np.float64] | None
    accesses: NDArray[np.int64]
    access_starts: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRow:
    """Attention to a KV cache; heads and kv_heads are amounts."""

    name: str
    segment: int
    heads: int
    kv_heads: int
    work: CacheAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRow:
    """The experts of a layer."""

    name: str
    segment: int
    work: RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedRows:
    """Rows that take time. A segment is the unit by which times are summed.

    matmul, grouped, low, low_grouped, convolution   columns batch, m, n, k (amounts), mesh
    attention   columns batch, heads, kv_heads, queries, keys (amounts), head_dim, value_head_dim, behaviour (index into
                `attention_behaviours`), backward (0/1)
    cached, experts   rows of the operators of a serving step
    streaming   columns kernel (code), elements (amount), mesh, backward (0/1: the class's own backward kernel), fused (0/1: a neighbour
                has the kernel's floor), element_flops, across (mask: the row counts only if this group has more than one rank; 0: always)
                mesh: mask of the tensor axes that shard an operator with parameters; a framework that keeps such tensors as
                distributed objects spends host time on each
    traffic     columns kind (code), group (mask), amount, copies (0: none, else index into `copies`, from 1), counted (1: the host waits
                for the sizes); it has its own segments
    activation_bytes   bytes of an element of products and of attention
    has_sends          some traffic is between neighbours only
    """

    amounts: Amounts
    matmul: Rows
    grouped: Rows
    low: Rows
    low_grouped: Rows
    convolution: Rows
    attention: Rows
    cached: tuple[CachedRow, ...]
    experts: tuple[ExpertsRow, ...]
    streaming: Rows
    traffic: Rows
    copies: tuple[Copies, ...]
    activation_bytes: float
    attention_behaviours: tuple[AttentionBehaviour, ...]
    attention_kernel: str
    num_segments: int
    num_traffic_segments: int
    has_sends: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    segment: int
    name: str
    columns: Mapping[str, int]
    repeats: int = 1
    accesses: Sequence[int] = ()

    def joined(self, name: str, n: int) -> _Entry:
        """Return the entry with one more product in its fused call."""
        accesses = (*(self.accesses or (self.columns["n"],)), n)
        return _Entry(self.segment, f"{self.name} + {name}", self.columns, self.repeats, accesses)


@dataclass(slots=True)
class RowCompiler:
    """Collects rows of the operators of a graph.

    activation_bytes   bytes of an element, if neither the operator nor its tensor sets them
    data_axes          axes that shard the batch anywhere
    """

    graph: Graph
    profile: ExecutionProfile
    activation_bytes: float
    data_axes: frozenset[str] = DATA_AXES
    _masks: dict[frozenset[str], int] = field(default_factory=partial(dict, {frozenset(): 0}))
    _amounts: dict[Amount, int] = field(default_factory=dict)
    _known: dict[Amount, int] = field(default_factory=dict)
    """Indices of amounts as they were requested, before their data axes cancel."""
    _extents: dict[tuple[str, Extent], Amount] = field(default_factory=dict)
    _meshes: dict[str, int] = field(default_factory=dict)
    _copies: dict[Copies, int] = field(default_factory=dict)
    _behaviours: dict[AttentionBehaviour, int] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)
    _entries: defaultdict[str, list[_Entry]] = field(default_factory=partial(defaultdict, list))
    """By the kind of rows: the field of `TimedRows`."""
    _cached: list[CachedRow] = field(default_factory=list)
    _experts: list[ExpertsRow] = field(default_factory=list)

    # --- amounts ----------------------------------------------------------------------------------------------------------------------

    def mask(self, axes: frozenset[str]) -> int:
        return self._masks.setdefault(axes, len(self._masks))

    def amount(self, amount: Amount) -> int:
        """Return the index of an amount."""
        if amount not in self._known:
            cancelled = amount
            if amount.batch_dim:
                if not amount.axes >= DATA_AXES:
                    raise InputError("rules: batch must be cut by dp_replicate and dp_shard, both; add `batch: [dp_replicate, dp_shard]`")
                # the micro-batch is per data-parallel rank, so these axes cancel; an axis that does not shard the tensor multiplies it
                cancelled = amount.on_axes(amount.axes - self.data_axes, times=self.data_axes - amount.axes)
            self._known[amount] = self._amounts.setdefault(cancelled, len(self._amounts))
        return self._known[amount]

    def data_amount(self, op: Operator, sharding: Sharding, data: Data) -> Amount:
        """Return the bytes that an operator reads, writes or keeps."""
        itemsize = data.itemsize
        if not itemsize and data.of is not None:
            itemsize = self.graph.tensors[op.operands[data.of].tensor].itemsize
        return self.elements(op, sharding, data.extent).scaled(itemsize or self.activation_bytes)

    def elements(self, op: Operator, sharding: Sharding, extent: Extent) -> Amount:
        """Return the elements of an operator's extent, computed once: its passes have many extents in common."""
        key = op.name, extent
        if key not in self._extents:
            self._extents[key] = extent_amount(op, sharding, extent)
        return self._extents[key]

    # --- rows -------------------------------------------------------------------------------------------------------------------------

    def work(self, op: Operator, sharding: Sharding, work: Work, *, segment: int, name: str, is_backward: bool) -> None:
        """Add a piece of an operator's work."""
        columns: dict[str, int] = {}
        for size in _SIZES.get(type(work), ()):
            columns[size] = self.amount(self.elements(op, sharding, getattr(work, size)))
        match work:
            case Product():
                columns["mesh"] = self._mesh(op, sharding)
                tensors = [self.amount(self.elements(op, sharding, t).scaled(self.activation_bytes)) for t in work.tensors]
                usual, low = ("grouped", "low_grouped") if work.is_grouped else ("matmul", "low")
                rows = self._entries["convolution" if tensors else low if work.is_low else usual]
                if work.call in self._calls:
                    index = self._calls[work.call]
                    rows[index] = rows[index].joined(name, columns["n"])
                    return
                if work.call:
                    self._calls[work.call] = len(rows)
                rows.append(_Entry(segment, name, columns, work.repeats, tensors))
                if work.is_grouped:
                    self._add_to_gradient(op, sharding, work, segment=segment)
            case FusedAttention():
                behaviour = AttentionBehaviour(
                    mask=work.mask,
                    is_head_tail=self.profile.communication.context_chunks == HEAD_TAIL,
                    shared_rate_fraction=self.profile.kernels.context_attention_rate_fraction,
                )
                which = self._behaviours.setdefault(behaviour, len(self._behaviours))
                others = {"head_dim": work.head_dim, "value_head_dim": work.value_head_dim or work.head_dim}
                others |= {"behaviour": which, "backward": int(is_backward)}
                self._entries["attention"].append(_Entry(segment, name, {**columns, **others}))
            case CacheAttention():
                self._cached.append(CachedRow(name=name, segment=segment, **columns, work=work))
            case RoutedExperts():
                self._experts.append(ExpertsRow(name=name, segment=segment, work=work))
            case Stream() if work.accesses:
                accesses = [self.data_amount(op, sharding, data) for data in work.accesses]
                elements = self.elements(op, sharding, work.elements)
                self.stream(
                    op,
                    sharding,
                    work.kernel,
                    elements,
                    accesses,
                    segment=segment,
                    is_backward=is_backward,
                    repeats=work.repeats,
                    is_fused=work.is_fused,
                    element_flops=work.element_flops,
                    only_across=work.only_across,
                )

    def _add_to_gradient(self, op: Operator, sharding: Sharding, work: Product, *, segment: int) -> None:
        """Add the traffic of a product that accumulates weight gradients (read and write) in addition to that of writing them once.

        It is negligible for one weight that all rows share; experts have few rows each.
        """
        target = None if work.gradient_of is None else self.graph.tensors[op.inputs[work.gradient_of].tensor]
        if target is None or target.role is not TensorRole.PARAMETER or not self.profile.kernels.fuses_gradient_accumulation:
            return
        accumulator = 4.0 if self.profile.state.accumulate_dtype == "fp32" else self.activation_bytes
        elements = self.elements(op, sharding, (*work.batch, *work.m, *work.n))
        more = elements.scaled(2.0 * accumulator - self.activation_bytes)
        self.stream(op, sharding, "add", elements, [more], segment=segment, is_backward=True)

    def stream(
        self,
        op: Operator,
        sharding: Sharding,
        kernel: str,
        elements: Amount,
        accesses: Sequence[Amount],
        *,
        segment: int,
        is_backward: bool,
        repeats: int = 1,
        is_fused: bool = False,
        element_flops: float = 0.0,
        only_across: frozenset[str] = frozenset(),
    ) -> None:
        """Add a pass over memory."""
        columns = {
            "kernel": KERNEL_CODE[KernelClass(kernel)],
            "elements": self.amount(elements),
            "mesh": self._mesh(op, sharding),
            "backward": int(is_backward),
            "fused": int(is_fused),
            "element_flops": round(element_flops),
            "across": self.mask(only_across),
        }
        self._entries["streaming"].append(_Entry(segment, op.name, columns, repeats, [*map(self.amount, accesses)]))

    def added_gradient(self, reader: Operator, sharding: Sharding, position: int, *, segment: int) -> None:
        """Add the accumulation of an input gradient to the gradients of earlier readers: two reads and a write."""
        gradient = amount_of(reader, sharding, reader.inputs[position].dims)
        num_bytes = gradient.scaled(self.graph.tensors[reader.inputs[position].tensor].itemsize)
        self.stream(reader, sharding, "add", gradient, [num_bytes] * 3, segment=segment, is_backward=True)

    def collective(
        self,
        kind: CollectiveKind,
        axes: frozenset[str],
        amount: Amount,
        *,
        segment: int,
        name: str,
        repeats: int = 1,
        copies: Copies | None = None,
        is_counted: bool = False,
    ) -> None:
        """Add a collective of activations."""
        columns = {"kind": COLLECTIVE_CODE[kind], "group": self.mask(axes), "amount": self.amount(amount)}
        columns["counted"] = int(is_counted)
        columns["copies"] = 0 if copies is None else self._copies.setdefault(copies, len(self._copies) + 1)
        self._entries["traffic"].append(_Entry(segment, name, columns, repeats))

    def _mesh(self, op: Operator, sharding: Sharding) -> int:
        """Return the mask of the tensor axes that shard an operator with parameters."""
        if op.name not in self._meshes:
            axes = frozenset[str]()
            for operand in op.inputs:
                if self.graph.tensors[operand.tensor].role is TensorRole.PARAMETER:
                    axes = TENSOR_AXES.intersection(chain(*sharding.values()))
            self._meshes[op.name] = self.mask(axes)
        return self._meshes[op.name]

    # --- arrays -----------------------------------------------------------------------------------------------------------------------

    def rows(self, *, attention_kernel: str, num_segments: int, num_traffic_segments: int) -> TimedRows:
        """Return all rows as arrays. Call it when all amounts are registered."""
        for kind in ("matmul", "low") if self._calls else ():
            entries_of_kind = self._entries[kind]
            if any(entry.accesses for entry in entries_of_kind):  # each with the n of all products of its call
                self._entries[kind] = [
                    entry if entry.accesses else replace(entry, accesses=(entry.columns["n"],)) for entry in entries_of_kind
                ]
        entries: dict[str, Rows] = {}
        for kind, columns in _COLUMNS.items():
            entries[kind] = _rows(self._entries[kind], columns)
        amounts = list(self._amounts)
        batch_dims = {"": 0}
        batch = [batch_dims.setdefault(a.batch_dim, len(batch_dims)) for a in amounts]
        axes = np.array([self.mask(a.axes) for a in amounts], dtype=np.int64)
        times = [self.mask(a.times) for a in amounts]
        padded_axes = np.array([self.mask(a.padded_axes) for a in amounts], dtype=np.int64)
        parts = np.array([float(a.parts) for a in amounts])[:, None]
        arrays = Amounts(
            base=np.array([a.base for a in amounts])[:, None],
            batch=np.array(batch, dtype=np.int64),
            batch_dims=tuple(batch_dims),
            length_power=np.array([a.length_power for a in amounts], dtype=np.int64),
            parts=parts if (parts > 1.0).any() else None,
            axes=axes,
            padded_size=np.array([a.padded_size for a in amounts])[:, None],
            padded_axes=padded_axes,
            masks=tuple(self._masks),
            times=np.array(times, dtype=np.int64) if any(times) else None,
        )
        return TimedRows(
            **entries,
            amounts=arrays,
            cached=tuple(self._cached),
            experts=tuple(self._experts),
            copies=tuple(self._copies),
            activation_bytes=self.activation_bytes,
            attention_behaviours=tuple(self._behaviours),
            attention_kernel=attention_kernel,
            num_segments=num_segments,
            num_traffic_segments=num_traffic_segments,
            has_sends=bool((entries["traffic"].columns["kind"] == COLLECTIVE_CODE[CollectiveKind.SEND_RECV]).any()),
        )


def plain_rows(entries: Sequence[tuple[int, str, dict[str, int]]], columns: Sequence[str]) -> Rows:
    """Return rows of (segment, name, columns) without repeats or accesses."""
    return _rows([*starmap(_Entry, entries)], columns)


def _rows(entries: Sequence[_Entry], columns: Sequence[str]) -> Rows:
    """Return rows sorted by segment (stable)."""
    entries = sorted(entries, key=attrgetter("segment"))
    segments = np.array([entry.segment for entry in entries], dtype=np.int64)
    starts = np.flatnonzero(np.diff(segments, prepend=-1))
    accesses = [index for entry in entries for index in entry.accesses]
    values = np.array([*map(itemgetter(*columns), [entry.columns for entry in entries])], dtype=np.int64).reshape(-1, len(columns)).T
    repeats = np.array([[float(entry.repeats)] for entry in entries])
    return Rows(
        names=tuple([entry.name for entry in entries]),
        segments=segments,
        starts=starts,
        present=segments[starts],
        columns=dict(zip(columns, values, strict=True)),
        repeats=repeats if (repeats != 1.0).any() else None,
        accesses=np.array(accesses, dtype=np.int64),
        access_starts=np.array([0, *accumulate([len(entry.accesses) for entry in entries[:-1]])] if accesses else [], dtype=np.intp),
    )


__all__ = ["PRODUCT", "Amounts", "CachedRow", "ExpertsRow", "RowCompiler", "Rows", "TimedRows", "plain_rows"]
