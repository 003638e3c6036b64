"""Which collectives turn one layout into another, on sets of axes as bit masks (rules R8 to R10).

Bit i of a mask is axis i of a list. The same lines serve one layout (whole numbers) and very many at once (arrays that broadcast): they
use operators on bits alone. Who knows layouts by names asks `sharding.redistribute`, which asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perfmodel.foundation.collectives import CollectiveKind

#: A whole number, or an array of whole numbers of at least 32 bits; fewer than 31 axes.
Mask = Any


class MaskedStep(NamedTuple):
    """One collective over `group`, due where that is not empty. `remaining`: what cuts the full buffer in the group; of an all-to-all the
    local buffer (R11)."""

    kind: CollectiveKind
    group: Mask
    remaining: Mask


def differing(have: Mask, want: Mask) -> Mask:
    """Axes inside the cuts that two positions share, from the outermost axis inwards; lower bits are outer axes."""
    differ = have ^ want
    return -(differ & -differ)


def _where_any(mask: Mask) -> Mask:
    """All bits where any is set, else none."""
    return -mask >> 31


def collectives(have: Sequence[Mask], want: Sequence[Mask], partial: Mask, inside: Sequence[Mask]) -> tuple[MaskedStep, ...]:
    """All axes of one kind merged (R8), in the order slice, reduce-scatter, all-to-all, all-reduce, all-gather (R9): shrink
    first, grow last.

    have, want   axes that cut each position, before and after
    partial      axes on which there is a partial sum before, and none after
    inside       for each position: all axes but those of the cuts that both share from the outermost one inwards

    Cuts that two layouts share from the outermost one inwards stay. Inside them a position may only lose cuts or only get
    new ones; where it does both, its chunks are others than before and every axis involved must take part (R10): in an
    all-to-all if nothing is to be gathered there or an axis goes to or comes from another position, else in an all-gather
    of them all, from which each chip takes its part.
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
