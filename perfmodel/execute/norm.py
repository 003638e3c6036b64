"""RMSNorm as a GPU runs it: one operator each way, which keeps its input and the reciprocal root mean square of each row.

torch's CPU build has no such kernel: its RMSNorm is a chain of operators that keeps two float32 copies of the tensor. So that a
plan keeps and moves the same on a CPU as on a GPU (and under fake tensors, where an audit counts), this is an operator of ours on
CPUs and torch's own on GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the precision in which statistics are taken: at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@torch.library.custom_op("perfmodel::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y = w x / r and 1 / r, where r^2 = mean(x^2) + epsilon over the last dim; 1 / r [..., 1] in float32 at least."""
    rows = wide(x)
    scale = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True).add_(epsilon))
    return (rows * scale).mul_(weight).to(x.dtype), scale


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op("perfmodel::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = s (w dy - z mean(z w dy)) and dw = sum of z dy over rows, where z = s x is the normalised input."""
    normed, rows = wide(x) * scale, wide(gradient)
    for_weight = (normed * rows).flatten(0, -2).sum(dim=0).to(weight.dtype)
    rows = rows * weight
    correction = (normed * rows).mean(dim=-1, keepdim=True)
    return rows.sub_(normed.mul_(correction)).mul_(scale).to(x.dtype), for_weight


@_rms_norm_backward.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


class _RootMeanSquareNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        y, scale = _rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        return (*_rms_norm_backward(gradients[0].contiguous(), x, weight, scale), None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """w x / sqrt(mean(x^2) + epsilon) over the last dim."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)
    return _RootMeanSquareNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]


class RMSNorm(nn.RMSNorm):
    """torch's module with the operator above. A tensor cut over rows stays so; the weight's gradient is then partial."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        weight = self.weight
        if not isinstance(x, DTensor):
            return rms_norm(x, weight.to_local() if isinstance(weight, DTensor) else weight, self.eps)
        assert isinstance(weight, DTensor)
        local = rms_norm(x.to_local(), weight.to_local(grad_placements=[Partial()]), self.eps)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
