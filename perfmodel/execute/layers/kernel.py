"""Differentiable functions made of a forward and a backward operator, as a GPU's fused kernels are."""

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
        made = pair.forward(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        tensors = [each if isinstance(each, torch.Tensor) else None for each in inputs]
        ctx.save_for_backward(*(tensors if pair.keeps_inputs else ()), *outputs[0 if pair.keeps_output else 1 :])
        ctx.pair = pair
        ctx.constants = [None if given is not None else each for each, given in zip(inputs, tensors, strict=True)]
        ctx.are_tensors = [each is not None for each in tensors]
        return outputs[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        pair, inputs, kept = ctx.pair, ctx.constants, ctx.saved_tensors
        if pair.keeps_inputs:
            inputs = [tensor if tensor is not None else each for each, tensor in zip(inputs, kept, strict=False)]
            kept = kept[len(inputs) :]
        else:
            inputs = [each for each, is_tensor in zip(inputs, ctx.are_tensors, strict=True) if not is_tensor]
        gradient = gradients[0].contiguous() if pair.is_contiguous else gradients[0]
        made = pair.backward(gradient, *inputs, *kept)
        found = made if isinstance(made, tuple) else (made,)
        return None, *found, *(None,) * (len(ctx.are_tensors) - len(found))


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    keeps_inputs: bool = True,
    keeps_output: bool = False,
    is_contiguous: bool = True,
) -> Callable[..., torch.Tensor]:
    """Return the function whose passes are two operators.

    forward         (inputs) -> the output, or (the output, statistics that backward reads)
    backward        (gradient, inputs, the output where kept, statistics) -> gradients of the first inputs
    keeps_inputs    False: backward gets only those inputs that are no tensors
    is_contiguous   the gradient is made contiguous first
    """
    pair = _Pair(forward, backward, keeps_inputs, keeps_output, is_contiguous)
    return lambda *inputs: _Kernel.apply(pair, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Empty contiguous tensors of these shapes and dtypes: what an operator returns under fake tensors."""
    return tuple(each.new_empty(each.shape) for each in tensors)
