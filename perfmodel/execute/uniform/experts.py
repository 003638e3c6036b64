"""A mixture of experts in the place of the MLP: dropless, tokens sent to their experts by an all-to-all and brought back by another.

Weights of all experts of a rank are two matrices, an expert's rows after another's, so that ZeRO cuts them by rows like any other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from perfmodel.execute.layers.experts import choose, combined, expert_feed_forward, inverse, laid_out, unpermute, weighted_sum
from perfmodel.execute.local import local_tensor
from perfmodel.execute.uniform.collective_ops import gather_sequence, scatter_partial
from perfmodel.execute.uniform.once import counted_once, sent_once
from perfmodel.execute.uniform.routing import (
    Routes,
    as_counted,
    balanced_routes,
    by_expert,
    counted_routes,
    exchange_rows,
    in_turn,
    own_choices,
    routes,
)
from perfmodel.execute.uniform.sharding import ExpertSharding, Sharding
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import Experts

#: Names of the matrices of the experts among which tokens choose, in a layer.
UP, DOWN = "experts_up.weight", "experts_down.weight"
_BIASES = ("experts_up.bias", "experts_down.bias")


def is_of_experts(name: str) -> bool:
    """Whether a parameter is one of those, or their biases."""
    return name.endswith((UP, DOWN, *_BIASES))


def _split(name: str, experts: Experts) -> tuple[int, int]:
    """(blocks of rows before those that etp cuts, dim of the view [experts, blocks, rows, columns] that it cuts)"""
    return (2 if experts.gated else 1, 2) if name.endswith(UP) else (1, 3)


def own_piece(whole: torch.Tensor, name: str, experts: Experts, sharding: ExpertSharding) -> torch.Tensor:
    """A rank's part of a matrix of all experts, or of their biases."""
    if name.endswith(_BIASES):
        return whole.chunk(sharding.ep)[sharding.ep_rank]
    blocks, dim = _split(name, experts)
    viewed = whole.view(experts.num_experts, blocks, -1, whole.shape[-1])
    piece = viewed.chunk(sharding.ep)[sharding.ep_rank].chunk(sharding.etp, dim=dim)[sharding.etp_rank]
    return piece.reshape(-1, piece.shape[-1])


def whole_matrix(piece: torch.Tensor, name: str, experts: Experts, sharding: ExpertSharding) -> torch.Tensor:
    """The matrix of all experts, of what each rank of ep and etp holds."""
    if name.endswith(_BIASES):
        return _joined(piece.contiguous(), sharding.ep_group, 0)
    blocks, dim = _split(name, experts)
    viewed = piece.view(experts.num_experts // sharding.ep, blocks, -1, piece.shape[-1]).contiguous()
    viewed = _joined(_joined(viewed, sharding.etp_group, dim), sharding.ep_group, 0)
    return viewed.reshape(-1, viewed.shape[-1])


def _joined(piece: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """The pieces of all ranks of a group."""
    if group is None:
        return piece
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, piece, group=group)
    return torch.cat(pieces, dim=dim)


def holds_all(shape: torch.Size, name: str, config: TransformerConfig) -> bool:
    """Whether these are the biases of all experts, which a rank that serves has."""
    experts = config.experts
    if experts is None or not name.endswith(_BIASES):
        return False
    rows = config.hidden_size if name.endswith(_BIASES[1]) else experts.width * (2 if experts.gated else 1)
    return shape == (experts.num_experts * rows,)


def whole_shape(shape: torch.Size, name: str, experts: Experts, sharding: ExpertSharding) -> torch.Size:
    """Shape of a matrix of all experts, from that of a rank's piece."""
    if name.endswith(_BIASES):
        return torch.Size((shape[0] * sharding.ep,))
    rows, columns = shape
    up = name.endswith(UP)
    return torch.Size((rows * sharding.ep * (sharding.etp if up else 1), columns * (1 if up else sharding.etp)))


class ReplicatedLinear(nn.Linear):
    """A linear that each rank of tp applies to tokens of its own: its weight's gradient is partial over tp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def here(parameter: torch.Tensor) -> torch.Tensor:
            return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter

        return F.linear(x, here(self.weight), None if self.bias is None else here(self.bias))


class ExpertMatrices(nn.Module):
    """One matrix of each of several experts, an expert's rows after another's, and their biases."""

    def __init__(self, number: int, rows: int, columns: int, *, bias: bool, device: str) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.empty(number * rows, columns, device=device))
        self.register_parameter("bias", nn.Parameter(torch.empty(number * rows, device=device)) if bias else None)

    def of_experts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights [e, rows, columns] and biases [e, rows]."""
        bias = None if self.bias is None else self.bias.unflatten(0, (self.number, -1))
        return self.weight.unflatten(0, (self.number, -1)), bias


class GroupedExperts(nn.Module):
    """The experts of this rank, on rows that lie sorted: [e, m, h] -> [e, m, h]; [n, h] -> [n, h] of so many each as `counts` says."""

    def __init__(self, config: TransformerConfig, sharding: ExpertSharding, *, device: str) -> None:
        super().__init__()
        assert config.experts is not None
        experts = config.experts
        self.function, self.is_gated, self.group = config.activation, experts.gated, sharding.etp_group
        number, width = experts.num_experts // sharding.ep, experts.width // sharding.etp
        rows = (2 if experts.gated else 1) * width
        self.up = ExpertMatrices(number, rows, config.hidden_size, bias=experts.bias, device=device)
        self.down = ExpertMatrices(number, config.hidden_size, width, bias=experts.bias, device=device)

    def forward(self, rows: torch.Tensor, counts: tuple[int, ...] = (), weights: torch.Tensor | None = None) -> torch.Tensor:
        """weights: of each row, where they are weighted here"""
        order = None
        if self.group is not None and counts:
            # those who share an expert have as many rows of it each, one after another
            ways = dist.get_world_size(self.group)
            order = by_expert(counts, ways, rows.device)
            rows, counts = gather_sequence(rows, 0, self.group).index_select(0, order), tuple(ways * number for number in counts)
        elif self.group is not None:
            rows = gather_sequence(rows, 1, self.group)
        (up, up_bias), (down, down_bias) = self.up.of_experts(), self.down.of_experts()
        out = expert_feed_forward(
            rows, up, down, function=self.function, is_gated=self.is_gated, counts=counts, biases=(up_bias, down_bias), weights=weights
        )
        if order is not None:
            out = out.index_select(0, inverse(order))
        return out if self.group is None else scatter_partial(out, 0 if counts else 1, self.group)


class ExpertMixture(nn.Module):
    """Router, experts, and what every token runs besides (`shared`: of the width of all shared experts together; None without).

    adds_before_reduction   what tp's ranks have of the shared experts' output is a part of the sum, to which others are added first
    """

    adds_before_reduction = False

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, shared: nn.Module | None, device: str) -> None:
        super().__init__()
        assert config.experts is not None
        experts = config.experts
        self.config, self.sharding = experts, sharding
        self.router = ReplicatedLinear(config.hidden_size, experts.num_experts, bias=experts.router_bias, device=device)
        self.experts = GroupedExperts(config, sharding.experts, device=device)
        if shared is not None:
            self.shared = shared
        if experts.shared_gate:
            self.shared_gate = ReplicatedLinear(config.hidden_size, 1, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] of this rank's tokens, which may be a DTensor cut over tp."""
        local = local_tensor(x)
        cut = self.sharding.experts
        reach = self._gathered if cut.gathers else self._once if cut.once and cut.ep_group is not None else self._routed
        output = reach(local.flatten(0, 1))
        shared = self.shared(x) if hasattr(self, "shared") else None
        if hasattr(self, "shared_gate"):
            shared = shared * torch.sigmoid(self.shared_gate(local))
        if cut.gathers and cut.ep_group is not None:
            output = scatter_partial(output, 0, cut.ep_group)
        output = output.view(local.shape)
        return output if shared is None else output + shared

    def _fixed(self, x: torch.Tensor) -> torch.Tensor | None:
        """The experts of each token where that does not depend on scores."""
        counts = self.sharding.routing
        if counts is not None:
            return as_counted(counts.rows[self.sharding.experts.ep_rank], self.config, x.device)
        return in_turn(len(x), self.config, x.device) if self.sharding.is_abstract else None

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[t, h] -> [ranks * t, h]: of all ranks' tokens what a rank's experts make of them, to be added up."""
        cut, counts, experts = self.sharding.experts, self.sharding.routing, self.config
        choices = torch.stack(choose(self.router(x), experts, self._fixed(x)), dim=-1)  # with the number of the expert as float32
        if cut.ep_group is not None:
            x, choices = gather_sequence(x, 0, cut.ep_group), gather_sequence(choices, 0, cut.ep_group)
        weights, chosen = choices.unbind(-1)
        del choices
        if counts is not None:
            totals = [sum(each) for each in zip(*counts.rows, strict=True)]
        elif self.sharding.is_abstract:
            totals = [chosen.numel() // experts.num_experts] * experts.num_experts
        else:
            totals = torch.bincount(chosen.flatten().long(), minlength=experts.num_experts).tolist()
        number = experts.num_experts // cut.ep
        mine = own_choices(chosen, totals, cut.ep_rank * number, number)
        own, token, tokens = tuple(totals[cut.ep_rank * number :][:number]), mine // experts.top_k, len(x)
        rows, of_rows = x.index_select(0, token), weights.flatten().index_select(0, mine)
        del x, weights, chosen, mine
        if counts is None and len(set(own)) == 1:
            rows = self.experts(rows.unflatten(0, (number, -1)), weights=of_rows.unflatten(0, (number, -1))).flatten(0, 1)
        else:
            rows = self.experts(rows, own, of_rows)
        return combined(rows, token, tokens)

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """[t, h] -> [t, h]"""
        cut, fixed = self.sharding.experts, self._fixed(x)
        weights, chosen = choose(self.router(x), self.config, fixed)
        way = self._way(chosen, is_fixed=fixed is not None)
        del chosen, fixed
        rows = exchange_rows(x.index_select(0, way.token), way.sent, way.received, cut.ep_group)
        room = self._room(rows, way)
        del rows
        room = self._computed(room, way)
        rows = exchange_rows(room.index_select(0, way.slot), way.received, way.sent, cut.ep_group)
        del room
        return unpermute(rows, weights, way.place)

    def _once(self, x: torch.Tensor) -> torch.Tensor:
        """[t, h] -> [t, h], each token once to every rank that has experts of its choice (`once.py`)."""
        cut, counts = self.sharding.experts, self.sharding.routing
        assert cut.ep_group is not None
        weights, chosen = choose(self.router(x), self.config, self._fixed(x))
        way = self._way(chosen)
        if self.sharding.is_abstract:
            assert counts is not None  # `counted_routing` makes them
            once = counted_once(chosen, way, counts, cut.ep_rank)
        else:
            once = sent_once(chosen, way, self.config.num_experts, cut.ep_group)
        del chosen
        weights = exchange_rows(weights.flatten().index_select(0, once.order), way.sent, way.received, cut.ep_group)
        rows = exchange_rows(x.index_select(0, once.token), once.sent, once.received, cut.ep_group)
        room = self._room(rows.index_select(0, once.copy), way)
        del rows
        room = self._computed(room, way)
        rows = weighted_sum(room.index_select(0, way.slot), weights, once.copy, sum(once.received))
        del room
        return combined(exchange_rows(rows, once.received, once.sent, cut.ep_group), once.token, len(x))

    def _way(self, chosen: torch.Tensor, *, is_fixed: bool = False) -> Routes:
        """is_fixed: of experts in turn, where no counts say more"""
        number, cut, counts = self.config.num_experts, self.sharding.experts, self.sharding.routing
        if counts is not None:
            return counted_routes(chosen, counts, cut.ep_rank)
        if is_fixed:
            return balanced_routes(chosen, number, cut.ep)
        return routes(chosen, number, ep=cut.ep_group, etp=cut.etp_group)

    def _room(self, rows: torch.Tensor, way: Routes) -> torch.Tensor:
        """Rows in the order of this rank's experts."""
        return laid_out(rows, way.slot, sum(way.counts) or self.experts.up.number * way.room)

    def _computed(self, room: torch.Tensor, way: Routes) -> torch.Tensor:
        return self.experts(room, way.counts) if way.counts else self.experts(room.unflatten(0, (-1, way.room))).flatten(0, 1)
