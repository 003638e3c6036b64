"""Sums over ranks inside a layer's function, passed by the caller, which owns the sharding."""

from __future__ import annotations

from typing import Protocol

import torch

from perfmodel.workload.work import Pass


class Reduce(Protocol):
    def __call__(self, tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
        """Return the sum, or the maximum, over the ranks that hold other shards of the dim."""


def unsharded(tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
    """Return the tensor unchanged: no dim is sharded."""
    return tensor
