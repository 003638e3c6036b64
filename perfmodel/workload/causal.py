"""How much of the score square causal attention computes, of all queries or of a part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.foundation.columns import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalMask:
    """A query sees the keys before it, in some layers only the last few of them, or those of its own chunk.

    window_fraction     W  keys that a query of those layers sees at most, over the sequence; 1: all before it. A column of several lengths
    windowed_fraction      share of the layers with that window
    is_chunked             windows do not slide: the sequence is cut into chunks of W, which do not see one another
    """

    window_fraction: Column = 1.0
    windowed_fraction: float = 0.0
    is_chunked: bool = False

    @property
    def fraction(self) -> Any:
        """Share of the whole square that is computed: 1/2, or W - W^2 / 2 in layers with a window, W / 2 in those with chunks."""
        return self.seen(0.0, 1.0)

    @property
    def visible(self) -> Any:
        """Share of all keys that lie within what a query may see, before it or not: 1, or W in layers with a window."""
        return self.windowed_fraction * self.window_fraction + (1.0 - self.windowed_fraction)

    def seen(self, start: Column, stop: Column) -> Any:
        """Share of all keys that queries from `start` to `stop` (shares of the sequence) see on average.

        The mean of min(x, W) over [start, stop], of x mod W with chunks.
        """
        whole = _mean_of_least(start, stop, 1.0)
        if not self.windowed_fraction:
            return whole
        windowed = (_mean_in_chunks if self.is_chunked else _mean_of_least)(start, stop, self.window_fraction)
        return self.windowed_fraction * windowed + (1.0 - self.windowed_fraction) * whole

    def seen_by_slowest(self, num_ranks: Column, *, head_tail: bool) -> Any:
        """The same of the rank that computes most, where `num_ranks` share the queries.

        In order, that is the last one: (1 - 1 / (2 n)) of all keys, 2 - 1/n of the mean. Where rank r has the r-th chunk of 2 n from either
        end, all ranks do the mean without a window; with one, the rank with the two chunks in the middle does most. Chunks that do not see
        one another end where the sequence does: from either end all do the mean too.
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
    """Keys that a causal query sees, whatever the length of the sequence.

    window        the last so many, in that share of the layers; 0: all before it
    is_chunked    the window does not slide: those of the query's own chunk of so many
    """

    window: int = 0
    windowed_fraction: float = 1.0
    is_chunked: bool = False

    def over(self, num_keys: Column) -> CausalMask:
        """Return the mask of a sequence of so many keys, or of sequences of several lengths."""
        if not self.window:
            return ALL_BEFORE
        fraction = np.minimum(self.window / num_keys, 1.0)
        return CausalMask(window_fraction=fraction, windowed_fraction=self.windowed_fraction, is_chunked=self.is_chunked)


def _mean_of_least(start: Column, stop: Column, limit: Column) -> Any:
    """Mean of min(x, limit) over [start, stop]."""
    low, high = np.minimum(start, limit), np.minimum(stop, limit)
    return (0.5 * (high - low) * (high + low) + limit * ((stop - high) - (start - low))) / (stop - start)


def _mean_in_chunks(start: Column, stop: Column, chunk: Column) -> Any:
    """Mean of x mod chunk over [start, stop]."""
    return (_area_in_chunks(stop, chunk) - _area_in_chunks(start, chunk)) / (stop - start)


def _area_in_chunks(stop: Column, chunk: Column) -> Any:
    """The integral of x mod chunk over [0, stop]: whole chunks, and what is left."""
    whole = np.floor(stop / chunk)
    rest = stop - whole * chunk
    return 0.5 * (whole * (chunk * chunk) + rest * rest)
