"""Permutation of tokens to experts and back, one operator each way as in fused GPU kernels (`norm.py` says why)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfmodel.execute.activations import ACTIVATIONS
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.routing import RoutingCounts, expert_order

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

aten = torch.ops.aten

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


def choose(logits: torch.Tensor, experts: Experts, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """[t, E] -> weights [t, k] in float32 and experts [t, k] of each token; of equal scores the first expert wins.

    chosen   these, whatever the scores
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
    """Scores with those outside the token's best groups below all others; a group is as good as its two best experts (DeepSeek-V3)."""
    groups = scores.unflatten(-1, (experts.num_groups, -1))
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    taken = best.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, taken, True)
    return groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


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


def inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# --------------------------------------------------------------------------------------------------- moving rows about


def _exchange_rows(rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class _ExchangeRows(torch.autograd.Function):
    """Rows to other ranks, so many to each; the gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return _exchange_rows(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange_rows(rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The first `sent[0]` rows go to the first rank of the group, and so on; None: as many to each."""
    return rows if group is None else _ExchangeRows.apply(rows, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]


class _Placed(torch.autograd.Function):
    """Rows at their places among zeros. (torch's `index_copy` keeps the rows for backward, for their shape.)"""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, place: torch.Tensor, number: int, adds_up: bool) -> torch.Tensor:
        ctx.save_for_backward(place)
        zeros = rows.new_zeros(number, rows.shape[1])
        return zeros.index_add_(0, place, rows) if adds_up else zeros.index_copy_(0, place, rows)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None, None


def laid_out(rows: torch.Tensor, slot: torch.Tensor, number: int) -> torch.Tensor:
    """[n, h] -> [number, h]: row i at `slot[i]`, zeros where there is none."""
    return _Placed.apply(rows, slot, number, False)  # type: ignore[no-any-return, no-untyped-call]


def combined(rows: torch.Tensor, token: torch.Tensor, number: int) -> torch.Tensor:
    """[n, h] -> [number, h]: the rows of each token added up."""
    return _Placed.apply(rows, token, number, True)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("perfmodel::unpermute", mutates_args=())
def _unpermute(rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """y[t] = sum over j of weights[t, j] rows[place[t, j]]"""
    total = torch.zeros(len(place), rows.shape[1], dtype=weights.dtype, device=rows.device)
    for j in range(place.shape[1]):
        total.addcmul_(rows[place[:, j]].to(weights.dtype), weights[:, j : j + 1])
    return total.to(rows.dtype)


@_unpermute.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(place.shape[0], rows.shape[1])


@torch.library.custom_op("perfmodel::unpermute_backward", mutates_args=())
def _unpermute_backward(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    for_rows, for_weights = torch.empty_like(rows), torch.empty_like(weights)
    wide = gradient.to(weights.dtype)
    for j in range(place.shape[1]):
        for_rows[place[:, j]] = (wide * weights[:, j : j + 1]).to(rows.dtype)
        for_weights[:, j] = (wide * rows[place[:, j]]).sum(dim=-1)
    return for_rows, for_weights


@_unpermute_backward.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, place)
        return _unpermute(rows, weights, place)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return (*_unpermute_backward(gradients[0].contiguous(), *ctx.saved_tensors), None)


def unpermute(rows: torch.Tensor, weights: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """[n, h], [t, k], [t, k] -> [t, h]: each token's rows, weighted, added up in the weights' precision."""
    return _Unpermute.apply(rows, weights, place)  # type: ignore[no-any-return, no-untyped-call]


# --------------------------------------------------------------------------------------------------- what experts make

#: Gradient of an activation's input, of the gradient of its output and the input.
_DERIVATIVES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "relu": lambda g, x: g * (x > 0),
    "relu2": lambda g, x: g * 2.0 * F.relu(x),
    "silu": aten.silu_backward,
}


@torch.library.custom_op("perfmodel::gated", mutates_args=())
def _gated(x: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[function](gate) * up


@_gated.register_fake
def _(x: torch.Tensor, function: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("perfmodel::gated_backward", mutates_args=())
def _gated_backward(gradient: torch.Tensor, x: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    result = torch.empty_like(x)
    for_gate, for_up = result.chunk(2, dim=-1)
    for_gate.copy_(_DERIVATIVES[function](gradient * up, gate))
    for_up.copy_(gradient * ACTIVATIONS[function](gate))
    return result


@_gated_backward.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, function: str) -> torch.Tensor:
    return torch.empty_like(x)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, function: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return _gated(x, function)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return _gated_backward(gradients[0].contiguous(), ctx.saved_tensors[0], ctx.function), None


def gated(x: torch.Tensor, function: str) -> torch.Tensor:
    """function of the first half of the last dim times the second half; keeps its input alone."""
    return _Gated.apply(x, function)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("perfmodel::gated_rows", mutates_args=())
def _gated_rows(x: torch.Tensor, weights: torch.Tensor, function: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (ACTIVATIONS[function](gate) * up * weights.unsqueeze(-1)).to(x.dtype)


@_gated_rows.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, function: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("perfmodel::gated_rows_backward", mutates_args=())
def _gated_rows_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    for_weights = (gradient * _gated(x, function)).to(weights.dtype).sum(dim=-1)
    return _gated_backward((gradient * weights.unsqueeze(-1)).to(x.dtype), x, function), for_weights


@_gated_rows_backward.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, function: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


class _GatedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weights: torch.Tensor, function: str) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        ctx.function = function
        return _gated_rows(x, weights, function)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return (*_gated_rows_backward(gradients[0].contiguous(), *ctx.saved_tensors, ctx.function), None)


def gated_rows(x: torch.Tensor, weights: torch.Tensor, function: str) -> torch.Tensor:
    """`gated` of rows [..., n], times the weight of each [...]."""
    return _GatedRows.apply(x, weights, function)  # type: ignore[no-any-return, no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    """A batched product whose gradient of the weights comes as they lie (torch's own would be transposed, then copied)."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.has_bias = bias is not None
        out = torch.bmm(rows, weights.transpose(1, 2))
        return out if bias is None else out.add_(bias.unsqueeze(1))

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        gradient = gradients[0]
        for_bias = gradient.sum(dim=1) if ctx.has_bias else None
        return torch.bmm(gradient, weights), torch.bmm(gradient.transpose(1, 2), rows), for_bias


class _UnevenLinear(torch.autograd.Function):
    """One product for each expert, of rows as many as it has."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, counts: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts, ctx.has_bias = counts, bias is not None
        out = rows.new_empty(len(rows), weights.shape[1])
        for expert, (mine, weight, into) in enumerate(zip(rows.split(counts), weights, out.split(counts), strict=True)):
            torch.mm(mine, weight.t(), out=into)
            if bias is not None:
                into.add_(bias[expert])
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_rows, for_weights = torch.empty_like(rows), torch.empty_like(weights)
        pieces = (gradient.split(ctx.counts), rows.split(ctx.counts), weights, for_rows.split(ctx.counts), for_weights)
        for out, mine, weight, for_mine, for_weight in zip(*pieces, strict=True):
            torch.mm(out, weight, out=for_mine)
            torch.mm(out.t(), mine, out=for_weight)
        for_bias = torch.stack([each.sum(dim=0) for each in gradient.split(ctx.counts)]) if ctx.has_bias else None
        return for_rows, for_weights, for_bias, None


def grouped_linear(
    rows: torch.Tensor, weights: torch.Tensor, counts: tuple[int, ...] = (), bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[e, m, h], [e, n, h], [e, n] -> [e, m, n]; with the rows of each expert counted [sum of counts, h], ... -> [sum of counts, n]"""
    product, rest = (_UnevenLinear, (counts,)) if counts else (_GroupedLinear, ())
    return product.apply(rows, weights, bias, *rest)  # type: ignore[no-any-return, no-untyped-call]
