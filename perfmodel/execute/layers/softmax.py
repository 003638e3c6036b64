"""Softmax of scores over visible keys, with an optional sink; and softmax over a dim that is sharded over ranks."""

from __future__ import annotations

import torch

from perfmodel.execute.layers.kernel import Reduce, differentiable
from perfmodel.execute.layers.norm import wide
from perfmodel.workload.work import Pass


def seen_softmax(
    scores: torch.Tensor,
    seen: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    position: int = -1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the softmax over a dim. Masked scores are overwritten in place, so no other tensor of their size is live.

    sinks   scores that belong to no key, of size 1 in the dim: they take a share of the softmax and contribute no value
    """
    if seen is not None:
        with torch.no_grad():  # masked keys have zero probability and gradient: the mask is not saved
            scores.masked_fill_(~seen, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, position, dtype=dtype)
    sink_scores = sinks.to(scores.dtype).expand_as(scores.narrow(position, 0, 1))
    joint = torch.cat((scores, sink_scores), position)
    return torch.softmax(joint, position, dtype=dtype).narrow(position, 0, scores.shape[position])


def sharded_softmax(x: torch.Tensor, *, position: int, scale: float, hidden: torch.Tensor | None, reduce: Reduce) -> torch.Tensor:
    """Compute the softmax of `scale` x over a dim that is sharded over ranks; entries where `hidden` are 0."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        values = wide(x) * scale
        if hidden is not None:
            values = values.masked_fill(hidden, -torch.inf)
        largest = reduce(values.amax(position, keepdim=True), phase=Pass.FORWARD, largest=True)
        exponentials = (values - largest).exp_()
        total = reduce(exponentials.sum(position, keepdim=True), phase=Pass.FORWARD)
        return (exponentials / total).to(x.dtype)

    def backward(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        products = wide(gradient) * result
        total = reduce(products.sum(position, keepdim=True), phase=Pass.BACKWARD)
        return ((products - result * total) * scale).to(result.dtype)

    return differentiable(forward, backward, keeps_inputs=False, keeps_output=True, is_contiguous=False)(x)
