"""Differentiable redistributions of a tensor over one mesh axis, where torch has no suitable operator.

Each is one row of the redistribution table of ARCHITECTURE.md, with the transposed row for the gradient.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from perfmodel.execute.layers.kernel import Reduce, differentiable, unsharded
from perfmodel.execute.local import gathered, scattered
from perfmodel.workload.work import Pass

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def _exchange(tensor: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = tensor.unflatten(split, (dist.get_world_size(group), -1)).movedim(split, 0).contiguous()
    result = torch.empty_like(pieces)
    dist.all_to_all_single(result, pieces, group=group)
    # [ways, ..., local, ...] -> [..., ways * local, ...]
    return result.movedim(0, join).flatten(join, join + 1)


def _local_chunk(gradient: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return gradient.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _all_reduced(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gradient = gradient.contiguous()
    dist.all_reduce(gradient, group=group)
    return gradient


_redistribution = partial(differentiable, keeps_inputs=False, is_contiguous=False)

#: (tensor, dim, group) -> all-gather of a dim sharded into contiguous chunks; the gradient is partial and is reduce-scattered.
gather_sequence = _redistribution(gathered, scattered)
#: (tensor, dim, group) -> all-gather; the gradient is replicated, so each rank takes its chunk.
gather_copies = _redistribution(gathered, _local_chunk)
#: (tensor, dim, group) -> reduce-scatter: this rank's chunk along the dim of the sum over the group; the gradient is all-gathered.
scatter_partial = _redistribution(scattered, gathered)
#: (tensor, ways) -> the tensor; a replicated gradient is divided by `ways`, where gradients are summed over ranks.
share_gradient = _redistribution(lambda tensor, ways: tensor.view_as(tensor), lambda gradient, ways: gradient / ways)
#: (tensor, group) -> the replicated tensor; its gradient is partial and is all-reduced.
add_gradients = _redistribution(lambda tensor, group: tensor.view_as(tensor), _all_reduced)
_exchanged = _redistribution(_exchange, lambda gradient, split, join, group: _exchange(gradient, join, split, group))


def exchange(tensor: torch.Tensor, *, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return an all-to-all: `join`, sharded into contiguous chunks over `group`, is gathered, and `split` is sharded instead."""
    return _exchanged(tensor, split, join, group)


class _ReducePartial(torch.autograd.Function):
    """Partial -> replicated, by an all-reduce in place; the gradient is replicated already."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def reduce_partial(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of partial tensors over `group`."""
    return _ReducePartial.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def reduced_over(group: dist.ProcessGroup | None) -> Reduce:
    """Return the in-place reduction (sum or maximum) over a group; None: no sharding."""
    if group is None:
        return unsharded

    def reduce(tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return tensor

    return reduce


_with_loss = _redistribution(
    lambda x, loss, dtype, device: x.view_as(x),
    lambda gradient, dtype, device: (gradient, torch.ones((), dtype=dtype, device=device)),
)


def add_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return x. Backward also adds `loss` to the loss computed from x, so that a pipeline needs to send the logits only."""
    return _with_loss(x, loss, loss.dtype, loss.device)
