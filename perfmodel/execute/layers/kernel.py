"""Differentiable functions built from a forward and a backward operator, like a GPU's fused kernels."""

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
    def forward(ctx: FunctionCtx, pair: _Pair, *inputs: Any) -> torch.Tensor:
        result = pair.forward(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
        ctx.save_for_backward(*(tensors if pair.keeps_inputs else ()), *outputs[0 if pair.keeps_output else 1 :])
        ctx.pair = pair
        ctx.constants = [None if given is not None else value for value, given in zip(inputs, tensors, strict=True)]
        ctx.are_tensors = [tensor is not None for tensor in tensors]
        return outputs[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        pair, inputs, kept = ctx.pair, ctx.constants, ctx.saved_tensors
        if pair.keeps_inputs:
            inputs = [tensor if tensor is not None else constant for constant, tensor in zip(inputs, kept, strict=False)]
            kept = kept[len(inputs) :]
        else:
            inputs = [constant for constant, is_tensor in zip(inputs, ctx.are_tensors, strict=True) if not is_tensor]
        gradient = gradients[0].contiguous() if pair.is_contiguous else gradients[0]
        result = pair.backward(gradient, *inputs, *kept)
        input_gradients = result if isinstance(result, tuple) else (result,)
        return None, *input_gradients, *(None,) * (len(ctx.are_tensors) - len(input_gradients))


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    keeps_inputs: bool = True,
    keeps_output: bool = False,
    is_contiguous: bool = True,
) -> Callable[..., torch.Tensor]:
    """Return the differentiable function whose forward and backward passes are these two operators.

    forward         (inputs) -> the output, or (the output, statistics that backward reads)
    backward        (gradient, inputs, the output if saved, statistics) -> gradients of the first inputs
    keeps_inputs    False: backward receives only the inputs that are not tensors
    is_contiguous   make the gradient contiguous first
    """
    pair = _Pair(forward, backward, keeps_inputs, keeps_output, is_contiguous)
    return lambda *inputs: _Kernel.apply(pair, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return empty contiguous tensors of these shapes and dtypes: the fake result of an operator."""
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)
