"""Dropout as a GPU runs it: one operator each way, which keeps a mask of one byte an element.

Only an audit asks for it, on tensors without values: a run drops nothing, so that its gradients can be compared with those of one
process. (torch's CPU build keeps the mask in the tensor's own dtype.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


@torch.library.custom_op("perfmodel::dropout", mutates_args=())
def _dropout(x: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y = m x / (1 - p), and the mask m."""
    mask = torch.rand_like(x, dtype=torch.float32) >= probability
    return (x * mask).div_(1.0 - probability), mask


@_dropout.register_fake
def _(x: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@torch.library.custom_op("perfmodel::dropout_backward", mutates_args=())
def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return (gradient * mask).div_(1.0 - probability)


@_dropout_backward.register_fake
def _(gradient: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(gradient)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, probability: float) -> torch.Tensor:
        y, mask = _dropout(x, probability)
        ctx.save_for_backward(mask)
        ctx.probability = probability
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return _dropout_backward(gradients[0].contiguous(), mask, ctx.probability), None


def dropout(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Each element is zero with that probability, else divided by what is left of one; as it is where the probability is 0."""
    return _Dropout.apply(x, probability) if probability else x  # type: ignore[no-any-return, no-untyped-call]
