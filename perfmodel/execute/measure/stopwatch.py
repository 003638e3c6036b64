"""Times of calls, and calls whose operands no cache holds from the last one.

On a CPU a call is timed by the processor time of its thread: other processes of the machine then do not disturb it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

MEBIBYTE = 2**20

#: Copies of the operands, used in turn, up to this many bytes together: what a step reads has not just been written.
ROTATED_BYTES = 32 * MEBIBYTE
MOST_COPIES = 8
#: Of operands that come from memory: more than a core's share of any cache.
STREAMED_BYTES = 192 * MEBIBYTE
MOST_STREAMED = 512


class Stopwatch:
    """Median time of a call."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def time(self, call: Callable[[], object], *, budget: float, least: int = 5, most: int = 60) -> float:
        """Seconds of one call: the median of as many as the budget allows."""
        call()
        once = self._one(call)
        count = max(least, min(most, int(budget / max(once, 1e-7))))
        return statistics.median(self._one(call) for _ in range(count))

    def _one(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            start = time.thread_time()
            call()
            return time.thread_time() - start
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


def copies_from_memory(num_bytes: float) -> int:
    """So many operands that each comes from memory when its turn has come again."""
    return min(max(2, int(STREAMED_BYTES / max(num_bytes, 1.0))), MOST_STREAMED)


def from_memory(make: Callable[[], Callable[[], object]], num_bytes: float) -> Callable[[], object]:
    """Calls on copies of the operands that no cache holds together."""
    return _rotated([make() for _ in range(copies_from_memory(num_bytes))])


def in_turn(make: Callable[[], Callable[[], object]], num_bytes: float) -> Callable[[], object]:
    """Calls on several copies of the operands, one after the other."""
    return _rotated([make() for _ in range(max(1, min(MOST_COPIES, int(ROTATED_BYTES / max(num_bytes, 1.0)))))])


def _rotated(copies: Sequence[Callable[[], object]]) -> Callable[[], object]:
    index = 0

    def call() -> object:
        nonlocal index
        index = (index + 1) % len(copies)
        return copies[index]()

    return call
