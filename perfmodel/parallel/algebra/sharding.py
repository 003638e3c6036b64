"""The sharding algebra: layouts, partial sums and the redistributions between them (rules R1-R12).

A sharding of an operator maps its dims to mesh axes. The layout of each of its tensors follows by restriction; an axis that
cuts a dim which a tensor lacks leaves the output, or the gradient of the input, partial on that axis. Where the layout that
one operator leaves is not the one that the next needs, collectives are due. Nothing here knows a form of parallelism by name.

Sizes do not occur: an axis of size one needs no case of its own, since (n - 1) / n is then zero. One exception: where a rule
set puts an axis outside another one on one side of an edge only (`[cp, tp]` against `[tp]`), the inner axis takes part in the
exchange (R10), and is counted even if the outer one has size one. No shipped rule set does this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.algebra.redistribution import collectives
from perfmodel.workload.graph import Operand, Operator

#: Axes that rule sets may name; tp is tp_kv x tp_q, so that it may exceed the number of key-value heads.
FINE_AXES = ("dp_replicate", "dp_shard", "cp", "tp_kv", "tp_q")
#: The axes of layouts, with those of graphs with experts.
MESH_AXES = (*FINE_AXES, *EXPERT_AXES)
#: Whole axes as products of fine ones, outermost first (R1).
AXIS_PARTS: Mapping[str, tuple[str, ...]] = {
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "cp": ("cp",),
    "tp": ("tp_kv", "tp_q"),
    "tp_kv": ("tp_kv",),
    "tp_q": ("tp_q",),
    **{name: (name,) for name in ("ep", "etp", "dp_rest", "cp_rest")},
}

#: Axes over which gradients may be partial without being data.
TENSOR_AXES = frozenset((*AXIS_PARTS["tp"], "tp_kv_ep", "tp_q_ep"))

#: dim name -> axes that cut it, outermost first
Sharding = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor lies on the mesh: the axes that cut each position, outermost first, and those on which it is a partial sum.

    An axis that occurs nowhere holds equal copies (replicated).
    """

    cuts: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    @property
    def cut_axes(self) -> frozenset[str]:
        return frozenset(axis for position in self.cuts for axis in position)

    def resolved(self) -> Layout:
        """The same with partial replaced by replicated: where a gradient must arrive (R4)."""
        return Layout(cuts=self.cuts)

    def __str__(self) -> str:
        parts = ["*".join(axes) if axes else "-" for axes in self.cuts]
        return f"[{', '.join(parts)}]" + (f" partial({', '.join(sorted(self.partial))})" if self.partial else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Layout of a tensor with several readers, and the axes on which the sum of their gradients is partial."""

    cuts: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    @property
    def layout(self) -> Layout:
        return Layout(cuts=self.cuts)

    @property
    def gradient(self) -> Layout:
        return Layout(cuts=self.cuts, partial=self.partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective of a redistribution. The full buffer in the group is the tensor divided by the axes `remaining`
    (for all-to-all: the local buffer; R11)."""

    kind: CollectiveKind
    axes: frozenset[str]
    remaining: frozenset[str]


def check_sharding(operator: Operator, sharding: Sharding, known: Collection[str] = MESH_AXES) -> None:
    """An axis of those that are known occurs at most once in one operator, and cuts only what may be cut."""
    seen: dict[str, str] = {}
    for name, axes in sharding.items():
        if name not in operator.dims:
            raise InputError(f"operator {operator.name}: no dim {name!r}; use {', '.join(operator.dims)}")
        for axis in axes:
            if axis not in known:
                raise InputError(f"operator {operator.name}: axis {axis!r} on dim {name}: not a fine axis; use {', '.join(known)}")
            if axis in seen:
                raise InputError(
                    f"operator {operator.name}: axis {axis} cuts both {seen[axis]} and {name}: an axis may occur once; "
                    "change the rule set so that one of them is left whole"
                )
            seen[axis] = name
    for name in operator.unsplit:
        if sharding.get(name):
            raise InputError(
                f"operator {operator.name}: dim {name} is cut by {', '.join(sharding[name])}: it needs its rows whole; leave {name} whole"
            )


def input_layout(sharding: Sharding, operand: Operand) -> Layout:
    """Layout that the operator needs of an input: cut where it cuts a dim of the operand, else whole (R3)."""
    return _layout(sharding, operand.dims)


def output_layout(operator: Operator, sharding: Sharding) -> Layout:
    """Layout of the operator's output: partial on axes that cut a dim which it sums (R3).

    The loss reduces over a cut vocabulary itself (own traffic), so its output is whole.
    """
    return _layout(sharding, operator.output.dims, operator.sums)


def gradient_layout(sharding: Sharding, operand: Operand) -> Layout:
    """How the gradient of an input leaves backward: partial on axes that cut a dim which the input lacks (R4).

    An axis that the operator does not use computes the same everywhere: its gradients are whole, not partial.
    """
    return _layout(sharding, operand.dims, lacking(operand, sharding))


def lacking(operand: Operand, dims: Iterable[str]) -> tuple[str, ...]:
    """Dims of an operator that an input lacks; its gradient is summed over them."""
    return tuple([dim for dim in dims if dim not in operand.dims])


def _layout(sharding: Sharding, dims: Sequence[str], summed: Sequence[str] = ()) -> Layout:
    cuts = tuple([tuple(sharding.get(dim, ())) for dim in dims])
    return Layout(cuts=cuts, partial=frozenset([axis for dim in summed for axis in sharding.get(dim, ())]))


def redistribute(source: Layout, target: Layout, *, is_set: bool = False) -> tuple[Step, ...]:
    """The collectives from one layout to another (`redistribution.collectives`), by names of axes, in whatever order these cut.

    is_set   of `Tensor`: axes that stay at a position cut the same there, whatever cuts come and go outside them
    """
    if target.partial - source.partial:
        raise AssertionError("a layout cannot become partial by communication")
    partial = source.partial - target.partial
    if not partial and source.cuts == target.cuts:
        return ()
    bits: dict[str, int] = {}

    def mask(axes: Iterable[str]) -> int:
        found = 0
        for axis in axes:
            found |= bits.setdefault(axis, 1 << len(bits))
        return found

    def names(mask: int) -> frozenset[str]:
        return frozenset(axis for axis, bit in bits.items() if mask & bit)

    have, want = [mask(axes) for axes in source.cuts], [mask(axes) for axes in target.cuts]
    if is_set:
        inside = [~(old & new) for old, new in zip(have, want, strict=True)]
    else:
        inside = [~mask(old[: _common_prefix(old, new)]) for old, new in zip(source.cuts, target.cuts, strict=True)]
    due = collectives(have, want, mask(partial), inside)
    return tuple(Step(kind=kind, axes=names(group), remaining=names(remaining)) for kind, group, remaining in due if group)


def _common_prefix(have: tuple[str, ...], want: tuple[str, ...]) -> int:
    """Number of outermost cuts that two positions share."""
    common = 0
    while common < min(len(have), len(want)) and have[common] == want[common]:
        common += 1
    return common


class Chunks(NamedTuple):
    """Chunks of a position that a chip holds: with a cut over `axes` those of all chips along `free`, and of these its part of a cut
    over `further`."""

    axes: tuple[str, ...]
    free: tuple[str, ...] = ()
    further: tuple[str, ...] = ()


def chunks_between(source: Layout, target: Layout, steps: Sequence[Step]) -> tuple[tuple[Chunks, Chunks], ...]:
    """Chunks of each position that a chip holds after the slices and the reduce-scatter of a redistribution, and after its all-to-all.

    Inside the cuts that two layouts share, a position that only loses cuts holds the chunks of axes already gone; one that only gets new
    ones those of axes still to come. One that does both (R10) takes the new cuts that cost nothing innermost, trades its chunks, and loses
    the innermost ones that are gathered.
    """
    axes_of = {step.kind: step.axes for step in steps}
    none = frozenset[str]()
    scatter = axes_of.get(CollectiveKind.REDUCE_SCATTER, none)
    exchange = axes_of.get(CollectiveKind.ALL_TO_ALL, none)
    gather = axes_of.get(CollectiveKind.ALL_GATHER, none)
    found = []
    for have, want in zip(source.cuts, target.cuts, strict=True):
        common = _common_prefix(have, want)
        lost, new = have[common:], want[common:]
        fresh = tuple(axis for axis in new if axis not in source.cut_axes)
        if not lost:
            found.append((Chunks(want, free=tuple(axis for axis in new if axis in exchange)), Chunks(want)))
        elif not new:
            found.append((Chunks(have), Chunks(have, free=tuple(axis for axis in lost if axis in exchange))))
        elif exchange.issuperset(lost + new):
            found.append((Chunks(have, further=fresh), Chunks(want, further=tuple(axis for axis in lost if axis in gather))))
        else:
            found.append((Chunks(have, further=tuple(axis for axis in fresh if axis in scatter)),) * 2)
    return tuple(found)


def sliced_towards(layout: Layout, goal: Layout) -> Layout:
    """The layout after all slices on the way to `goal` that need no communication: inside the cuts that it already has."""
    if layout.cuts == goal.cuts:
        return layout
    used = layout.cut_axes | layout.partial
    cuts = []
    for have, want in zip(layout.cuts, goal.cuts, strict=True):
        extra = want[len(have) :] if want[: len(have)] == have else ()
        taken = 0
        while taken < len(extra) and extra[taken] not in used:
            taken += 1
        cuts.append((*have, *extra[:taken]))
    return Layout(cuts=tuple(cuts), partial=layout.partial)


def ends_of_edge(left: Layout, held: Held | None, gradient: Layout) -> tuple[Layout, Layout]:
    """Where a reader takes a tensor from, and where the gradient that it leaves goes: to the producer whole, to a held tensor no more
    partial than the sum of gradients there."""
    if held is None:
        return left, left.resolved()
    return held.layout, Layout(cuts=held.cuts, partial=held.partial & gradient.partial)


def join_gradients(gradients: list[Layout]) -> list[Layout]:
    """Gradients of one tensor from several consumers, added before they are reduced (R7).

    Of those with equal cuts one is left, partial wherever any of them is: the others are promoted from whole to partial
    (divided by n, free). What differs in its cuts is redistributed apart.
    """
    partial: dict[tuple[tuple[str, ...], ...], frozenset[str]] = {}
    for layout in gradients:
        partial[layout.cuts] = partial.get(layout.cuts, frozenset()) | layout.partial
    return [Layout(cuts=cuts, partial=axes) for cuts, axes in partial.items()]
