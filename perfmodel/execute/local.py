"""Local shards of distributed tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, within the autograd graph, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
