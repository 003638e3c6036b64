"""Vocabulary-parallel layers: embedding lookup and cross-entropy, with table or logits sharded by rows of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.norm import wide
from perfmodel.execute.layers.reduce import Reduce, unsharded
from perfmodel.workload.work import Pass

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def local_rows(entries: torch.Tensor, first: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each entry lies in this rank's rows `first`, `first + 1`, ..., and its local index; 0 for the others."""
    mine = (entries >= first) & (entries < first + number)
    return mine, torch.where(mine, entries - first, 0)


class _TokenVectors(torch.autograd.Function):
    """Embedding lookup that saves only the tokens for backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, table: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
        mine, index = local_rows(tokens, first, table.shape[0])
        ctx.save_for_backward(tokens)
        ctx.first, ctx.num_rows = first, table.shape[0]
        return F.embedding(index, table).masked_fill_(~mine.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        mine, index = local_rows(tokens, ctx.first, ctx.num_rows)
        # gradients of other ranks' tokens are added to a local row as zeros
        gradient = gradients[0].masked_fill(~mine.unsqueeze(-1), 0.0)
        return torch.ops.aten.embedding_dense_backward(gradient, index, ctx.num_rows, -1, False), None, None


def token_vectors(table: torch.Tensor, tokens: torch.Tensor, *, first: int | None = None) -> torch.Tensor:
    """Look up embeddings: [rows, h], [...] -> [..., h].

    first   first row of this rank in a sharded table, with zeros for tokens of other ranks; None: the table is not sharded
    """
    if first is None:
        return F.embedding(tokens, table)
    return _TokenVectors.apply(table, tokens, first)  # type: ignore[no-any-return, no-untyped-call]


def bag_vectors(table: torch.Tensor, bags: torch.Tensor, *, first: int | None = None) -> torch.Tensor:
    """Look up and sum embeddings: [rows, h], [b, n] -> [b, h], one sum per bag; `first` as in `token_vectors`."""
    if first is None:
        return F.embedding_bag(bags, table, mode="sum")
    mine, index = local_rows(bags, first, table.shape[0])
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=mine.to(table.dtype))


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that saves one copy of the logits in at least float32, reused for the gradient; torch's own version uses three.

    Columns from `num_columns` on are padding with zero probability. Slicing them off would cost another gradient of all logits.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, labels: torch.Tensor, first: int, num_columns: int, reduce: Reduce) -> torch.Tensor:
        values = wide(logits)
        if num_columns:
            largest = values[..., :num_columns].amax(dim=-1)
        else:
            largest = values.new_full(values.shape[:-1], -torch.inf)
        largest = reduce(largest, phase=Pass.FORWARD, largest=True).unsqueeze(-1)
        # in place if `wide` made a copy
        values = values - largest if values is logits else values.sub_(largest)
        values[..., num_columns:].fill_(-torch.inf)
        mine, index = local_rows(labels, first, num_columns)
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
        mine, index = local_rows(labels, first, num_columns)
        # in place: nothing else reads the probabilities, the largest tensor of the step
        probabilities.scatter_add_(-1, index.unsqueeze(-1), -mine.to(probabilities.dtype).unsqueeze(-1))
        return probabilities.mul_(gradients[0].unsqueeze(-1)).to(dtype), None, None, None, None


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, first: int = 0, size: int | None = None, reduce: Reduce = unsharded
) -> torch.Tensor:
    """Compute [rows..., v], [rows...] -> one loss per row, in at least float32.

    This rank holds the columns `first`, `first + 1`, ... of `size`; further columns are padding. size None: no padding.
    Reductions: three in forward, one number per row each (maximum, sum of exponentials, logit of the label); none in backward.
    """
    columns = logits.shape[-1]
    num_columns = columns if size is None else max(0, min(columns, size - first))
    return _CrossEntropy.apply(logits, labels, first, num_columns, reduce)  # type: ignore[no-any-return, no-untyped-call]
