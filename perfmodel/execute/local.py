"""Local parts of distributed tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Its piece of one that is cut over ranks, in the same graph of gradients; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
