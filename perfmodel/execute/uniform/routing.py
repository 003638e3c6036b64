"""Routes of tokens to the ranks of their experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from perfmodel.execute.layers.experts import inverse
from perfmodel.execute.layers.kernel import differentiable
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.routing import RoutingCounts, expert_order

if TYPE_CHECKING:
    pass

# ------------------------------------------------------------------------------------------------------------ choosing


def in_turn(tokens: int, experts: Experts, device: torch.device) -> torch.Tensor:
    """[t, k]: experts one after another, whatever the scores."""
    k = experts.top_k
    return (torch.arange(tokens * k, device=device) % experts.num_experts).view(tokens, k)


def as_counted(counts: Sequence[int], experts: Experts, device: torch.device) -> torch.Tensor:
    """[t, k]: each expert so often, no token one twice: none is chosen more often than there are tokens, which come in turn, expert after
    expert as `RoutingCounts.choices` has it."""
    order = expert_order(len(counts)).tolist()
    times = torch.tensor([counts[expert] for expert in order], device=device)
    each = torch.tensor(order, device=device).repeat_interleave(times, output_size=sum(counts))
    return each.view(experts.top_k, -1).t().contiguous()


# ------------------------------------------------------------------------------------------------------- where rows go


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of a rank go, and where those that it receives lie.

    token        of each row that leaves, rows in the order of their experts
    place        [t, k]: which of these rows is a token's copy for its j-th expert
    sent, received   rows to and from each rank of ep; None: as many of each
    slot, room   of each row that arrives its place among the rows of this rank's experts, `room` for each of them
    counts       of each of these experts its rows, where each has room for its own alone
    """

    token: torch.Tensor
    place: torch.Tensor
    sent: list[int] | None
    received: list[int] | None
    slot: torch.Tensor
    room: int
    counts: tuple[int, ...] = ()


@torch.no_grad()
def balanced_routes(chosen: torch.Tensor, num_experts: int, ep: int) -> Routes:
    """Where every expert gets as many rows: nothing need be told."""
    order = chosen.flatten().argsort(stable=True)
    rows = chosen.numel()
    slot = torch.arange(rows, device=chosen.device)
    return Routes(order // chosen.shape[1], inverse(order).view(chosen.shape), None, None, slot, rows * ep // num_experts)


@torch.no_grad()
def counted_routes(chosen: torch.Tensor, counts: RoutingCounts, rank: int) -> Routes:
    """Where it is known how many rows go from each rank to each expert; this rank is that one of those that experts are dealt over."""
    order, ranks = chosen.flatten().argsort(stable=True), range(len(counts.rows))
    own, coming = counts.received(rank), [counts.sent(source, rank) for source in ranks]
    flat = torch.tensor([number for row in coming for number in row], device=chosen.device)
    expert = torch.arange(len(own), device=chosen.device).repeat(len(ranks)).repeat_interleave(flat, output_size=sum(own))
    return Routes(
        order // chosen.shape[1],
        inverse(order).view(chosen.shape),
        [sum(counts.sent(rank, other)) for other in ranks],
        [sum(row) for row in coming],
        inverse(expert.argsort(stable=True)),
        0,
        own,
    )


@torch.no_grad()
def routes(chosen: torch.Tensor, num_experts: int, *, ep: dist.ProcessGroup | None, etp: dist.ProcessGroup | None) -> Routes:
    """Each rank of ep tells the others how many rows it sends to which of their experts; ranks of etp agree on the room of an expert."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ways = dist.get_world_size(ep) if ep is not None else 1
    leaving = torch.bincount(flat, minlength=num_experts).view(ways, -1)
    coming = leaving
    if ep is not None:
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=ep)
    own = coming.sum(dim=0)
    room = own.max().clamp(min=1)
    if etp is not None:
        dist.all_reduce(room, dist.ReduceOp.MAX, group=etp)
    expert = torch.arange(len(own), device=flat.device).repeat(ways).repeat_interleave(coming.flatten())
    sorted_rows = expert.argsort(stable=True)
    first = own.cumsum(0) - own
    at = torch.arange(len(expert), device=flat.device) - first[expert[sorted_rows]]
    slot = torch.empty_like(expert)
    slot[sorted_rows] = expert[sorted_rows] * room + at
    sent, received = leaving.sum(dim=1).tolist(), coming.sum(dim=1).tolist()
    return Routes(order // chosen.shape[1], inverse(order).view(chosen.shape), sent, received, slot, int(room))


@torch.no_grad()
def own_choices(chosen: torch.Tensor, totals: Sequence[int], first: int, number: int) -> torch.Tensor:
    """Choices [t, k] of all tokens, as flat indices, of `number` experts from `first` on, in the order of experts.

    totals   choices of each expert
    """
    start = sum(totals[:first])
    return chosen.flatten().argsort(stable=True)[start : start + sum(totals[first : first + number])]


def by_expert(counts: Sequence[int], ways: int, device: torch.device) -> torch.Tensor:
    """The order by experts of rows that come as each of `ways` ranks has them, by experts: so many of each."""
    places = torch.arange(ways * sum(counts), device=device).view(ways, -1)
    return torch.cat([piece.flatten() for piece in places.split(list(counts), dim=1)])


# --------------------------------------------------------------------------------------------------- moving rows about


def _exchange_rows(rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


_exchanged = differentiable(
    _exchange_rows,
    lambda gradient, sent, received, group: _exchange_rows(gradient, received, sent, group),
    keeps_inputs=False,
    is_contiguous=False,
)


def exchange_rows(rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The first `sent[0]` rows go to the first rank of the group, and so on; None: as many to each."""
    return rows if group is None else _exchanged(rows, sent, received, group)
