"""The sharding algebra: layouts, partial sums and the redistributions between them (rules R1-R12).

A sharding of an operator maps its dims to mesh axes. The layout of each of its tensors follows by restriction; an axis that
cuts a dim which a tensor lacks leaves the output, or the gradient of the input, partial on that axis. Where the layout that
one operator leaves is not the one that the next needs, collectives are due. Nothing here knows a form of parallelism by name.

Sizes do not occur: an axis of size one needs no case of its own, since (n - 1) / n is then zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.errors import InputError
from perfmodel.workload.operator import Operand, Operator, OperatorKind

#: Axes that rule sets may name; tp is tp_kv x tp_q, so that it may exceed the number of key-value heads.
FINE_AXES = ("dp_replicate", "dp_shard", "cp", "tp_kv", "tp_q")
#: Whole axes as products of fine ones, outermost first (R1).
AXIS_PARTS: Mapping[str, tuple[str, ...]] = {
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "cp": ("cp",),
    "tp": ("tp_kv", "tp_q"),
    "tp_kv": ("tp_kv",),
    "tp_q": ("tp_q",),
}

#: dim name -> axes that cut it, outermost first
Sharding = Mapping[str, tuple[str, ...]]


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


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
class Step:
    """One collective of a redistribution. The full buffer in the group is the tensor divided by the axes `remaining`
    (for all-to-all: the local buffer; R11)."""

    kind: Collective
    axes: frozenset[str]
    remaining: frozenset[str]


def check_sharding(operator: Operator, sharding: Sharding) -> None:
    """An axis occurs at most once in one operator, and cuts only what may be cut."""
    seen: dict[str, str] = {}
    for name, axes in sharding.items():
        operator.dim(name)
        for axis in axes:
            if axis not in FINE_AXES:
                raise InputError(f"operator {operator.name}: axis {axis!r} on dim {name}: not a fine axis; use {', '.join(FINE_AXES)}")
            if axis in seen:
                raise InputError(
                    f"operator {operator.name}: axis {axis} cuts both {seen[axis]} and {name}: an axis may occur once; "
                    "change the rule set so that one of them is left whole"
                )
            seen[axis] = name
    if operator.kind is OperatorKind.ATTENTION or operator.kernel_class == "softmax":
        for name in (*operator.reduced_dims, *(("d",) if operator.kind is OperatorKind.ATTENTION else ())):
            if sharding.get(name):
                raise InputError(
                    f"operator {operator.name}: dim {name} is cut by {sharding[name]}: it needs its rows whole; leave {name} whole"
                )


def input_layout(operator: Operator, sharding: Sharding, operand: Operand) -> Layout:
    """What the operator needs: cut where it cuts a dim that the operand has, else whole (R3)."""
    return Layout(cuts=tuple(tuple(sharding.get(dim, ())) for dim in operand.dims))


def output_layout(operator: Operator, sharding: Sharding) -> Layout:
    """What the operator leaves: partial on axes that cut a dim which the output lacks (R3).

    The loss reduces over a cut vocabulary itself (own rule), so its output is whole.
    """
    operand = operator.output
    partial: frozenset[str] = frozenset()
    if operator.kind in (OperatorKind.EINSUM, OperatorKind.EMBEDDING):
        partial = _axes_outside(sharding, operand)
    return Layout(cuts=tuple(tuple(sharding.get(dim, ())) for dim in operand.dims), partial=partial)


def gradient_layout(operator: Operator, sharding: Sharding, operand: Operand) -> Layout:
    """How the gradient of an input leaves backward: partial on axes that cut a dim which the input lacks (R4).

    An axis that the operator does not use computes the same everywhere: its gradients are whole, not partial.
    """
    return Layout(cuts=tuple(tuple(sharding.get(dim, ())) for dim in operand.dims), partial=_axes_outside(sharding, operand))


def _axes_outside(sharding: Sharding, operand: Operand) -> frozenset[str]:
    return frozenset(axis for dim, axes in sharding.items() if dim not in operand.dims for axis in axes)


def redistribute(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The collectives from one layout to another, all axes of one kind merged (R8), in the order slice, reduce-scatter,
    all-to-all, all-reduce, all-gather (R9): shrink first, grow last."""
    if target.partial - source.partial:
        raise AssertionError("a layout cannot become partial by communication")
    cuts = {axis: i for i, axes in enumerate(source.cuts) for axis in axes}
    goal = {axis: i for i, axes in enumerate(target.cuts) for axis in axes}
    partial = source.partial - target.partial
    moved: set[str] = set()
    gathered: set[str] = set()
    for position, (have, want) in enumerate(zip(source.cuts, target.cuts, strict=True)):
        common = 0
        while common < min(len(have), len(want)) and have[common] == want[common]:
            common += 1
        rest = have[common:]
        stays = [axis for axis in rest if goal.get(axis) == position]
        leaves = [axis for axis in rest if axis not in goal]
        moved.update(axis for axis in rest if axis in goal and goal[axis] != position)
        if stays and leaves and rest.index(leaves[0]) < rest.index(stays[-1]):
            # gathering an outer axis alone would interleave chunks: gather both, then slice (R10)
            gathered.update(stays)
        elif stays and [axis for axis in rest if axis in stays] != [axis for axis in want[common:] if axis in stays]:
            moved.update(stays)  # the same axes in another order: S(d: a,b) -> S(d: b,a)
        gathered.update(leaves)
    current = set(cuts)
    current |= {axis for axis in goal if axis not in cuts and axis not in partial}  # a slice is free
    steps: list[Step] = []
    scatter = frozenset(axis for axis in partial if axis in goal)
    if scatter:
        steps.append(Step(kind=Collective.REDUCE_SCATTER, axes=scatter, remaining=frozenset(current)))
        current |= scatter
    if moved:
        steps.append(Step(kind=Collective.ALL_TO_ALL, axes=frozenset(moved), remaining=frozenset(current)))
    reduce = partial - scatter
    if reduce:
        steps.append(Step(kind=Collective.ALL_REDUCE, axes=reduce, remaining=frozenset(current)))
    if gathered:
        current -= gathered
        steps.append(Step(kind=Collective.ALL_GATHER, axes=frozenset(gathered), remaining=frozenset(current)))
    return tuple(steps)


def join_gradients(gradients: list[Layout]) -> list[Layout]:
    """Gradients of one tensor from several consumers, added before they are reduced (R7).

    Where one is partial on an axis, whole ones are promoted to partial (divided by n, free); equal layouts then add up to
    one. What is left differs in its cuts and is redistributed apart.
    """
    promoted = frozenset(axis for layout in gradients for axis in layout.partial)
    joined: list[Layout] = []
    for layout in gradients:
        cut = layout.cut_axes
        one = Layout(cuts=layout.cuts, partial=layout.partial | frozenset(axis for axis in promoted if axis not in cut))
        if one not in joined:
            joined.append(one)
    return joined
