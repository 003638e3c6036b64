"""Options for running a network plan, shared by the parent process and the ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfmodel.workload.job import Optimizer

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.functions import NetworkFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReference:
    """A module as `package.module:factory`, with the shapes of its inputs."""

    name: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Options of a run.

    steps             steps, each with an update by `optimizer` ("": the plan's)
    dtype             name of a torch dtype; "": those of the plan's precision
    compares_outputs  also compare every operator's output
    module            the user's module that the network was imported from
    functions         torch functions of additional kinds: kind -> function(inputs, context); importable by the workers
    """

    seed: int = 0
    steps: int = 1
    dtype: str = "float64"
    optimizer: str = Optimizer.SGD
    learning_rate: float = 0.1
    compares_outputs: bool = False
    module: ModuleReference | None = None
    functions: Mapping[str, NetworkFunction] = field(default_factory=dict)
