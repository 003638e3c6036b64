"""How a network plan is run, for the parent process and the ranks alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfmodel.workload.job import Optimizer

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.functions import NetworkFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReference:
    """A module as `package.module:factory`, and the shapes of its inputs."""

    name: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """steps            updates by `optimizer` between them ("": the plan's)
    dtype             a torch dtype's name; "": those of the plan's precision
    compares_outputs  every operator's output too
    uses_dtensor      redistribute through DTensor; without it the same collectives are called directly
    module            the user's module that the network is an image of
    functions         torch functions of kinds that are not known: kind -> function(inputs, context); importable, for the workers
    """

    seed: int = 0
    steps: int = 1
    dtype: str = "float64"
    optimizer: str = Optimizer.SGD
    learning_rate: float = 0.1
    compares_outputs: bool = False
    uses_dtensor: bool = True
    module: ModuleReference | None = None
    functions: Mapping[str, NetworkFunction] = field(default_factory=dict)
