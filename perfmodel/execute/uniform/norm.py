"""RMSNorm as a module, on tensors that may be sharded over tp."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from perfmodel.execute.layers.norm import rms_norm
from perfmodel.execute.local import applied_locally, local_tensor, placed_like


class RMSNorm(nn.RMSNorm):
    """torch's module with our operator (`layers/norm.py`). Sharding by rows is kept; the weight gradient is then partial."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        if not isinstance(x, DTensor):
            return rms_norm(x, local_tensor(self.weight), self.eps)
        return placed_like(rms_norm(x.to_local(), applied_locally(self.weight), self.eps), x)
