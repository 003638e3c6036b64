"""Token dispatch that sends each token once to every rank with experts of its choice, which copies it for them and sums their outputs.

DeepEP and HybridEP do this within a node. Here it uses ordinary all-to-alls: one of tokens, and one of the routing weights of all choices
for the sums. Backward reverses each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from perfmodel.execute.layers.experts import inverse
from perfmodel.execute.uniform.routing import Routes, exchange_rows
from perfmodel.workload.routing import RoutingCounts


@dataclass(frozen=True, slots=True)
class SentOnce:
    """Tokens that are sent, and the copies made of received tokens.

    order            order of the choices [t * k], by expert, in which their routing weights are sent
    token            index of each token sent, grouped by destination rank
    sent, received   number of tokens to and from each rank
    copy             index of the received token for each row of this rank's experts, in the order of `Routes`
    """

    order: torch.Tensor
    token: torch.Tensor
    sent: list[int]
    received: list[int]
    copy: torch.Tensor


@torch.no_grad()
def sent_once(chosen: torch.Tensor, way: Routes, num_experts: int, ep: dist.ProcessGroup) -> SentOnce:
    """Exchange the number of tokens per rank, and the token of which each row is a copy. chosen [t, k]"""
    ways = dist.get_world_size(ep)
    to = chosen // (num_experts // ways)
    goes = torch.zeros(len(chosen), ways, dtype=torch.int64, device=chosen.device).scatter_(1, to, 1)
    sent = goes.sum(dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ep)
    order = inverse(way.row_of_choice.flatten())
    among = (goes.cumsum(dim=0) - 1).gather(1, to).flatten()[order]  # index among the tokens to the same rank
    among = exchange_rows(among, way.sent, way.received, ep)
    first = received.cumsum(dim=0) - received
    assert way.received is not None
    copy = among + first.repeat_interleave(torch.tensor(way.received, device=chosen.device))
    return SentOnce(order, goes.t().nonzero()[:, 1], sent.tolist(), received.tolist(), copy)


@torch.no_grad()
def counted_once(chosen: torch.Tensor, way: Routes, counts: RoutingCounts, rank: int) -> SentOnce:
    """Return the sent tokens for tensors without values, in the numbers that follow from `RoutingCounts.choices`."""
    travel = counts.tokens_to_ranks(chosen.shape[1])
    sent, received = travel[rank].tolist(), travel[:, rank].tolist()
    assert way.received is not None
    token, copy = (torch.zeros(number, dtype=torch.int64, device=chosen.device) for number in (sum(sent), sum(way.received)))
    return SentOnce(inverse(way.row_of_choice.flatten()), token, sent, received, copy)
