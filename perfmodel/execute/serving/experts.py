"""Experts as they serve: every rank of tp has all tokens, computes what its experts (or its share of each) add, and the parts are added."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfmodel.execute.activations import ACTIVATIONS
from perfmodel.execute.serving.step import ServedSharding
from perfmodel.execute.uniform.experts import ExpertMixture
from perfmodel.execute.uniform.routing import balanced_routes, choose, gated, grouped_linear, in_turn, unpermute


class ServedMixture(ExpertMixture):
    """Weights of those experts alone are read that some token chose."""

    sharding: ServedSharding

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """[t, h] -> [t, h]"""
        cut, is_balanced = self.sharding.experts, self.sharding.is_abstract
        weights, chosen = choose(self.router(x), self.config, in_turn(len(x), self.config, x.device) if is_balanced else None)
        number = self.config.num_experts // cut.ep
        first = cut.ep_rank * number
        output = self._evenly(x, weights, chosen) if is_balanced else self._by_expert(x, weights, chosen, first, number)
        if self.sharding.tp_group is not None:
            dist.all_reduce(output, group=self.sharding.tp_group)
        return output

    def _expert(self, expert: int | slice, rows: torch.Tensor) -> torch.Tensor:
        """[.., m, h] -> [.., m, h] of one expert of this rank, or of several [e, m, h]"""
        up, down = (each.weight.unflatten(0, (each.number, -1))[expert] for each in (self.experts.up, self.experts.down))
        product = F.linear if isinstance(expert, int) else grouped_linear
        inner = product(rows, up)
        inner = gated(inner, self.experts.function) if self.experts.is_gated else ACTIVATIONS[self.experts.function](inner)
        return product(inner, down)

    def _by_expert(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, first: int, number: int) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
        order = chosen.flatten().argsort(stable=True)
        rows = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        stop = sum(rows[:first])
        for expert in range(number):
            start, stop = stop, stop + rows[first + expert]
            if stop > start:
                mine = order[start:stop]
                token = mine // chosen.shape[1]
                made = self._expert(expert, x.index_select(0, token)).to(weights.dtype)
                total.index_add_(0, token, made * weights.flatten()[mine].unsqueeze(1))
        return total.to(x.dtype)

    def _evenly(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Where tensors have no values: experts in turn, each with as many rows, as far as rows go."""
        ep = self.sharding.experts.ep
        way = balanced_routes(chosen, min(self.config.num_experts, chosen.numel()), 1)
        distinct = min(self.config.num_experts // ep, max(1, chosen.numel() // ep))
        rows = x.index_select(0, way.token[: len(way.token) // ep])
        made = self._expert(slice(0, distinct), rows.unflatten(0, (distinct, -1))).flatten(0, 1)
        if ep > 1:
            made = made.repeat(ep, 1)
        return unpermute(made, weights, way.place)
