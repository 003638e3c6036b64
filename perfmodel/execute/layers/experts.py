"""Mixture of experts: routing of each token, permutation and combination of rows, and grouped matrix products.

Each fused GPU kernel corresponds to one operator for forward and one for backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from perfmodel.execute.layers.activations import activated
from perfmodel.execute.layers.kernel import differentiable, fused
from perfmodel.workload.layer_specs import Experts


def choose(logits: torch.Tensor, experts: Experts, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Route [t, E] -> weights [t, k] in float32 and experts [t, k] of each token. Ties go to the first expert.

    chosen   given experts, which replace the choice by score
    """
    rows = logits.float()
    scores = torch.softmax(rows, dim=-1) if experts.score == "softmax" else torch.sigmoid(rows)
    if chosen is None:
        with torch.no_grad():
            ranked = _in_best_groups(scores, experts) if experts.num_groups > 1 else scores
            chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k].contiguous()
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def _in_best_groups(scores: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Mask the scores outside each token's best groups. A group is ranked by the sum of its two best experts (DeepSeek-V3)."""
    groups = scores.unflatten(-1, (experts.num_groups, -1))
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    taken = best.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, taken, True)
    return groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# torch's `index_copy` and `index_add` would save the rows for backward, only for their shape.
_scatter = partial(
    differentiable, backward=lambda gradient, number, index: gradient.index_select(0, index), keeps_inputs=False, is_contiguous=False
)

#: (rows [n, h], slot [n], number) -> [number, h]: row i goes to `slot[i]`; empty slots are zero.
scatter_rows = _scatter(lambda rows, slot, number: (rows.new_zeros(number, rows.shape[1]).index_copy_(0, slot, rows), slot))
#: (rows [n, h], token [n], number) -> [number, h]: sum of the rows of each token.
combine_rows = _scatter(lambda rows, token, number: (rows.new_zeros(number, rows.shape[1]).index_add_(0, token, rows), token))


@fused("unpermute", lambda rows, weights, index: rows.new_empty(index.shape[0], rows.shape[1]))
def unpermute(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Compute y[t] = sum over j of weights[t, j] rows[index[t, j]]: rows [n, h], weights and index [t, k] -> [t, h].

    Sums have the precision of the weights.
    """
    total = torch.zeros(len(index), rows.shape[1], dtype=weights.dtype, device=rows.device)
    for j in range(index.shape[1]):
        total.addcmul_(rows[index[:, j]].to(weights.dtype), weights[:, j : j + 1])
    return total.to(rows.dtype)


@unpermute.backward(lambda gradient, rows, weights, index: (torch.empty_like(rows), torch.empty_like(weights)))
def unpermute_backward(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    for_rows, for_weights = torch.empty_like(rows), torch.empty_like(weights)
    wide = gradient.to(weights.dtype)
    for j in range(index.shape[1]):
        for_rows[index[:, j]] = (wide * weights[:, j : j + 1]).to(rows.dtype)
        for_weights[:, j] = (wide * rows[index[:, j]]).sum(dim=-1)
    return for_rows, for_weights


@fused("weighted_sum", lambda rows, weights, index, number: rows.new_empty(number, rows.shape[1]))
def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, number: int) -> torch.Tensor:
    """Compute y[t] = sum over i with index[i] = t of weights[i] rows[i]: [n, h], [n], [n] -> [number, h], in the weights' precision."""
    total = torch.zeros(number, rows.shape[1], dtype=weights.dtype, device=rows.device)
    return total.index_add_(0, index, rows.to(weights.dtype) * weights.unsqueeze(-1)).to(rows.dtype)


@weighted_sum.backward(lambda gradient, rows, weights, *_: (torch.empty_like(rows), torch.empty_like(weights)))
def weighted_sum_backward(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    token_gradients = gradient.to(weights.dtype).index_select(0, index)
    return (token_gradients * weights.unsqueeze(-1)).to(rows.dtype), (token_gradients * rows).sum(dim=-1)


def _even(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.bmm(rows, weights.transpose(1, 2))
    return out if bias is None else out.add_(bias.unsqueeze(1))


def _even_backward(gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Compute the gradients, the weights' in the layout of the weights (torch would compute the transpose and copy it)."""
    for_bias = None if bias is None else gradient.sum(dim=1)
    return torch.bmm(gradient, weights), torch.bmm(gradient.transpose(1, 2), rows), for_bias


def _uneven(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, counts: tuple[int, ...]) -> torch.Tensor:
    """Compute one product per expert, each with its own number of rows."""
    out = rows.new_empty(len(rows), weights.shape[1])
    for expert, (mine, weight, into) in enumerate(zip(rows.split(counts), weights, out.split(counts), strict=True)):
        torch.mm(mine, weight.t(), out=into)
        if bias is not None:
            into.add_(bias[expert])
    return out


def _uneven_backward(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, counts: tuple[int, ...]
) -> Any:
    for_rows, for_weights = torch.empty_like(rows), torch.empty_like(weights)
    pieces = (gradient.split(counts), rows.split(counts), weights, for_rows.split(counts), for_weights)
    for out, mine, weight, for_mine, for_weight in zip(*pieces, strict=True):
        torch.mm(out, weight, out=for_mine)
        torch.mm(out.t(), mine, out=for_weight)
    for_bias = None if bias is None else torch.stack([part.sum(dim=0) for part in gradient.split(counts)])
    return for_rows, for_weights, for_bias


_even_linear = differentiable(_even, _even_backward, is_contiguous=False)
_uneven_linear = differentiable(_uneven, _uneven_backward)


def grouped_linear(
    rows: torch.Tensor, weights: torch.Tensor, counts: tuple[int, ...] = (), bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute [e, m, h], [e, n, h], [e, n] -> [e, m, n]; with `counts` rows per expert: [sum of counts, h], ... -> [sum of counts, n]"""
    return _uneven_linear(rows, weights, bias, counts) if counts else _even_linear(rows, weights, bias)


def expert_feed_forward(
    rows: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    function: str,
    is_gated: bool,
    counts: tuple[int, ...] = (),
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute [e, m, h], [e, (2) w, h], [e, h, w] -> [e, m, h]; with `counts` rows per expert: [sum of counts, h] -> the same.

    biases    [e, (2) w] and [e, h]
    weights   routing weight of each row, if applied here
    """
    inner = activated(grouped_linear(rows, up, counts, biases[0]), function, is_gated=is_gated, weights=weights)
    return grouped_linear(inner, down, counts, biases[1])
