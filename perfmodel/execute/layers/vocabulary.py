"""Layers whose table or logits may be cut by rows of the vocabulary: the lookup of token vectors, and the cross-entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.norm import wide
from perfmodel.execute.layers.reduce import Reduce, whole
from perfmodel.workload.graph import Pass

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def own_rows(entries: torch.Tensor, first: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which entries lie in the rows `first`, `first + 1`, ... of this rank, and where; 0 for the others."""
    mine = (entries >= first) & (entries < first + number)
    return mine, torch.where(mine, entries - first, 0)


class _TokenVectors(torch.autograd.Function):
    """Keeps nothing but the tokens."""

    @staticmethod
    def forward(ctx: FunctionCtx, table: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
        mine, index = own_rows(tokens, first, table.shape[0])
        ctx.save_for_backward(tokens)
        ctx.first, ctx.num_rows = first, table.shape[0]
        return F.embedding(index, table).masked_fill_(~mine.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        mine, index = own_rows(tokens, ctx.first, ctx.num_rows)
        # what belongs to other ranks falls into an own row, as zeros
        gradient = gradients[0].masked_fill(~mine.unsqueeze(-1), 0.0)
        return torch.ops.aten.embedding_dense_backward(gradient, index, ctx.num_rows, -1, False), None, None


def token_vectors(table: torch.Tensor, tokens: torch.Tensor, *, first: int | None = None) -> torch.Tensor:
    """[rows, h], [...] -> [..., h].

    first   of a table that is cut, this rank's first row: zeros for tokens that other ranks hold; None: the table is whole
    """
    if first is None:
        return F.embedding(tokens, table)
    return _TokenVectors.apply(table, tokens, first)  # type: ignore[no-any-return, no-untyped-call]


def bag_vectors(table: torch.Tensor, bags: torch.Tensor, *, first: int | None = None) -> torch.Tensor:
    """[rows, h], [b, n] -> [b, h]: the sum of the vectors of each bag; `first` as that of `token_vectors`."""
    if first is None:
        return F.embedding_bag(bags, table, mode="sum")
    mine, index = own_rows(bags, first, table.shape[0])
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=mine.to(table.dtype))


class _CrossEntropy(torch.autograd.Function):
    """Keeps one copy of the logits in at least float32, in which the gradient is computed; torch's own works with three.

    Columns from `num_columns` on are padding and have no probability: a piece of the logits would cost another gradient of them all.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, labels: torch.Tensor, first: int, num_columns: int, reduce: Reduce) -> torch.Tensor:
        values = wide(logits)
        if num_columns:
            largest = values[..., :num_columns].amax(dim=-1)
        else:
            largest = values.new_full(values.shape[:-1], -torch.inf)
        largest = reduce(largest, phase=Pass.FORWARD, largest=True).unsqueeze(-1)
        # in place where a copy was made
        values = values - largest if values is logits else values.sub_(largest)
        values[..., num_columns:].fill_(-torch.inf)
        mine, index = own_rows(labels, first, num_columns)
        picked = torch.where(mine, values.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0.0)
        exponentials = values.exp_()
        total = reduce(exponentials.sum(dim=-1), phase=Pass.FORWARD)
        picked = reduce(picked, phase=Pass.FORWARD)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), labels)
        ctx.rest = first, num_columns, logits.dtype
        return total.log() - picked

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        probabilities, labels = ctx.saved_tensors
        first, num_columns, dtype = ctx.rest
        mine, index = own_rows(labels, first, num_columns)
        # in place: nothing else reads the probabilities, and they are the largest tensor of the step
        probabilities.scatter_add_(-1, index.unsqueeze(-1), -mine.to(probabilities.dtype).unsqueeze(-1))
        return probabilities.mul_(gradients[0].unsqueeze(-1)).to(dtype), None, None, None, None


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, first: int = 0, size: int | None = None, reduce: Reduce = whole
) -> torch.Tensor:
    """[rows..., v], [rows...] -> one loss a row, in at least float32.

    This rank holds the columns `first`, `first + 1`, ... of `size`; those behind are padding. size None: none is.
    Reduced: one number a row three times forward (maximum, sum of exponentials, logit of the label), none backward.
    """
    columns = logits.shape[-1]
    num_columns = columns if size is None else max(0, min(columns, size - first))
    return _CrossEntropy.apply(logits, labels, first, num_columns, reduce)  # type: ignore[no-any-return, no-untyped-call]
