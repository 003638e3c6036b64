"""Collectives that turn one layout into another, on sets of axes as bit masks (rules R8 to R10).

Bit i of a mask is axis i of a list. The functions use bit operators alone, so they take one layout (integers) or many at once (arrays that
broadcast). `sharding.redistribute` takes layouts with named axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perfmodel.foundation.collectives import CollectiveKind

#: An integer, or an array of integers of at least 32 bits; fewer than 31 axes.
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
