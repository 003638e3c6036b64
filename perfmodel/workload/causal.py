"""Share of the score matrix that causal attention computes, for all queries or a part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.foundation.columns import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalMask:
    """A causal mask: a query attends to earlier keys, in some layers only to a sliding window or to its own chunk.

    window_fraction     W  most keys that a query of the windowed layers attends to, over the sequence; 1: all earlier ones. One value
                           per length where it is an array
    windowed_fraction      share of layers with that window
    is_chunked             windows do not slide: the sequence is split into chunks of W that do not attend to each other
    """

    window_fraction: Column = 1.0
    windowed_fraction: float = 0.0
    is_chunked: bool = False

    @property
    def fraction(self) -> Any:
        """Computed share of the full square: 1/2, W - W^2 / 2 in layers with a window, W / 2 in layers with chunks."""
        return self.seen(0.0, 1.0)

    @property
    def visible(self) -> Any:
        """Share of all keys within a query's window, causal or not: 1, or W in layers with a window."""
        return self.windowed_fraction * self.window_fraction + (1.0 - self.windowed_fraction)

    def seen(self, start: Column, stop: Column) -> Any:
        """Return the mean share of all keys that queries from `start` to `stop` (shares of the sequence) attend to.

        The mean of min(x, W) over [start, stop]; with chunks, of x mod W.
        """
        unwindowed = _mean_of_least(start, stop, 1.0)
        if not self.windowed_fraction:
            return unwindowed
        if self.is_chunked:
            windowed = (_area_in_chunks(stop, self.window_fraction) - _area_in_chunks(start, self.window_fraction)) / (stop - start)
        else:
            windowed = _mean_of_least(start, stop, self.window_fraction)
        return self.windowed_fraction * windowed + (1.0 - self.windowed_fraction) * unwindowed

    def seen_by_slowest(self, num_ranks: Column, *, head_tail: bool) -> Any:
        """Return `seen` of the rank that computes the most, where `num_ranks` share the queries.

        Contiguous split: the last rank, with (1 - 1 / (2 n)) of all keys, 2 - 1/n times the mean. Head-tail split (rank r has the r-th of 2
        n chunks from either end): all ranks compute the mean without a window. With a window, the rank with the two middle chunks computes
        the most. With chunks, the head-tail split balances too, because chunks end where the sequence does.
        """
        n = num_ranks
        if head_tail and self.is_chunked:
            return self.seen(0.0, 1.0) + 0.0 * n
        if head_tail:
            return self.seen(0.5 - 0.5 / n, 0.5 + 0.5 / n)
        return self.seen(1.0 - 1.0 / n, 1.0)


ALL_BEFORE = CausalMask()


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalWindow:
    """Keys that a causal query attends to, for any sequence length.

    window             most recent keys that it attends to, in `windowed_fraction` of the layers; 0: all earlier ones
    is_chunked         the window does not slide: keys of the query's own chunk of `window`
    """

    window: int = 0
    windowed_fraction: float = 1.0
    is_chunked: bool = False

    def over(self, num_keys: Column) -> CausalMask:
        """Return the mask for `num_keys` keys, or for an array of lengths."""
        if not self.window:
            return ALL_BEFORE
        fraction = np.minimum(self.window / num_keys, 1.0)
        return CausalMask(window_fraction=fraction, windowed_fraction=self.windowed_fraction, is_chunked=self.is_chunked)


def _mean_of_least(start: Column, stop: Column, limit: Column) -> Any:
    """Return the mean of min(x, limit) over [start, stop]."""
    low, high = np.minimum(start, limit), np.minimum(stop, limit)
    return (0.5 * (high - low) * (high + low) + limit * ((stop - high) - (start - low))) / (stop - start)


def _area_in_chunks(stop: Column, chunk: Column) -> Any:
    """Return the integral of x mod chunk over [0, stop]: full chunks and the rest."""
    num_chunks = np.floor(stop / chunk)
    rest = stop - num_chunks * chunk
    return 0.5 * (num_chunks * (chunk * chunk) + rest * rest)
