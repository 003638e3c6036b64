"""Operators of torch, and differentiable functions built from a forward and a backward operator, like a GPU's fused kernels.

Sums over ranks inside a layer's function are passed by the caller, which owns the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from perfmodel.workload.work import Pass

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef
    from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True)
class _Backward:
    function: Callable[..., Any]
    keeps_inputs: bool
    keeps_output: bool
    is_contiguous: bool


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, forward: Callable[..., Any], backward: _Backward, *inputs: Any) -> torch.Tensor:
        result = forward(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
        ctx.save_for_backward(*(tensors if backward.keeps_inputs else ()), *outputs[0 if backward.keeps_output else 1 :])
        ctx.rule = backward
        ctx.constants = [None if given is not None else value for value, given in zip(inputs, tensors, strict=True)]
        ctx.are_tensors = [tensor is not None for tensor in tensors]
        return outputs[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        rule, inputs, kept = ctx.rule, ctx.constants, ctx.saved_tensors
        if rule.keeps_inputs:
            inputs = [tensor if tensor is not None else constant for constant, tensor in zip(inputs, kept, strict=False)]
            kept = kept[len(inputs) :]
        else:
            inputs = [constant for constant, is_tensor in zip(inputs, ctx.are_tensors, strict=True) if not is_tensor]
        gradient = gradients[0].contiguous() if rule.is_contiguous else gradients[0]
        result = rule.function(gradient, *inputs, *kept)
        input_gradients = result if isinstance(result, tuple) else (result,)
        return None, None, *input_gradients, *(None,) * (len(ctx.are_tensors) - len(input_gradients))


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    keeps_inputs: bool = True,
    keeps_output: bool = False,
    is_contiguous: bool = True,
) -> Callable[..., torch.Tensor]:
    """Return the differentiable function whose forward and backward passes are these two operators. They may be closures.

    forward         (inputs) -> the output, or (the output, statistics that backward reads)
    backward        (gradient, inputs, the output if saved, statistics) -> gradients of the first inputs
    keeps_inputs    False: backward receives only the inputs that are not tensors
    is_contiguous   make the gradient contiguous first
    """
    rule = _Backward(backward, keeps_inputs, keeps_output, is_contiguous)
    return lambda *inputs: _Kernel.apply(forward, rule, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def operator(name: str, fake: Callable[..., Any], *, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as torch's operator `perfmodel::name`, with its result under fake tensors and the arguments that it changes."""

    def registered(function: Callable[..., Any]) -> CustomOpDef:
        definition = torch.library.custom_op(f"perfmodel::{name}", function, mutates_args=tuple(mutates))
        definition.register_fake(fake)
        return definition

    return registered


class Fused:
    """A kernel as the operators `perfmodel::name` and `perfmodel::name_backward`, called as one differentiable function.

    operator   forward pass alone: the output, or the output and the statistics that backward reads
    """

    def __init__(self, name: str, forward: CustomOpDef, *, keeps_inputs: bool, keeps_output: bool, is_contiguous: bool) -> None:
        self.operator, self._backward_name = forward, f"{name}_backward"
        self._join = partial(differentiable, forward, keeps_inputs=keeps_inputs, keeps_output=keeps_output, is_contiguous=is_contiguous)
        self._function: Callable[..., torch.Tensor] = forward

    def backward(self, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], CustomOpDef]:
        """Register the backward pass, with its result under fake tensors."""

        def registered(function: Callable[..., Any]) -> CustomOpDef:
            gradient = operator(self._backward_name, fake)(function)
            self._function = self._join(gradient)
            return gradient

        return registered

    def __call__(self, *inputs: Any) -> torch.Tensor:
        return self._function(*inputs)


def fused(
    name: str, fake: Callable[..., Any], *, keeps_inputs: bool = True, keeps_output: bool = False, is_contiguous: bool = True
) -> Callable[[Callable[..., Any]], Fused]:
    """Register the forward pass of a kernel; arguments as in `operator` and `differentiable`."""
    register = operator(name, fake)
    options = {"keeps_inputs": keeps_inputs, "keeps_output": keeps_output, "is_contiguous": is_contiguous}
    return lambda function: Fused(name, register(function), **options)


def like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return empty contiguous tensors of these shapes and dtypes: the fake result of an operator."""
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


class Reduce(Protocol):
    def __call__(self, tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
        """Return the sum, or the maximum, over the ranks that hold other shards of the dim."""


def unsharded(tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
    """Return the tensor unchanged: no dim is sharded."""
    return tensor
