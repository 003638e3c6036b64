"""Norms over the last dim, or over any dims where some may be sharded over ranks.

An RMSNorm is one operator each for forward and backward, as on a GPU. It saves its input and the reciprocal root mean square of each row.

torch's CPU build has no such kernel: its RMSNorm is a chain of operators that saves two float32 copies of the tensor. A plan must
save and move the same bytes on a CPU as on a GPU (and under fake tensors in an audit). Therefore CPUs use the operator
of this module and GPUs torch's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.kernel import Reduce, differentiable, fused, like, unsharded
from perfmodel.workload.work import Pass

#: Epsilons of layer norms and of RMS norms, as in the operators of the graph.
NORM_EPSILON, RMS_EPSILON = 1e-5, 1e-6


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the precision of statistics: at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _statistics(x: torch.Tensor, number: int) -> torch.Tensor:
    """Return `number` empty statistics of each row, in float32 at least."""
    return x.new_empty((*x.shape[:-1], number), dtype=torch.promote_types(x.dtype, torch.float32))


@fused("rms_norm", lambda x, weight, epsilon: (torch.empty_like(x), _statistics(x, 1)))
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y = w x / r and 1 / r, where r^2 = mean(x^2) + epsilon over the last dim; 1 / r [..., 1] in float32 at least."""
    rows = wide(x)
    scale = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True).add_(epsilon))
    return (rows * scale).mul_(weight).to(x.dtype), scale


@_rms_norm.backward(lambda gradient, x, weight, epsilon, scale: (torch.empty_like(x), torch.empty_like(weight)))
def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute dx = s (w dy - z mean(z w dy)) and dw = sum of z dy over rows, where z = s x is the normalised input."""
    normed, rows = wide(x) * scale, wide(gradient)
    for_weight = (normed * rows).flatten(0, -2).sum(dim=0).to(weight.dtype)
    rows = rows * weight
    correction = (normed * rows).mean(dim=-1, keepdim=True)
    return rows.sub_(normed.mul_(correction)).mul_(scale).to(x.dtype), for_weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute w x / sqrt(mean(x^2) + epsilon) over the last dims, which are those of the weight."""
    if x.device.type != "cpu" or weight.dim() > 1:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return _rms_norm(x, weight, epsilon)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Compute the layer norm over the last dims, which are those of the weight."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


@fused("gated_norm", lambda x, gate, weight, width, gates_first: (x.new_empty(x.shape), _statistics(x, x.shape[-1] // width)))
def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, width: int, gates_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the RMSNorm over groups of `width` entries of x [b, s, m, o], times silu(gate) before it (`gates_first`) or after it.

    Return it with the reciprocal root mean square of each row [b, s, m, rows] in at least float32. weight [width] or [m, o].
    """
    given = x * F.silu(gate) if gates_first else x
    rows = wide(given).unflatten(-1, (-1, width))
    scale = (rows.square().mean(-1) + RMS_EPSILON).rsqrt()
    normed = (rows * scale.unsqueeze(-1)).to(x.dtype)
    result = (normed * (weight.unflatten(-1, (-1, width)) if weight.dim() > 1 else weight)).flatten(-2)
    return (result if gates_first else result * F.silu(gate)).contiguous(), scale


@gated_norm.backward(lambda gradient, x, gate, weight, *_: like(x, gate, weight))
def gated_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, width: int, gates_first: bool, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, gate, weight. Normed rows n = r u: du = r (dn - n mean(n dn)), where u is x, or x silu(gate)."""
    rows = (-1, width)
    x_rows, opened, wanted = (wide(tensor).unflatten(-1, rows) for tensor in (x, gate, gradient))
    factor = wide(weight).unflatten(-1, rows) if weight.dim() > 1 else wide(weight)
    share = opened.sigmoid()
    gating, r = opened * share, scale.unsqueeze(-1)
    normed = x_rows * gating * r if gates_first else x_rows * r
    for_scaled = wanted if gates_first else wanted * gating
    for_normed = for_scaled * factor
    for_given = r * (for_normed - normed * (normed * for_normed).mean(-1, keepdim=True))
    for_gating = for_given * x_rows if gates_first else wanted * normed * factor
    for_x = for_given * gating if gates_first else for_given
    for_gate = for_gating * share * (1 + opened * (1 - share))
    of_weight = for_scaled * normed
    lasting = (0, 1) if weight.dim() > 1 else tuple(range(of_weight.dim() - 1))
    for_weight = of_weight.sum(lasting).reshape(weight.shape)
    return for_x.flatten(-2).to(x.dtype), for_gate.flatten(-2).to(gate.dtype), for_weight.to(weight.dtype)


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    over: tuple[int, ...],
    count: int,
    eps: float,
    centred: bool,
    reduce: Reduce = unsharded,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Compute weight x_hat + bias, with x_hat of mean 0 (if `centred`) and variance 1 over the positions `over`.

    weight, bias   with the same number of dims as x, of size 1 where they lack one
    count          global number of entries per mean
    observe        called with the mean and the variance of all entries, if `centred`
    """

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        values = wide(x)
        squares = values.square().sum(over, keepdim=True)
        if centred:
            sums = torch.stack((values.sum(over, keepdim=True), squares))
            sums = reduce(sums, phase=Pass.FORWARD) / count
            mean = sums[0]
            variance = sums[1] - mean.square()
            if observe is not None:
                observe(mean, variance)
            scale = (variance + eps).rsqrt()
            normal = (values - mean) * scale
        else:
            scale = (reduce(squares, phase=Pass.FORWARD) / count + eps).rsqrt()
            normal = values * scale
        result = normal * weight
        return (result if bias is None else result + bias).to(x.dtype), normal, scale, weight

    def backward(gradient: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, scale, weight = saved[-3:]
        rows = wide(gradient)
        inner = rows * weight
        along = (inner * normal).sum(over, keepdim=True)
        if centred:
            sums = reduce(torch.stack((inner.sum(over, keepdim=True), along)), phase=Pass.BACKWARD) / count
            result = (inner - sums[0] - normal * sums[1]) * scale
        else:
            result = (inner - normal * (reduce(along, phase=Pass.BACKWARD) / count)) * scale
        for_weight = (rows * normal).sum_to_size(weight.shape).to(weight.dtype)
        for_bias = rows.sum_to_size(weight.shape).to(weight.dtype) if has_bias else None
        return result.to(gradient.dtype), for_weight, for_bias

    has_bias = bias is not None
    return differentiable(forward, backward, keeps_inputs=False, is_contiguous=False)(x, weight, bias)
