"""Vocabulary-parallel layers: embedding lookup and cross-entropy, with table or logits sharded by rows of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.kernel import Reduce, differentiable, unsharded
from perfmodel.execute.layers.norm import wide
from perfmodel.workload.work import Pass


def local_rows(entries: torch.Tensor, first: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each entry lies in this rank's rows `first`, `first + 1`, ..., and its local index; 0 for the others."""
    mine = (entries >= first) & (entries < first + number)
    return mine, torch.where(mine, entries - first, 0)


def token_vectors(table: torch.Tensor, tokens: torch.Tensor, *, first: int | None = None) -> torch.Tensor:
    """Look up embeddings: [rows, h], [...] -> [..., h].

    first   first row of this rank in a sharded table, with zeros for tokens of other ranks; None: the table is not sharded
    """
    if first is None:
        return F.embedding(tokens, table)
    num_rows, start = table.shape[0], first

    def forward(table: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine, index = local_rows(tokens, start, num_rows)
        return F.embedding(index, table).masked_fill_(~mine.unsqueeze(-1), 0.0), tokens

    def backward(gradient: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        mine, index = local_rows(tokens, start, num_rows)
        # gradients of other ranks' tokens are added to a local row as zeros
        gradient = gradient.masked_fill(~mine.unsqueeze(-1), 0.0)
        return torch.ops.aten.embedding_dense_backward(gradient, index, num_rows, -1, False)  # type: ignore[no-any-return]

    # only the tokens are saved
    return differentiable(forward, backward, keeps_inputs=False, is_contiguous=False)(table, tokens)


def bag_vectors(table: torch.Tensor, bags: torch.Tensor, *, first: int | None = None) -> torch.Tensor:
    """Look up and sum embeddings: [rows, h], [b, n] -> [b, h], one sum per bag; `first` as in `token_vectors`."""
    if first is None:
        return F.embedding_bag(bags, table, mode="sum")
    mine, index = local_rows(bags, first, table.shape[0])
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=mine.to(table.dtype))


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, first: int = 0, size: int | None = None, reduce: Reduce = unsharded
) -> torch.Tensor:
    """Compute [rows..., v], [rows...] -> one loss per row, in at least float32.

    This rank holds the columns `first`, `first + 1`, ... of `size`; further columns are padding with zero probability (slicing them off
    would cost another gradient of all logits). size None: no padding. One copy of the logits is saved and reused for the gradient; torch's
    own version uses three.
    Reductions: three in forward, one number per row each (maximum, sum of exponentials, logit of the label); none in backward.
    """
    columns, dtype = logits.shape[-1], logits.dtype
    num_columns = columns if size is None else max(0, min(columns, size - first))

    def forward(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
        return total.log() - picked, exponentials.div_(total.unsqueeze(-1)), labels

    def backward(gradient: torch.Tensor, probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mine, index = local_rows(labels, first, num_columns)
        # in place: nothing else reads the probabilities, the largest tensor of the step
        probabilities.scatter_add_(-1, index.unsqueeze(-1), -mine.to(probabilities.dtype).unsqueeze(-1))
        return probabilities.mul_(gradient.unsqueeze(-1)).to(dtype)

    return differentiable(forward, backward, keeps_inputs=False, is_contiguous=False)(logits, labels)
