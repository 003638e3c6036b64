"""Local shards of distributed tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, within the autograd graph, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a local shard as a DTensor with the placements of the parameter; unchanged if that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
