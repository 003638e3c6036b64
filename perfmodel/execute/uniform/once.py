"""Tokens sent once to each rank that has experts of their choice: copied to them there, and added up there before they travel back.

What DeepEP and HybridEP do within a node, by ordinary all-to-alls: one of tokens, and one of the weights of all choices, which those who
add up need. Backward every one of them goes the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from perfmodel.execute.layers.experts import inverse
from perfmodel.execute.uniform.routing import Routes, exchange_rows
from perfmodel.workload.routing import RoutingCounts

if TYPE_CHECKING:
    pass


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
