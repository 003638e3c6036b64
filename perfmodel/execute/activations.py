"""Activation functions as torch has them (`workload/activations.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class _SquaredRelu(torch.autograd.Function):
    """As one kernel does it: backward has its result and nothing else of that size, where torch's `square` makes two tensors more."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(gradients[0]).mul_(2.0)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": _SquaredRelu.apply,  # type: ignore[dict-item]
    "silu": F.silu,
}
