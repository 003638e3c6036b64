"""Indexer of sparse attention: a low-dimensional score of every query with every earlier key, and the top keys of each query.

Forward and backward are one operator each, as fused kernels are; the square of scores is never stored. The choice has no gradient. The
indexer learns from its own loss, the cross-entropy of the softmax of a query's scores with its choice. Its gradient depends on the scores
alone (`workload/kinds/index_scores.py`). (DeepSeek-V3.2, section 2.1, uses the attention weight of each key as the target,
which the attention kernel computes. The indexer's products are the same.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import register_flop_formula

from perfmodel.execute.layers.kernel import like, operator
from perfmodel.execute.layers.masks import causal, marked
from perfmodel.execute.layers.norm import wide

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def scores_of(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores [b, q, z], sum over heads of weights relu(q k) with -inf for keys not `seen`, and the products [b, q, n, z]."""
    products = torch.einsum("bqnd,bzd->bqnz", wide(q), wide(k))
    scores = torch.einsum("bqn,bqnz->bqz", wide(weights), products.relu())
    return (scores if seen is None else scores.masked_fill_(~seen, -torch.inf)), products


def _scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of full sequences."""
    return scores_of(q, k, weights, causal(q.shape[1], k.shape[1], device=q.device))


def best(scores: torch.Tensor, top: int) -> torch.Tensor:
    """Return the top keys [b, q, top]; later keys fill up where fewer are visible. Ties go to the earliest keys."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]


@operator("index_scores", lambda q, k, weights, top: q.new_empty(*q.shape[:2], top, dtype=torch.int32))
def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, top: int) -> torch.Tensor:
    """Choose keys: q [b, s, n, d], k [b, s, d], weights [b, s, n] -> keys of each query [b, s, top]"""
    return best(_scores(q, k, weights)[0], top).to(torch.int32)


@operator("index_scores_backward", lambda scale, q, k, weights, top: like(q, k, weights))
def index_scores_backward(
    scale: float, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `scale` times the sum over queries of logsumexp of the scores minus the mean of the chosen ones."""
    scores, products = _scores(q, k, weights)
    chosen = marked(best(scores, top), k.shape[1]) & causal(q.shape[1], k.shape[1], device=q.device)
    for_scores = scale * (scores.softmax(-1) - chosen / chosen.sum(-1, keepdim=True))
    for_weights = torch.einsum("bqz,bqnz->bqn", for_scores, products.relu())
    for_products = for_scores.unsqueeze(2) * wide(weights).unsqueeze(-1) * (products > 0)
    for_q, for_k = torch.einsum("bqnz,bzd->bqnd", for_products, wide(k)), torch.einsum("bqnz,bqnd->bzd", for_products, wide(q))
    return for_q.to(q.dtype), for_k.to(k.dtype), for_weights.to(weights.dtype)


class _Chosen(torch.autograd.Function):
    """The choice of keys, with a zero that stands for the indexer's loss: its backward computes the gradient of that loss."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, top: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = index_scores(q, k, weights, top)
        ctx.save_for_backward(q, k, weights)
        ctx.top, ctx.scale = top, scale
        ctx.mark_non_differentiable(chosen)
        return chosen, q.new_zeros(())

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return (*index_scores_backward(ctx.scale, *ctx.saved_tensors, ctx.top), None, None)


def choose_keys(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, *, top: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choice [b, s, top] and the term to add to the loss. scale: weight of the loss of each query."""
    return _Chosen.apply(q, k, weights, top, scale)  # type: ignore[no-any-return, no-untyped-call]


@operator("cached_index", lambda q, keys, weights, seen, top: q.new_empty(*q.shape[:2], top, dtype=torch.int64))
def cached_index(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor | None, top: int) -> torch.Tensor:
    """Choose cached keys: [b, q, n, d], [b, z, d], [b, q, n], [b or 1, q, z] -> keys of each query [b, q, top]"""
    return best(scores_of(q, keys, weights, seen)[0], top).contiguous()


@register_flop_formula(torch.ops.perfmodel.cached_index)
def _index_flops(q: list[int], keys: list[int], *_: object, **__: object) -> int:
    b, queries, n, d = q
    return 2 * b * queries * n * keys[1] * d


def _forward_flops(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> float:
    """Return the FLOPs of half the square of queries and keys."""
    batch, queries, heads, width = q.shape
    return 2.0 * batch * heads * queries * max(k.shape[1] // 2, 1) * width


def _backward_flops(_: float, q: torch.Tensor, k: torch.Tensor, *__: Any, **___: Any) -> float:
    """Return the FLOPs of the recomputed scores and of the gradients of queries and keys."""
    return 3.0 * _forward_flops(q, k)


#: Same format as in `scans.py`.
PRODUCTS: Mapping[Any, tuple[str, Callable[..., float]]] = {
    torch.ops.perfmodel.index_scores: ("index_scores", _forward_flops),
    torch.ops.perfmodel.index_scores_backward: ("index_scores.grad", _backward_flops),
}
