"""Measured peaks of memory, and their comparison with a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Predicted classes that a snapshot of the allocator does not count as allocated: its reserved memory, and memory outside it.
BEYOND = ("allocator", "framework")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSite:
    """Live blocks at the peak that one line of code allocated. where: its file, line and function."""

    where: str
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The allocator of one device at the peak of a memory snapshot. [byte]

    num_events     events of the history that were replayed; 0: the state at the snapshot
    allocated      requested by live blocks, at its peak
    reserved       held from the driver at that moment
    most_reserved  the peak of `reserved`
    sites          live blocks by the line that allocated them, the largest first; they add up to allocated
    refused        size of the last allocation that failed for lack of memory; 0: none failed
    """

    name: str
    device: int
    num_events: int
    allocated: int
    reserved: int
    most_reserved: int
    sites: tuple[AllocationSite, ...]
    refused: int

    @property
    def fragmentation(self) -> int:
        """Reserved and not allocated at the peak: gaps, cached blocks and rounding. [byte]"""
        return max(self.reserved - self.allocated, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    """Measured peaks, the fullest device first, next to the predicted memory of their plan by class (empty without a plan). [byte]"""

    memories: tuple[MeasuredMemory, ...]
    predicted: Mapping[str, float]

    @property
    def predicted_allocated(self) -> float:
        return sum(size for name, size in self.predicted.items() if name not in (*BEYOND, "total"))
