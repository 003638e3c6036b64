"""How a network plan is run, for the parent process and the ranks alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfmodel.workload.job import Optimizer

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.functions import NetworkFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """dtype: a torch dtype's name; optimizer: "" for the plan's; uses_dtensor: as `NetworkMesh` has it; functions: torch functions of
    kinds besides the known ones."""

    seed: int = 0
    steps: int = 1
    dtype: str = "float64"
    optimizer: str = Optimizer.SGD
    learning_rate: float = 0.0
    compares_outputs: bool = False
    uses_dtensor: bool = True
    functions: Mapping[str, NetworkFunction] = field(default_factory=dict)
