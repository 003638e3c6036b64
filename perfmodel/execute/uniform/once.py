"""Tokens sent once to each rank that has experts of their choice: copied to them there, and added up there before they travel back.

What DeepEP and HybridEP do within a node, by ordinary all-to-alls: one of tokens, and one of the weights of all choices, which those who
add up need. Backward every one of them goes the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from perfmodel.execute.uniform.routing import Routes, exchange_rows, inverse
from perfmodel.workload.routing import RoutingCounts

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True)
class SentOnce:
    """Which tokens travel, and which rows are copies of those that come.

    order            of the choices [t * k], those of one expert together: in which their weights leave
    token            of each token that leaves its number here, those for one rank together
    sent, received   tokens to and from each rank
    copy             of each row that this rank's experts get, as `Routes` has them: which of the tokens that came it is
    """

    order: torch.Tensor
    token: torch.Tensor
    sent: list[int]
    received: list[int]
    copy: torch.Tensor


@torch.no_grad()
def sent_once(chosen: torch.Tensor, way: Routes, num_experts: int, ep: dist.ProcessGroup) -> SentOnce:
    """Each rank tells the others how many tokens it sends them, and of which of these each row is a copy. chosen [t, k]"""
    ways = dist.get_world_size(ep)
    to = chosen // (num_experts // ways)
    goes = torch.zeros(len(chosen), ways, dtype=torch.int64, device=chosen.device).scatter_(1, to, 1)
    sent = goes.sum(dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ep)
    order = inverse(way.place.flatten())
    among = (goes.cumsum(dim=0) - 1).gather(1, to).flatten()[order]  # those that go to the same rank
    among = exchange_rows(among, way.sent, way.received, ep)
    first = received.cumsum(dim=0) - received
    assert way.received is not None
    copy = among + first.repeat_interleave(torch.tensor(way.received, device=chosen.device))
    return SentOnce(order, goes.t().nonzero()[:, 1], sent.tolist(), received.tolist(), copy)


@torch.no_grad()
def counted_once(chosen: torch.Tensor, way: Routes, counts: RoutingCounts, rank: int) -> SentOnce:
    """Tokens sent once, for tensors without values: as many as the counts, with the choices of `RoutingCounts.choices`."""
    travel = counts.tokens_to_ranks(chosen.shape[1])
    sent, received = travel[rank].tolist(), travel[:, rank].tolist()
    assert way.received is not None
    token, copy = (torch.zeros(number, dtype=torch.int64, device=chosen.device) for number in (sum(sent), sum(way.received)))
    return SentOnce(inverse(way.place.flatten()), token, sent, received, copy)


# ----------------------------------------------------------------------------------------- weighted, and added up by token


@torch.library.custom_op("perfmodel::weighted_sum", mutates_args=())
def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, number: int) -> torch.Tensor:
    """y[t] = sum over i with place[i] = t of weights[i] rows[i]"""
    total = torch.zeros(number, rows.shape[1], dtype=weights.dtype, device=rows.device)
    return total.index_add_(0, place, rows.to(weights.dtype) * weights.unsqueeze(-1)).to(rows.dtype)


@_weighted_sum.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, number: int) -> torch.Tensor:
    return rows.new_empty(number, rows.shape[1])


@torch.library.custom_op("perfmodel::weighted_sum_backward", mutates_args=())
def _weighted_sum_backward(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    own = gradient.to(weights.dtype).index_select(0, place)
    return (own * weights.unsqueeze(-1)).to(rows.dtype), (own * rows).sum(dim=-1)


@_weighted_sum_backward.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, place)
        return _weighted_sum(rows, weights, place, number)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return (*_weighted_sum_backward(gradients[0].contiguous(), *ctx.saved_tensors), None, None)


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, number: int) -> torch.Tensor:
    """[n, h], [n], [n] -> [number, h]: the rows of each token, weighted, added up in the weights' precision."""
    return _WeightedSum.apply(rows, weights, place, number)  # type: ignore[no-any-return, no-untyped-call]
