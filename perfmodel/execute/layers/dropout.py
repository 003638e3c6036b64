"""Dropout as a GPU runs it: one operator each for forward and backward, with a saved mask of one byte per element.

Only an audit uses it, under fake tensors. A real run has no dropout, so that its gradients can be compared with those of one
process. (torch's CPU build saves the mask in the tensor's own dtype.)
"""

from __future__ import annotations

import torch

from perfmodel.execute.layers.kernel import fused


@fused("dropout", lambda x, probability: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)), keeps_inputs=False)
def _dropout(x: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y = m x / (1 - p) and the mask m."""
    mask = torch.rand_like(x, dtype=torch.float32) >= probability
    return (x * mask).div_(1.0 - probability), mask


@_dropout.backward(lambda gradient, probability, mask: torch.empty_like(gradient))
def dropout_backward(gradient: torch.Tensor, probability: float, mask: torch.Tensor) -> torch.Tensor:
    return (gradient * mask).div_(1.0 - probability)


def dropout(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Zero each element with that probability and divide the others by (1 - probability). Return x unchanged if it is 0."""
    return _dropout(x, probability) if probability else x
