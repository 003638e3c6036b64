"""Dispatch of tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from perfmodel.execute.layers.experts import inverse
from perfmodel.execute.layers.kernel import differentiable
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.routing import RoutingCounts, expert_order

# ------------------------------------------------------------------------------------------------------------ choosing


def round_robin(tokens: int, experts: Experts, device: torch.device) -> torch.Tensor:
    """Return round-robin choices of experts [t, k], independent of scores."""
    k = experts.top_k
    return (torch.arange(tokens * k, device=device) % experts.num_experts).view(tokens, k)


def choices_of_counts(counts: Sequence[int], experts: Experts, device: torch.device) -> torch.Tensor:
    """Return choices [t, k] with `counts` choices of each expert, no expert twice per token: none has more choices than there are tokens,
    which are assigned in turn, expert by expert, as in `RoutingCounts.choices`."""
    order = expert_order(len(counts)).tolist()
    times = torch.tensor([counts[expert] for expert in order], device=device)
    choices = torch.tensor(order, device=device).repeat_interleave(times, output_size=sum(counts))
    return choices.view(experts.top_k, -1).t().contiguous()


# ------------------------------------------------------------------------------------------------------- where rows go


@dataclass(frozen=True, slots=True)
class Routes:
    """Dispatch of a rank's rows, and the layout of the rows that it receives.

    token            token of each row that is sent, in the order of experts
    row_of_choice    [t, k]: the row of a token's copy for its j-th expert
    sent, received   rows to and from each rank of ep; None: equal numbers
    slot, capacity   slot of each received row among the rows of this rank's experts, with `capacity` rows per expert
    counts           rows of each expert, if each has exactly its own number of rows instead
    """

    token: torch.Tensor
    row_of_choice: torch.Tensor
    sent: list[int] | None
    received: list[int] | None
    slot: torch.Tensor
    capacity: int
    counts: tuple[int, ...] = ()


@torch.no_grad()
def balanced_routes(chosen: torch.Tensor, num_experts: int, ep: int) -> Routes:
    """Return the routes for equal numbers of rows per expert: no counts need to be exchanged."""
    order = chosen.flatten().argsort(stable=True)
    rows = chosen.numel()
    slot = torch.arange(rows, device=chosen.device)
    return Routes(order // chosen.shape[1], inverse(order).view(chosen.shape), None, None, slot, rows * ep // num_experts)


@torch.no_grad()
def counted_routes(chosen: torch.Tensor, counts: RoutingCounts, rank: int) -> Routes:
    """Return the routes for given counts from each rank to each expert; rank: this rank within ep."""
    order, ranks = chosen.flatten().argsort(stable=True), range(len(counts.rows))
    local_counts, coming = counts.received(rank), [counts.sent(source, rank) for source in ranks]
    flat = torch.tensor([number for row in coming for number in row], device=chosen.device)
    expert = torch.arange(len(local_counts), device=chosen.device).repeat(len(ranks)).repeat_interleave(flat, output_size=sum(local_counts))
    return Routes(
        order // chosen.shape[1],
        inverse(order).view(chosen.shape),
        [sum(counts.sent(rank, other)) for other in ranks],
        [sum(row) for row in coming],
        inverse(expert.argsort(stable=True)),
        0,
        local_counts,
    )


@torch.no_grad()
def routes(chosen: torch.Tensor, num_experts: int, *, ep: dist.ProcessGroup | None, etp: dist.ProcessGroup | None) -> Routes:
    """Exchange the number of rows per expert over ep, and take the largest expert capacity over etp."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ways = dist.get_world_size(ep) if ep is not None else 1
    leaving = torch.bincount(flat, minlength=num_experts).view(ways, -1)
    coming = leaving
    if ep is not None:
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=ep)
    local_counts = coming.sum(dim=0)
    capacity = local_counts.max().clamp(min=1)
    if etp is not None:
        dist.all_reduce(capacity, dist.ReduceOp.MAX, group=etp)
    expert = torch.arange(len(local_counts), device=flat.device).repeat(ways).repeat_interleave(coming.flatten())
    sorted_rows = expert.argsort(stable=True)
    first = local_counts.cumsum(0) - local_counts
    at = torch.arange(len(expert), device=flat.device) - first[expert[sorted_rows]]
    slot = torch.empty_like(expert)
    slot[sorted_rows] = expert[sorted_rows] * capacity + at
    sent, received = leaving.sum(dim=1).tolist(), coming.sum(dim=1).tolist()
    return Routes(order // chosen.shape[1], inverse(order).view(chosen.shape), sent, received, slot, int(capacity))


@torch.no_grad()
def local_choices(chosen: torch.Tensor, totals: Sequence[int], first: int, number: int) -> torch.Tensor:
    """Return the choices [t, k] of `number` experts from `first` on, as flat indices in the order of experts.

    totals   choices of each expert
    """
    start = sum(totals[:first])
    return chosen.flatten().argsort(stable=True)[start : start + sum(totals[first : first + number])]


def by_expert(counts: Sequence[int], ways: int, device: torch.device) -> torch.Tensor:
    """Return the order that sorts rows by expert, if each of `ways` ranks contributes `counts` rows per expert, in expert order."""
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
    """Send the first `sent[0]` rows to the first rank of the group, and so on; None: equal numbers."""
    return rows if group is None else _exchanged(rows, sent, received, group)


# -------------------------------------------------------------------------------------------------- tokens sent once
#
# Each token is sent once to every rank with experts of its choice, which copies it for them and sums their outputs. DeepEP and HybridEP do
# this within a node. Here it uses ordinary all-to-alls: one of tokens, and one of the routing weights of all choices for the sums. Backward
# reverses each of them.


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
