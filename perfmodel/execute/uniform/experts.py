"""Dropless mixture of experts in place of the MLP: tokens are dispatched to their experts by an all-to-all and combined by another.

The weights of a rank's experts form two matrices, stacked by expert, so that ZeRO shards them by rows like any other matrix.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from perfmodel.execute.layers.experts import choose, combine_rows, expert_feed_forward, inverse, scatter_rows, unpermute, weighted_sum
from perfmodel.execute.local import applied_locally, gathered, local_tensor
from perfmodel.execute.uniform.collective_ops import gather_sequence, scatter_partial
from perfmodel.execute.uniform.routing import (
    Routes,
    balanced_routes,
    by_expert,
    choices_of_counts,
    counted_once,
    counted_routes,
    exchange_rows,
    local_choices,
    round_robin,
    routes,
    sent_once,
)
from perfmodel.execute.uniform.sharding import ExpertSharding, Sharding
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import Experts

#: Names of the matrices of the routed experts in a layer.
UP, DOWN = "experts_up.weight", "experts_down.weight"
_BIASES = ("experts_up.bias", "experts_down.bias")


def is_expert_parameter(name: str) -> bool:
    """Return whether a parameter is one of the experts' matrices or biases."""
    return name.endswith((UP, DOWN, *_BIASES))


def _split(name: str, experts: Experts) -> tuple[int, int]:
    """Return (number of row blocks that etp shards separately, dim of the view [experts, blocks, rows, columns] that it shards).

    Biases have no columns: those of the first product are sharded with its rows, those of the last are not.
    """
    return (2 if experts.gated else 1, 2) if _is_up(name) else (1, 3)


def _is_up(name: str) -> bool:
    return name.endswith((UP, _BIASES[0]))


def expert_shard(matrix: torch.Tensor, name: str, experts: Experts, sharding: ExpertSharding) -> torch.Tensor:
    """Return a rank's shard of the stacked matrix of all experts, or of their biases."""
    blocks, dim = _split(name, experts)
    piece = matrix.view(experts.num_experts, blocks, -1, *matrix.shape[1:]).chunk(sharding.ep)[sharding.ep_rank]
    if dim < piece.dim():
        piece = piece.chunk(sharding.etp, dim=dim)[sharding.etp_rank]
    return piece.reshape(-1, *piece.shape[3:])


def gathered_matrix(piece: torch.Tensor, name: str, experts: Experts, sharding: ExpertSharding) -> torch.Tensor:
    """Return the stacked matrix of all experts, or their biases, all-gathered from the ranks of ep and etp."""
    blocks, dim = _split(name, experts)
    viewed = piece.view(experts.num_experts // sharding.ep, blocks, -1, *piece.shape[1:]).contiguous()
    if dim < viewed.dim():
        viewed = _joined(viewed, sharding.etp_group, dim)
    return _joined(viewed, sharding.ep_group, 0).reshape(-1, *viewed.shape[3:])


def _joined(piece: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """Return the concatenated pieces of all ranks of a group."""
    return piece if group is None else gathered(piece, dim, group)


def unsharded_shape(shape: torch.Size, name: str, sharding: ExpertSharding) -> torch.Size:
    """Return the shape of the stacked matrix of all experts, or of their biases, given that of a rank's shard."""
    rows, *columns = shape
    of_rows, of_columns = (sharding.etp, 1) if _is_up(name) else (1, sharding.etp)
    return torch.Size((rows * sharding.ep * of_rows, *(column * of_columns for column in columns)))


class ReplicatedLinear(nn.Linear):
    """A linear layer that each tp rank applies to its own tokens: its weight gradient is partial over tp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, applied_locally(self.weight), None if self.bias is None else applied_locally(self.bias))


class ExpertMatrices(nn.Module):
    """One matrix of each of several experts, stacked by rows, and their biases."""

    def __init__(self, number: int, rows: int, columns: int, *, bias: bool, device: str) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.empty(number * rows, columns, device=device))
        self.register_parameter("bias", nn.Parameter(torch.empty(number * rows, device=device)) if bias else None)

    def of_experts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weights [e, rows, columns] and biases [e, rows]."""
        bias = None if self.bias is None else self.bias.unflatten(0, (self.number, -1))
        return self.weight.unflatten(0, (self.number, -1)), bias


class GroupedExperts(nn.Module):
    """The experts of this rank, on rows sorted by expert: [e, m, h] -> [e, m, h], or [n, h] -> [n, h] with `counts` rows per expert."""

    def __init__(self, config: TransformerConfig, sharding: ExpertSharding, *, device: str) -> None:
        super().__init__()
        assert config.parts.experts is not None
        experts = config.parts.experts
        self.function, self.is_gated, self.group = config.mlp.activation, experts.gated, sharding.etp_group
        number, width = experts.num_experts // sharding.ep, experts.width // sharding.etp
        rows = (2 if experts.gated else 1) * width
        self.up = ExpertMatrices(number, rows, config.hidden_size, bias=experts.bias, device=device)
        self.down = ExpertMatrices(number, config.hidden_size, width, bias=experts.bias, device=device)

    def forward(self, rows: torch.Tensor, counts: tuple[int, ...] = (), weights: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the experts. weights: routing weight of each row, if applied here."""
        order = None
        if self.group is not None and counts:
            # the ranks that shard an expert have equal numbers of rows of it; gather and sort them by expert
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
    """Router, experts, and shared experts (`shared`: one MLP with the total width of the shared experts; None without).

    adds_before_reduction   the shared experts' output is partial over tp, and the routed output is added before the reduction
    """

    adds_before_reduction = False

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, shared: nn.Module | None, device: str) -> None:
        super().__init__()
        assert config.parts.experts is not None
        experts = config.parts.experts
        self.config, self.sharding = experts, sharding
        self.router = ReplicatedLinear(config.hidden_size, experts.num_experts, bias=experts.router_bias, device=device)
        self.experts = GroupedExperts(config, sharding.experts, device=device)
        if shared is not None:
            self.shared = shared
        if experts.shared_gate:
            self.shared_gate = ReplicatedLinear(config.hidden_size, 1, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, h] -> [b, s, h] for this rank's tokens, which may be a DTensor sharded over tp."""
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
        """Return the experts of each token if they do not depend on scores; else None."""
        counts = self.sharding.routing
        if counts is not None:
            return choices_of_counts(counts.rows[self.sharding.experts.ep_rank], self.config, x.device)
        return round_robin(len(x), self.config, x.device) if self.sharding.is_abstract else None

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [t, h] -> [ranks * t, h]: the partial sums of this rank's experts for the tokens of all ranks."""
        cut, counts, experts = self.sharding.experts, self.sharding.routing, self.config
        choices = torch.stack(choose(self.router(x), experts, self._fixed(x)), dim=-1)  # with expert indices as float32
        if cut.ep_group is not None:
            x, choices = gather_sequence(x, 0, cut.ep_group), gather_sequence(choices, 0, cut.ep_group)
        weights, chosen = choices.unbind(-1)
        del choices
        if counts is not None:
            totals = [sum(column) for column in zip(*counts.rows, strict=True)]
        elif self.sharding.is_abstract:
            totals = [chosen.numel() // experts.num_experts] * experts.num_experts
        else:
            totals = torch.bincount(chosen.flatten().long(), minlength=experts.num_experts).tolist()
        number = experts.num_experts // cut.ep
        mine = local_choices(chosen, totals, cut.ep_rank * number, number)
        local_counts, token, tokens = tuple(totals[cut.ep_rank * number :][:number]), mine // experts.top_k, len(x)
        rows, of_rows = x.index_select(0, token), weights.flatten().index_select(0, mine)
        del x, weights, chosen, mine
        if counts is None and len(set(local_counts)) == 1:
            rows = self.experts(rows.unflatten(0, (number, -1)), weights=of_rows.unflatten(0, (number, -1))).flatten(0, 1)
        else:
            rows = self.experts(rows, local_counts, of_rows)
        return combine_rows(rows, token, tokens)

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [t, h] -> [t, h], with an all-to-all of one row per choice."""
        cut, fixed = self.sharding.experts, self._fixed(x)
        weights, chosen = choose(self.router(x), self.config, fixed)
        way = self._way(chosen, is_fixed=fixed is not None)
        del chosen, fixed
        rows = exchange_rows(x.index_select(0, way.token), way.sent, way.received, cut.ep_group)
        buffer = self._sorted(rows, way)
        del rows
        buffer = self._computed(buffer, way)
        rows = exchange_rows(buffer.index_select(0, way.slot), way.received, way.sent, cut.ep_group)
        del buffer
        return unpermute(rows, weights, way.row_of_choice)

    def _once(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [t, h] -> [t, h], sending each token once to every rank that has experts of its choice (`SentOnce`)."""
        cut, counts = self.sharding.experts, self.sharding.routing
        assert cut.ep_group is not None
        weights, chosen = choose(self.router(x), self.config, self._fixed(x))
        way = self._way(chosen)
        if self.sharding.is_abstract:
            assert counts is not None  # set by `counted_routing`
            once = counted_once(chosen, way, counts, cut.ep_rank)
        else:
            once = sent_once(chosen, way, self.config.num_experts, cut.ep_group)
        del chosen
        weights = exchange_rows(weights.flatten().index_select(0, once.order), way.sent, way.received, cut.ep_group)
        rows = exchange_rows(x.index_select(0, once.token), once.sent, once.received, cut.ep_group)
        buffer = self._sorted(rows.index_select(0, once.copy), way)
        del rows
        buffer = self._computed(buffer, way)
        rows = weighted_sum(buffer.index_select(0, way.slot), weights, once.copy, sum(once.received))
        del buffer
        return combine_rows(exchange_rows(rows, once.received, once.sent, cut.ep_group), once.token, len(x))

    def _way(self, chosen: torch.Tensor, *, is_fixed: bool = False) -> Routes:
        """Return the routes of the choices. is_fixed: round-robin choices without counts."""
        number, cut, counts = self.config.num_experts, self.sharding.experts, self.sharding.routing
        if counts is not None:
            return counted_routes(chosen, counts, cut.ep_rank)
        if is_fixed:
            return balanced_routes(chosen, number, cut.ep)
        return routes(chosen, number, ep=cut.ep_group, etp=cut.etp_group)

    def _sorted(self, rows: torch.Tensor, way: Routes) -> torch.Tensor:
        """Return the rows in the order of this rank's experts."""
        return scatter_rows(rows, way.slot, sum(way.counts) or self.experts.up.number * way.capacity)

    def _computed(self, buffer: torch.Tensor, way: Routes) -> torch.Tensor:
        return self.experts(buffer, way.counts) if way.counts else self.experts(buffer.unflatten(0, (-1, way.capacity))).flatten(0, 1)
