"""The sharding algebra: layouts, partial sums and the redistributions between them (rules R1-R12).

A sharding of an operator maps its dims to mesh axes. The layout of each of its tensors follows by restriction; an axis that
cuts a dim which a tensor lacks leaves the output, or the gradient of the input, partial on that axis. Where the layout that
one operator leaves is not the one that the next needs, collectives are due. Nothing here knows a form of parallelism by name.

Sizes do not occur: an axis of size one needs no case of its own, since (n - 1) / n is then zero. One exception: where a rule
set puts an axis outside another one on one side of an edge only (`[cp, tp]` against `[tp]`), the inner axis takes part in the
exchange (R10), and is counted even if the outer one has size one. No shipped rule set does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operand, Operator

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

#: Axes over which gradients may be partial without being data.
TENSOR_AXES = frozenset(AXIS_PARTS["tp"])

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
class Step:
    """One collective of a redistribution. The full buffer in the group is the tensor divided by the axes `remaining`
    (for all-to-all: the local buffer; R11)."""

    kind: CollectiveKind
    axes: frozenset[str]
    remaining: frozenset[str]


def check_sharding(operator: Operator, sharding: Sharding) -> None:
    """An axis occurs at most once in one operator, and cuts only what may be cut."""
    seen: dict[str, str] = {}
    for name, axes in sharding.items():
        if name not in operator.dims:
            raise InputError(f"operator {operator.name}: no dim {name!r}; use {', '.join(operator.dims)}")
        for axis in axes:
            if axis not in FINE_AXES:
                raise InputError(f"operator {operator.name}: axis {axis!r} on dim {name}: not a fine axis; use {', '.join(FINE_AXES)}")
            if axis in seen:
                raise InputError(
                    f"operator {operator.name}: axis {axis} cuts both {seen[axis]} and {name}: an axis may occur once; "
                    "change the rule set so that one of them is left whole"
                )
            seen[axis] = name
    for name in operator.whole:
        if sharding.get(name):
            raise InputError(
                f"operator {operator.name}: dim {name} is cut by {', '.join(sharding[name])}: it needs its rows whole; leave {name} whole"
            )


def input_layout(sharding: Sharding, operand: Operand) -> Layout:
    """What the operator needs: cut where it cuts a dim that the operand has, else whole (R3)."""
    return Layout(cuts=tuple(tuple(sharding.get(dim, ())) for dim in operand.dims))


def output_layout(operator: Operator, sharding: Sharding) -> Layout:
    """What the operator leaves: partial on axes that cut a dim which it sums plainly (R3).

    The loss reduces over a cut vocabulary itself (own traffic), so its output is whole.
    """
    partial = frozenset(axis for dim in operator.sums for axis in sharding.get(dim, ()))
    return Layout(cuts=tuple(tuple(sharding.get(dim, ())) for dim in operator.output.dims), partial=partial)


def gradient_layout(sharding: Sharding, operand: Operand) -> Layout:
    """How the gradient of an input leaves backward: partial on axes that cut a dim which the input lacks (R4).

    An axis that the operator does not use computes the same everywhere: its gradients are whole, not partial.
    """
    return Layout(cuts=tuple(tuple(sharding.get(dim, ())) for dim in operand.dims), partial=_axes_outside(sharding, operand))


def _axes_outside(sharding: Sharding, operand: Operand) -> frozenset[str]:
    return frozenset(axis for dim, axes in sharding.items() if dim not in operand.dims for axis in axes)


def redistribute(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The collectives from one layout to another, all axes of one kind merged (R8), in the order slice, reduce-scatter,
    all-to-all, all-reduce, all-gather (R9): shrink first, grow last.

    Cuts that two layouts share from the outermost one inwards stay. Inside them a position may only lose cuts or only get
    new ones; where it does both, its chunks are others than before and every axis involved must take part (R10): in an
    all-to-all if nothing is to be gathered there or an axis goes to or comes from another position, else in an all-gather
    of them all, from which each chip takes its part.
    """
    if target.partial - source.partial:
        raise AssertionError("a layout cannot become partial by communication")
    cuts = {axis: i for i, axes in enumerate(source.cuts) for axis in axes}
    goal = {axis: i for i, axes in enumerate(target.cuts) for axis in axes}
    partial = source.partial - target.partial
    exchanged = {axis for axis in cuts if axis in goal and goal[axis] != cuts[axis]}
    gathered = {axis for axis in cuts if axis not in goal}
    sliced = {axis for axis in goal if axis not in cuts and axis not in partial}
    for have, want in zip(source.cuts, target.cuts, strict=True):
        common = _common_prefix(have, want)
        lost, new = frozenset(have[common:]), frozenset(want[common:])
        if not lost or not new:
            continue
        if (lost | new) & exchanged or not lost & gathered:
            exchanged |= lost | new
        else:
            gathered |= (lost | new) - sliced
            sliced -= new  # after the gather
    current = set(cuts) | sliced
    steps: list[Step] = []
    scatter = frozenset(axis for axis in partial if axis in goal)
    if scatter:
        steps.append(Step(kind=CollectiveKind.REDUCE_SCATTER, axes=scatter, remaining=frozenset(current)))
        current |= scatter
    if exchanged:
        steps.append(Step(kind=CollectiveKind.ALL_TO_ALL, axes=frozenset(exchanged), remaining=frozenset(current)))
    reduce = partial - scatter
    if reduce:
        steps.append(Step(kind=CollectiveKind.ALL_REDUCE, axes=reduce, remaining=frozenset(current)))
    if gathered:
        current -= gathered
        steps.append(Step(kind=CollectiveKind.ALL_GATHER, axes=frozenset(gathered), remaining=frozenset(current)))
    return tuple(steps)


def _common_prefix(have: tuple[str, ...], want: tuple[str, ...]) -> int:
    """Number of outermost cuts that two positions share."""
    common = 0
    while common < min(len(have), len(want)) and have[common] == want[common]:
        common += 1
    return common


def sliced_towards(layout: Layout, goal: Layout) -> Layout:
    """The layout after all slices on the way to `goal` that need no communication: inside the cuts that it already has."""
    used = layout.cut_axes | layout.partial
    cuts = []
    for have, want in zip(layout.cuts, goal.cuts, strict=True):
        extra = want[len(have) :] if want[: len(have)] == have else ()
        taken = 0
        while taken < len(extra) and extra[taken] not in used:
            taken += 1
        cuts.append((*have, *extra[:taken]))
    return Layout(cuts=tuple(cuts), partial=layout.partial)


def join_gradients(gradients: list[Layout]) -> list[Layout]:
    """Gradients of one tensor from several consumers, added before they are reduced (R7).

    Of those with equal cuts one is left, partial wherever any of them is: the others are promoted from whole to partial
    (divided by n, free). What differs in its cuts is redistributed apart.
    """
    partial: dict[tuple[tuple[str, ...], ...], frozenset[str]] = {}
    for layout in gradients:
        partial[layout.cuts] = partial.get(layout.cuts, frozenset()) | layout.partial
    return [Layout(cuts=cuts, partial=axes) for cuts, axes in partial.items()]
