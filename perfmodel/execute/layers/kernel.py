"""Differentiable functions that are one operator each way, as a GPU's fused kernels are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True)
class _Pair:
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    keeps_inputs: bool
    keeps_output: bool
    is_contiguous: bool


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, kernel: _Pair, *inputs: Any) -> torch.Tensor:
        made = kernel.forward(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        tensors = [each for each in inputs if each is None or isinstance(each, torch.Tensor)]
        ctx.save_for_backward(*(tensors if kernel.keeps_inputs else ()), *outputs[0 if kernel.keeps_output else 1 :])
        ctx.kernel, ctx.constants = kernel, inputs[len(tensors) :]
        return outputs[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        kernel = ctx.kernel
        gradient = gradients[0].contiguous() if kernel.is_contiguous else gradients[0]
        made = kernel.backward(gradient, *ctx.saved_tensors, *ctx.constants)
        found = made if isinstance(made, tuple) else (made,)
        return None, *found, *(None,) * (len(ctx.needs_input_grad) - 1 - len(found))


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    keeps_inputs: bool = True,
    keeps_output: bool = False,
    is_contiguous: bool = True,
) -> Callable[..., torch.Tensor]:
    """Return the function whose passes are two operators.

    forward    (tensors, constants) -> the output, or (the output, statistics that backward reads)
    backward   (gradient, kept tensors, constants) -> gradients of the first inputs
    Kept are the input tensors, the output and the statistics, in this order.
    is_contiguous   the gradient is made contiguous first
    """
    kernel = _Pair(forward, backward, keeps_inputs, keeps_output, is_contiguous)
    return lambda *inputs: _Kernel.apply(kernel, *inputs)  # type: ignore[no-any-return, no-untyped-call]
