"""The sharding algebra: layouts, partial sums and the redistributions between them (rules R1-R12).

A sharding of an operator maps its dims to mesh axes. The layout of each of its tensors follows by restriction. An axis that shards a dim
which a tensor lacks leaves the output, or the gradient of the input, partial on that axis. Where an operator leaves another layout than
the next one needs, collectives redistribute the tensor. No form of parallelism is a special case.

Sizes do not occur: an axis of size one needs no special case, since (n - 1) / n is then zero. One exception: a rule set may put an axis
outside another one on one side of an edge only (`[cp, tp]` against `[tp]`). The inner axis then takes part in the exchange (R10) and is
counted even if the outer one has size one. No shipped rule set does this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, repeat
from typing import Any, NamedTuple

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.workload.graph import Operand, Operator

#: Axes that rule sets may use; tp is tp_kv x tp_q, so that it may exceed the number of key-value heads.
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

#: Axes of tensor parallelism: gradients may be partial over them although they are no data axes.
TENSOR_AXES = frozenset((*AXIS_PARTS["tp"], "tp_kv_ep", "tp_q_ep"))

#: Dim name -> axes that shard it, outermost first.
Sharding = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a tensor on the mesh: the axes that shard each position, outermost first, and those on which it is a partial sum.

    The tensor is replicated over all other axes.
    """

    cuts: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    @property
    def cut_axes(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(self.cuts))

    def resolved(self) -> Layout:
        """Return the layout with partial axes replicated: the layout that a gradient must reach (R4)."""
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
    """One collective of a redistribution.

    remaining   axes by which the tensor is divided to give the full buffer of the group (for all-to-all: the local buffer; R11)
    """

    kind: CollectiveKind
    axes: frozenset[str]
    remaining: frozenset[str]


def check_sharding(operator: Operator, sharding: Sharding, known: Collection[str] = MESH_AXES) -> None:
    """Refuse unknown axes, an axis that occurs twice in one operator, and cuts of dims that must stay whole."""
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
    for name in operator.roles.unsplit:
        if sharding.get(name):
            raise InputError(
                f"operator {operator.name}: dim {name} is cut by {', '.join(sharding[name])}: it needs its rows whole; leave {name} whole"
            )


def input_layout(sharding: Sharding, operand: Operand) -> Layout:
    """Return the layout that the operator needs of an input: sharded where it shards a dim of the operand, else whole (R3)."""
    return _layout(sharding, operand.dims)


def output_layout(operator: Operator, sharding: Sharding) -> Layout:
    """Return the layout of the operator's output: partial on axes that shard a dim over which it sums (R3).

    The loss reduces over a sharded vocabulary itself (own traffic), so its output is whole.
    """
    return _layout(sharding, operator.output.dims, operator.roles.sums)


def gradient_layout(sharding: Sharding, operand: Operand) -> Layout:
    """Return the layout in which backward leaves the gradient of an input: partial on axes that shard a dim which the input lacks (R4).

    Ranks along an axis that the operator does not use compute the same, so gradients are replicated there, not partial.
    """
    return _layout(sharding, operand.dims, tuple(filterfalse(operand.dims.__contains__, sharding)))


def _layout(sharding: Sharding, dims: Sequence[str], summed: Sequence[str] = ()) -> Layout:
    cuts, partial = map(sharding.get, dims, repeat(())), map(sharding.get, summed, repeat(()))
    return Layout(cuts=tuple(cuts), partial=frozenset(chain.from_iterable(partial)))


def redistribute(source: Layout, target: Layout, *, is_set: bool = False) -> tuple[Step, ...]:
    """Return the collectives from one layout to another (`redistribution.collectives`), for named axes in any order.

    is_set   of `Tensor`: axes that stay at a position shard it in the same way, even if cuts outside them are added or removed
    """
    if target.partial - source.partial:
        raise AssertionError("a layout cannot become partial by communication")
    partial = source.partial - target.partial
    if not partial and source.cuts == target.cuts:
        return ()
    bits: dict[str, int] = {}
    for axis in chain(*source.cuts, *target.cuts, partial):
        bits.setdefault(axis, 1 << len(bits))
    have, want, inside = list[int](), list[int](), list[int]()
    for old, new in zip(source.cuts, target.cuts, strict=True):
        have.append(sum(map(bits.__getitem__, old)))
        want.append(sum(map(bits.__getitem__, new)))
        outer = old[: _common_prefix(old, new)]
        inside.append(~(have[-1] & want[-1] if is_set else sum(map(bits.__getitem__, outer))))
    steps = []
    for kind, group, remaining in collectives(have, want, sum(map(bits.__getitem__, partial)), inside):
        if group:
            moved = frozenset([axis for axis in bits if group & bits[axis]])
            steps.append(Step(kind=kind, axes=moved, remaining=frozenset([axis for axis in bits if remaining & bits[axis]])))
    return tuple(steps)


def _common_prefix(have: tuple[str, ...], want: tuple[str, ...]) -> int:
    """Return the number of outermost cuts that two positions share."""
    common = 0
    while common < min(len(have), len(want)) and have[common] == want[common]:
        common += 1
    return common


class HeldChunks(NamedTuple):
    """Chunks of a position that a chip holds.

    Of the cut over `axes` it holds the chunks of all chips along `free`, and of these its part of a cut over `further`.
    """

    axes: tuple[str, ...]
    free: tuple[str, ...] = ()
    further: tuple[str, ...] = ()


def chunks_between(source: Layout, target: Layout, steps: Sequence[Step]) -> tuple[tuple[HeldChunks, HeldChunks], ...]:
    """Return the chunks of each position that a chip holds after slices and reduce-scatter, and after the all-to-all.

    This is inside the common outer cuts of the two layouts. A position that only loses cuts holds the chunks of the axes that are already
    removed. One that only gets new cuts holds those of the axes that are still to be added. One that does both (R10) takes the free new
    cuts innermost, exchanges its chunks, and loses the innermost ones, which are gathered.
    """
    axes_of = {step.kind: step.axes for step in steps}
    none = frozenset[str]()
    scatter = axes_of.get(CollectiveKind.REDUCE_SCATTER, none)
    exchange = axes_of.get(CollectiveKind.ALL_TO_ALL, none)
    gather = axes_of.get(CollectiveKind.ALL_GATHER, none)
    chunks = []
    for have, want in zip(source.cuts, target.cuts, strict=True):
        common = _common_prefix(have, want)
        lost, new = have[common:], want[common:]
        fresh = tuple(axis for axis in new if axis not in source.cut_axes)
        if not lost:
            chunks.append((HeldChunks(want, free=tuple(axis for axis in new if axis in exchange)), HeldChunks(want)))
        elif not new:
            chunks.append((HeldChunks(have), HeldChunks(have, free=tuple(axis for axis in lost if axis in exchange))))
        elif exchange.issuperset(lost + new):
            chunks.append((HeldChunks(have, further=fresh), HeldChunks(want, further=tuple(axis for axis in lost if axis in gather))))
        else:
            chunks.append((HeldChunks(have, further=tuple(axis for axis in fresh if axis in scatter)),) * 2)
    return tuple(chunks)


def sliced_towards(layout: Layout, goal: Layout) -> Layout:
    """Return the layout after all slices towards `goal` that need no communication: those inside its present cuts."""
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
    """Return the layout from which a reader takes a tensor, and the layout to which its gradient goes.

    The producer needs the gradient whole; a held tensor needs it no more partial than the sum of gradients there.
    """
    if held is None:
        return left, left.resolved()
    return held.layout, Layout(cuts=held.cuts, partial=held.partial & gradient.partial)


def join_gradients(gradients: list[Layout]) -> list[Layout]:
    """Return the layouts of one tensor's gradients from several consumers, added before they are reduced (R7).

    Gradients with equal cuts become one, partial wherever any of them is: the others are promoted from whole to partial
    (divided by n, free). Gradients with different cuts are redistributed separately.
    """
    joined: dict[tuple[tuple[str, ...], ...], Layout] = {}
    for layout in gradients:
        known = joined.get(layout.cuts, layout)
        joined[layout.cuts] = layout if known is layout else Layout(cuts=layout.cuts, partial=known.partial | layout.partial)
    return [*joined.values()]


# --- collectives on bit masks (R8 to R10) -----------------------------------------------------------------------------

#: Axes as a bit mask: bit i is axis i of a list. An integer, or an array of integers of at least 32 bits; fewer than 31 axes. The functions
#: below use bit operators alone, so they take one layout (`redistribute`) or many at once (arrays that broadcast).
Mask = Any


class MaskedStep(NamedTuple):
    """One collective over `group`, issued where that is not empty.

    remaining   axes that shard the full buffer of the group; of an all-to-all the local buffer (R11)
    """

    kind: CollectiveKind
    group: Mask
    remaining: Mask


def differing(have: Mask, want: Mask) -> Mask:
    """Return the axes inside the common outer cuts of two positions; lower bits are outer axes."""
    differ = have ^ want
    return -(differ & -differ)


def _where_any(mask: Mask) -> Mask:
    """Return all bits where any is set, else none."""
    return -mask >> 31


def collectives(have: Sequence[Mask], want: Sequence[Mask], partial: Mask, inside: Sequence[Mask]) -> tuple[MaskedStep, ...]:
    """Return the collectives, all axes of one kind merged (R8).

    Their order is slice, reduce-scatter, all-to-all, all-reduce, all-gather (R9): shrink first, grow last.

    have, want   axes that shard each position, before and after
    partial      axes on which there is a partial sum before, and none after
    inside       for each position: all axes but those of the common outer cuts

    The common outer cuts of two layouts stay. Inside them a position may only lose cuts or only get new ones. Where it does both, its
    chunks change and every axis involved must take part (R10). It takes part in an all-to-all if nothing is gathered there, or if an
    axis moves to or from another position. Else all of them are all-gathered, and each chip takes its part.
    """
    cut = goal = stay = 0
    for old, new in zip(have, want, strict=True):
        cut, goal, stay = cut | old, goal | new, stay | old & new
    exchanged = cut & goal & ~stay
    gathered = cut & ~goal
    sliced = goal & ~cut & ~partial
    for old, new, inner in zip(have, want, inside, strict=True):
        lost, fresh = old & inner, new & inner
        both = _where_any(lost) & _where_any(fresh)
        if not (both if isinstance(both, int) else both.any()):
            continue
        moved = lost | fresh
        traded = both & (_where_any(moved & exchanged) | ~_where_any(lost & gathered))
        regathered = both & ~traded
        exchanged = exchanged | traded & moved
        gathered = gathered | regathered & moved & ~sliced
        sliced = sliced & ~(regathered & fresh)  # after the gather
    current = cut | sliced
    scattered = partial & goal
    shrunk = current | scattered
    return (
        MaskedStep(CollectiveKind.REDUCE_SCATTER, scattered, current),
        MaskedStep(CollectiveKind.ALL_TO_ALL, exchanged, shrunk),
        MaskedStep(CollectiveKind.ALL_REDUCE, partial & ~goal, shrunk),
        MaskedStep(CollectiveKind.ALL_GATHER, gathered, shrunk & ~gathered),
    )


# --- classes of collectives of activations ----------------------------------------------------------------------------

#: Communication of activations. Two tensor-parallel collectives of backward have their own class, because an independent matrix product
#: can overlap with them: the all-gather of a saved input (with the input's gradient), and the reduction of an input's gradient (with the
#: weight's gradient).
COMM = ("tensor_parallel", "context_parallel", "regather", "input_gradient", "expert_parallel")
#: Classes that are parts of a step; the other two are included in one of them.
SHOWN_COMM = ("tensor_parallel", "context_parallel", "expert_parallel")
#: The class that can overlap with the passes of another micro-batch, since no product of its own overlaps with it.
EXCHANGED = SHOWN_COMM[-1]
#: Axis between ranks with different sequences: only the traffic of experts crosses it.
_SEQUENCES_APART = frozenset(("dp_ep",))


def comm_class(axes: frozenset[str]) -> str:
    """Return the class of a collective: expert-parallel between sequences, tensor-parallel with any tp axis, else context-parallel."""

    if axes & _SEQUENCES_APART:
        return "expert_parallel"
    return "tensor_parallel" if axes & TENSOR_AXES else "context_parallel"
