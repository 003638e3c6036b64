"""Selection from a stream of costs: the k smallest, and the Pareto front of two costs. Arrays only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(slots=True)
class Smallest:
    """The `count` smallest values of all offered blocks, with their ids and companion values; ties go to the smaller id."""

    count: int
    values: Array = field(default_factory=lambda: np.empty(0))
    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    companions: Array = field(default_factory=lambda: np.empty(0))

    @property
    def bound(self) -> float:
        """Largest value that would be kept."""
        return float(self.values[-1]) if len(self.values) == self.count else np.inf

    def offer(self, values: Array, ids: int | Ids, companions: Array | None = None) -> None:
        """Offer a flat block with these ids, or with consecutive ids from this one; infinite values are never kept.

        companions: another quantity of the same entries, kept with them; the values themselves if left out
        """
        bound = self.bound
        positions = np.flatnonzero(values <= bound) if np.isfinite(bound) else np.flatnonzero(np.isfinite(values))
        if len(positions) == 0:
            return
        candidates = values[positions]
        if len(positions) > 4 * self.count:
            keep = np.argpartition(candidates, self.count - 1)[: self.count]
            edge = candidates[keep].max()
            keep = np.flatnonzero(candidates <= edge)
            positions, candidates = positions[keep], candidates[keep]
        merged = np.concatenate([self.values, candidates])
        ids = np.concatenate([self.ids, _picked(ids, positions)])
        others = np.concatenate([self.companions, (values if companions is None else companions)[positions]])
        order = np.lexsort((ids, merged))[: self.count]
        self.values, self.ids, self.companions = merged[order], ids[order], others[order]


@dataclass(slots=True)
class Front:
    """Pareto front of two costs over all offered blocks: no other point is at most as large in both and smaller in one.

    Points are first compared with the best `first` cost in coarse bins of the second. This table look-up rejects nearly all of them; the
    rest are compared exactly.
    """

    low: float
    high: float
    num_bins: int = 512
    first: Array = field(default_factory=lambda: np.empty(0))
    second: Array = field(default_factory=lambda: np.empty(0))
    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    best: Array = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        # best[i]: smallest first cost of a kept point in a bin below i
        self.best = np.full(self.num_bins + 1, np.inf)

    def may_take(self, first: Array, second: Array) -> NDArray[np.bool_]:
        """Return whether a point with these costs may be kept."""
        return np.asarray(first < self.best[self._bins(second)])

    def offer(self, first: Array, second: Array, ids: int | Ids) -> None:
        """Offer flat blocks of both costs, with ids as in `Smallest`; entries with an infinite first cost are left out."""
        positions = np.flatnonzero(self.may_take(first, second))
        if len(positions) == 0:
            return
        first = np.concatenate([self.first, first[positions]])
        second = np.concatenate([self.second, second[positions]])
        ids = np.concatenate([self.ids, _picked(ids, positions)])
        order = np.lexsort((ids, second, first))
        running = np.minimum.accumulate(second[order])
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = second[order][1:] < running[:-1]
        chosen = order[keep]
        self.first, self.second, self.ids = first[chosen], second[chosen], ids[chosen]
        kept = self._bins(self.second)
        in_bin = np.full(self.num_bins, np.inf)
        np.minimum.at(in_bin, kept, self.first)
        self.best[1:] = np.minimum.accumulate(in_bin)

    def _bins(self, second: Array) -> NDArray[np.int32]:
        scale = self.num_bins / (self.high - self.low)
        return np.minimum(np.maximum((second - self.low) * scale, 0.0), self.num_bins - 1.0).astype(np.int32)


def front_of(first: Array, second: Array) -> Ids:
    """Return the indices of the points that no other dominates, by increasing first cost."""
    front = Front(low=0.0, high=float(second.max(initial=1.0)))
    front.offer(first, second, 0)
    return front.ids


def _picked(ids: int | Ids, positions: Ids) -> Ids:
    return ids + positions if isinstance(ids, int) else ids[positions]
