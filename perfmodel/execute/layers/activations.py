"""Activation functions (`workload/activations.py`) and their gated variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.kernel import differentiable, operator

aten = torch.ops.aten


#: Squared ReLU as one fused kernel: backward allocates only its result. torch's `square` would allocate two more tensors.
_squared_relu = differentiable(lambda x: F.relu(x).square_(), lambda gradient, x: F.relu(x).mul_(gradient).mul_(2.0), is_contiguous=False)

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": _squared_relu,
    "silu": F.silu,
}

#: Gradient of an activation's input from the gradient of its output and the input.
_DERIVATIVES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "relu": lambda g, x: g * (x > 0),
    "relu2": lambda g, x: g * 2.0 * F.relu(x),
    "silu": aten.silu_backward,
}


@operator("gated", lambda x, function: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def _gated(x: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[function](gate) * up


@operator("gated_backward", lambda gradient, x, function: torch.empty_like(x))
def _gated_backward(gradient: torch.Tensor, x: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    result = torch.empty_like(x)
    for_gate, for_up = result.chunk(2, dim=-1)
    for_gate.copy_(_DERIVATIVES[function](gradient * up, gate))
    for_up.copy_(gradient * ACTIVATIONS[function](gate))
    return result


#: (x [..., 2 n], name of the function) -> function(first half of the last dim) * second half. Only the input is saved for backward.
gated = differentiable(_gated, _gated_backward)


@operator("gated_rows", lambda x, weights, function: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def _gated_rows(x: torch.Tensor, weights: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (ACTIVATIONS[function](gate) * up * weights.unsqueeze(-1)).to(x.dtype)


@operator("gated_rows_backward", lambda gradient, x, weights, function: (torch.empty_like(x), torch.empty_like(weights)))
def _gated_rows_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    for_weights = (gradient * _gated(x, function)).to(weights.dtype).sum(dim=-1)
    return _gated_backward((gradient * weights.unsqueeze(-1)).to(x.dtype), x, function), for_weights


#: (x [..., 2 n], weights [...], name of the function) -> `gated`, times the weight of each row.
gated_rows = differentiable(_gated_rows, _gated_rows_backward)


def activated(x: torch.Tensor, function: str, *, is_gated: bool, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the activation of a feed-forward's first product, multiplied by the weight of each row where given."""
    if is_gated:
        return gated(x, function) if weights is None else gated_rows(x, weights, function)
    result = ACTIVATIONS[function](x)
    return result if weights is None else result * weights.to(result.dtype).unsqueeze(-1)
