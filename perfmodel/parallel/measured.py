"""Measured traces by group of kernels, measured peaks of memory, and their comparison with a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir

#: Names in predicted and measured traces, and their texts.
TRACE_NAMES = read_yaml(resource_dir("strategies") / "traces.yaml")
#: Groups by which a measured step and a predicted one are compared; each instant belongs to the first busy group.
COMPUTE = ("matmul", "attention", "elementwise", "optimizer", "other_kernels")
COMMUNICATION = (
    "tensor_parallel_communication",
    "context_parallel_communication",
    "expert_parallel_communication",
    "pipeline_communication",
    "parameter_gather",
    "gradient_reduction",
)
GROUPS = (*COMPUTE, *COMMUNICATION, "copies", "idle")
NO_DIFFERENCE = 0.005  # of a step
#: Activities of the host while the device is idle; each instant belongs to the first that applies.
HOST = ("data_loading", "optimizer_step", "after_synchronization", "launches_or_bubble")
#: Predicted classes of memory outside tensors: the allocator's reserve, and memory outside the allocator.
OUTSIDE_TENSORS = ("allocator", "framework")


def group_of(part: str, kind: str) -> str:
    """Return the group of a part of a prediction. kind: of the operator, matmul or attention."""
    if part in ("host", "pipeline_bubble", "replica_wait"):
        return "idle"
    if part in COMMUNICATION or part == "optimizer":
        return part
    return kind if kind in COMPUTE else COMMUNICATION[0] if part == "redistributions" else "elementwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrace:
    """A trace of torch.profiler: the mean of its steps.

    groups      exposed seconds by group; they add up to step_time
    idle        idle seconds by activity of the host; they add up to groups["idle"]
    overlapped  seconds of communication overlapped with compute
    note        how the steps of a trace without marks were found
    unknown     names of kernels in the group `other_kernels`, the longest first
    """

    name: str
    rank: int
    device: str
    num_steps: int
    step_time: float
    groups: Mapping[str, float]
    idle: Mapping[str, float]
    overlapped: float
    unknown: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComparison:
    """Measured traces next to the prediction of their plan.

    groups   group -> (predicted, measured) exposed seconds, the mean over the ranks of the traces; predicted is 0 without a plan
    """

    traces: tuple[MeasuredTrace, ...]
    groups: Mapping[str, tuple[float, float]]
    has_plan: bool

    @property
    def predicted(self) -> float:
        return sum(predicted for predicted, _ in self.groups.values())

    @property
    def measured(self) -> float:
        return sum(measured for _, measured in self.groups.values())

    @property
    def idle(self) -> Mapping[str, float]:
        """Measured idle seconds by activity of the host, the mean over the ranks."""
        return {name: sum(trace.idle[name] for trace in self.traces) / len(self.traces) for name in HOST}

    @property
    def straggler(self) -> tuple[int, float]:
        """The straggler, which communicates least, and the mean time for which the others wait in communication. [rank, s]

        Assumes that all ranks send the same; 0 s for one trace.
        """
        times = {trace.rank: sum(trace.groups[name] for name in COMMUNICATION) + trace.overlapped for trace in self.traces}
        rank = min(times, key=lambda candidate: times[candidate])
        return rank, (sum(times.values()) - len(times) * times[rank]) / max(len(times) - 1, 1)

    @property
    def largest_difference(self) -> str:
        """The group that exceeds its prediction most; if none exceeds it, the group with the largest absolute difference."""
        more = {name: measured - predicted for name, (predicted, measured) in self.groups.items()}
        largest = max(more, key=lambda name: more[name])
        return largest if more[largest] >= NO_DIFFERENCE * self.measured else max(more, key=lambda name: abs(more[name]))


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
        return sum(size for name, size in self.predicted.items() if name not in (*OUTSIDE_TENSORS, "total"))
