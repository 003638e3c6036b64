"""Timing of calls, including calls whose operands have left every cache.

On a CPU a call is timed by the processor time of its thread, so that other processes do not disturb it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

MEBIBYTE = 2**20

#: Copies of the operands are used in turn, up to this total size: the inputs of a kernel in a step are not freshly written.
ROTATED_BYTES = 32 * MEBIBYTE
MOST_COPIES = 8
#: Size of operands that are read from memory: more than a core's share of any cache.
STREAMED_BYTES = 192 * MEBIBYTE
MOST_STREAMED = 512


class Stopwatch:
    """Timer that returns the median time of a call."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def time(self, call: Callable[[], object], *, budget: float, least: int = 5, most: int = 60) -> float:
        """Return the median time of a call over the repetitions that the budget allows. [s]"""
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
    """Return the number of operand copies after which each one is read from memory again."""
    return min(max(2, int(STREAMED_BYTES / max(num_bytes, 1.0))), MOST_STREAMED)


def from_memory(make: Callable[[], Callable[[], object]], num_bytes: float) -> Callable[[], object]:
    """Return a function that calls on rotating copies of the operands that together fit no cache."""
    return _rotated([make() for _ in range(copies_from_memory(num_bytes))])


def in_rotation(make: Callable[[], Callable[[], object]], num_bytes: float) -> Callable[[], object]:
    """Return a function that calls on several copies of the operands in rotation."""
    return _rotated([make() for _ in range(max(1, min(MOST_COPIES, int(ROTATED_BYTES / max(num_bytes, 1.0)))))])


def _rotated(copies: Sequence[Callable[[], object]]) -> Callable[[], object]:
    index = 0

    def call() -> object:
        nonlocal index
        index = (index + 1) % len(copies)
        return copies[index]()

    return call
