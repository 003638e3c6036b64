"""Autograd functions that redistribute a tensor over one mesh axis, where torch has none that we can use.

Each is one row of the redistribution table of ARCHITECTURE.md and its transpose for the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from perfmodel.execute.layers.reduce import Reduce, whole
from perfmodel.workload.graph import Pass

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def _all_gather(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    ways = dist.get_world_size(group)
    pieces = torch.empty((ways, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(pieces.view(ways * tensor.shape[0], *tensor.shape[1:]), tensor.contiguous(), group=group)
    # [ways, ..., local, ...] -> [..., ways * local, ...]
    shape = list(tensor.shape)
    shape[dim] *= ways
    return pieces.movedim(0, dim).reshape(shape)


def _reduce_scatter(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    ways = dist.get_world_size(group)
    shape = list(tensor.shape)
    shape[dim] //= ways
    split = tensor.reshape(*tensor.shape[:dim], ways, shape[dim], *tensor.shape[dim + 1 :])
    pieces = split.movedim(dim, 0).contiguous()
    result = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    dist.reduce_scatter_tensor(result, pieces.view(ways * shape[0], *shape[1:]), group=group)
    return result


class _GatherSequence(torch.autograd.Function):
    """Sharded on `dim` -> replicated, by an all-gather; the gradient is partial and is reduce-scattered."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return _reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


def gather_sequence(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole sequence of a tensor whose `dim` is cut into contiguous chunks over `group`."""
    return _GatherSequence.apply(tensor, dim, group)  # type: ignore[no-any-return, no-untyped-call]


class _GatherCopies(torch.autograd.Function):
    """Sharded on `dim` -> replicated, by an all-gather; the gradient is whole on every rank, of which each takes its chunk."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, tensor.shape[dim]
        return _all_gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return gradients[0].narrow(ctx.dim, dist.get_rank(ctx.group) * ctx.length, ctx.length).contiguous(), None, None


def gather_copies(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of a tensor whose `dim` is cut into contiguous chunks over `group`, of which all ranks make the same."""
    return _GatherCopies.apply(tensor, dim, group)  # type: ignore[no-any-return, no-untyped-call]


class _ShareGradient(torch.autograd.Function):
    """As it is; of a gradient that all of so many ranks have, each hands on its share."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, ways: int) -> torch.Tensor:
        ctx.ways = ways
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return gradients[0] / ctx.ways, None


def share_gradient(tensor: torch.Tensor, ways: int) -> torch.Tensor:
    """For ranks that all make the same gradient, where gradients are added up over them."""
    return _ShareGradient.apply(tensor, ways)  # type: ignore[no-any-return, no-untyped-call]


def _exchange(tensor: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = tensor.unflatten(split, (dist.get_world_size(group), -1)).movedim(split, 0).contiguous()
    result = torch.empty_like(pieces)
    dist.all_to_all_single(result, pieces, group=group)
    # [ways, ..., local, ...] -> [..., ways * local, ...]
    return result.movedim(0, join).flatten(join, join + 1)


class _Exchange(torch.autograd.Function):
    """Sharded on one dim -> sharded on another, by an all-to-all; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _exchange(tensor, split, join, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return _exchange(gradients[0], ctx.join, ctx.split, ctx.group), None, None, None


def exchange(tensor: torch.Tensor, *, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor with `join` whole, of which `group` cut contiguous chunks, and `split` cut into as many instead."""
    return _Exchange.apply(tensor, split, join, group)  # type: ignore[no-any-return, no-untyped-call]


class _ReducePartial(torch.autograd.Function):
    """Partial -> replicated, by an all-reduce in place; the gradient is whole already."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def reduce_partial(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over `group` of what each rank holds a part of."""
    return _ReducePartial.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _AddGradients(torch.autograd.Function):
    """Replicated; the gradient is partial and is all-reduced."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def add_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor that all ranks of `group` hold, whose gradient each makes a part of."""
    return _AddGradients.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _ScatterPartial(torch.autograd.Function):
    """Partial -> sharded on `dim`, by a reduce-scatter; the gradient is gathered."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(tensor, dim, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return _all_gather(gradients[0], ctx.dim, ctx.group), None, None


def scatter_partial(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's chunk along `dim` of the sum over `group`."""
    return _ScatterPartial.apply(tensor, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def reduced_over(group: dist.ProcessGroup | None) -> Reduce:
    """Sums and maxima over a group, in place; None: nothing is cut."""
    if group is None:
        return whole

    def reduce(tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return tensor

    return reduce


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.kind = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        dtype, device = ctx.kind
        return gradients[0], torch.ones((), dtype=dtype, device=device)


def add_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """x; whatever loss is made of it, `loss` is added to it in backward, so that what a pipeline hands on is the logits alone."""
    return _AddLoss.apply(x, loss)  # type: ignore[no-any-return, no-untyped-call]
