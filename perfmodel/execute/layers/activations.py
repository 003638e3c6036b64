"""Activation functions (`workload/activations.py`) and their gated variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.kernel import differentiable, fused

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


@fused("gated", lambda x, function: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def gated(x: torch.Tensor, function: str) -> torch.Tensor:
    """Compute x [..., 2 n] -> function(first half of the last dim) * second half. Only the input is saved for backward."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[function](gate) * up


@gated.backward(lambda gradient, x, function: torch.empty_like(x))
def gated_backward(gradient: torch.Tensor, x: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    result = torch.empty_like(x)
    for_gate, for_up = result.chunk(2, dim=-1)
    for_gate.copy_(_DERIVATIVES[function](gradient * up, gate))
    for_up.copy_(gradient * ACTIVATIONS[function](gate))
    return result


@fused("gated_rows", lambda x, weights, function: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def gated_rows(x: torch.Tensor, weights: torch.Tensor, function: str) -> torch.Tensor:
    """Compute x [..., 2 n], weights [...] -> `gated`, times the weight of each row."""
    gate, up = x.chunk(2, dim=-1)
    return (ACTIVATIONS[function](gate) * up * weights.unsqueeze(-1)).to(x.dtype)


@gated_rows.backward(lambda gradient, x, weights, function: (torch.empty_like(x), torch.empty_like(weights)))
def gated_rows_backward(gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, function: str) -> tuple[torch.Tensor, torch.Tensor]:
    for_weights = (gradient * gated.operator(x, function)).to(weights.dtype).sum(dim=-1)
    return gated_backward((gradient * weights.unsqueeze(-1)).to(x.dtype), x, function), for_weights


def activated(x: torch.Tensor, function: str, *, is_gated: bool, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the activation of a feed-forward's first product, multiplied by the weight of each row where given."""
    if is_gated:
        return gated(x, function) if weights is None else gated_rows(x, weights, function)
    result = ACTIVATIONS[function](x)
    return result if weights is None else result * weights.to(result.dtype).unsqueeze(-1)
