"""Measurement of a run of a network plan: gradients against one process, collectives against the plan, step times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.per_operator.traffic import NetworkTraffic
from perfmodel.parallel.plan import Plan, plan_to_dict

NETWORK_MEASUREMENT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck:
    """Comparison of a plan's run with one process. Errors are relative to the largest entry of the compared values.

    loss             mean loss of the first step
    loss_error       largest error of all steps
    gradient_error   largest error of a parameter's gradient, in the first step
    output_error     largest error of an operator's output; nan if outputs were not compared
    traffic          collectives issued in one step, each `repeats` times
    """

    plan: Plan
    loss: float
    loss_error: float
    gradient_error: float
    output_error: float
    traffic: tuple[NetworkTraffic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMeasurement:
    """Measured run of one plan. Times in seconds, memory in bytes.

    step_times        of each timed step, on the slowest rank
    step_time         their median
    step_time_spread  their interquartile range
    loss              mean loss of the first step, before any update
    gradient_error    largest relative error of a gradient against one process; nan if not checked
    traffic           collectives of one step
    parts             time for which collectives over each group of axes block a rank, `communication.<axes>`, from a separate step
    memory_by_rank    peak of live tensors on every rank
    chip, software    name of the chip, and versions by name
    busy_fraction     share of the machine's processors used by other processes; 0 if the system does not report it
    """

    plan: Plan
    step_time: float
    step_time_spread: float
    step_times: tuple[float, ...]
    warmup: int
    loss: float
    gradient_error: float
    traffic: tuple[NetworkTraffic, ...]
    device: str
    chip: str
    parts: Mapping[str, float] = field(default_factory=dict)
    memory_by_rank: tuple[float, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    busy_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not self.step_times:
            raise InputError("step_times=(): must have at least one step; measure again")
        if self.memory_by_rank and len(self.memory_by_rank) != self.plan.num_chips:
            entries = len(self.memory_by_rank)
            raise InputError(f"memory_by_rank: has {entries} entries for {self.plan.num_chips} ranks; measure again")
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))
        object.__setattr__(self, "software", MappingProxyType(dict(self.software)))

    @property
    def num_ranks(self) -> int:
        return self.plan.num_chips

    @property
    def peak_memory(self) -> float:
        return max(self.memory_by_rank, default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; nan becomes null."""
        data: dict[str, Any] = {"schema_version": NETWORK_MEASUREMENT_VERSION}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Plan):
                value = plan_to_dict(value)
            elif entry.name == "traffic":
                value = [
                    {
                        "kind": str(row.kind),
                        "axes": sorted(row.axes),
                        "num_elements": row.num_elements,
                        "phase": str(row.phase),
                        "tensor": row.tensor,
                        "operator": row.operator,
                        "what": row.what,
                        "count": row.repeats,
                    }
                    for row in value
                ]
            elif isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, float) and value != value:
                value = None
            data[entry.name] = value
        return data
