"""Experts in serving: every tp rank has all tokens, computes its experts or its shard of each, and the results are all-reduced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from perfmodel.execute.layers.experts import choose, expert_feed_forward, unpermute, weighted_sum
from perfmodel.execute.serving.step import ServedSharding
from perfmodel.execute.uniform.experts import ExpertMixture
from perfmodel.execute.uniform.routing import balanced_routes, local_choices, round_robin
from perfmodel.workload.config import TransformerConfig


class ServedMixture(ExpertMixture):
    """Mixture that reads only the weights of experts that some token chose. Shared and routed experts are reduced together."""

    adds_before_reduction = True
    sharding: ServedSharding

    def __init__(self, config: TransformerConfig, sharding: ServedSharding, *, shared: nn.Module | None, device: str) -> None:
        super().__init__(config, sharding, shared=shared, device=device)
        assert config.experts is not None
        experts = config.experts
        widths = {"up": experts.width * (2 if experts.gated else 1), "down": config.hidden_size}
        for name, width in widths.items() if experts.bias else ():  # biases of all experts, on every rank
            product = self.experts.get_submodule(name)
            product.register_parameter("bias", nn.Parameter(torch.empty(experts.num_experts * width, device=device)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [1, t, h] -> [1, t, h]."""
        output = self._routed(x.flatten(0, 1)).view(x.shape)
        if hasattr(self, "shared"):
            shared = self.shared(x)
            output = output + (shared * torch.sigmoid(self.shared_gate(x)) if hasattr(self, "shared_gate") else shared)
        if self.sharding.tp_group is not None:
            dist.all_reduce(output, group=self.sharding.tp_group)
        return output

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [t, h] -> [t, h], this rank's partial sum."""
        is_abstract = self.sharding.is_abstract
        weights, chosen = choose(self.router(x), self.config, round_robin(len(x), self.config, x.device) if is_abstract else None)
        return (self._evenly if is_abstract else self._by_expert)(x, weights, chosen)

    def _expert(self, experts: slice, rows: torch.Tensor) -> torch.Tensor:
        """Compute [e, m, h] -> [e, m, h] for experts of this rank."""
        up, down = self.experts.up, self.experts.down
        up_bias = self._local_biases(up.bias, experts, cuts=2 if self.config.gated else 1)
        # the ranks that shard an expert are summed, so only one adds the bias
        down_bias = None if self.sharding.experts.etp_rank else self._local_biases(down.bias, experts)
        up_weights, down_weights = (product.weight.unflatten(0, (product.number, -1))[experts] for product in (up, down))
        return expert_feed_forward(
            rows,
            up_weights,
            down_weights,
            function=self.experts.function,
            is_gated=self.experts.is_gated,
            biases=(up_bias, down_bias),
        )

    def _local_biases(self, biases: torch.Tensor | None, experts: slice, *, cuts: int = 0) -> torch.Tensor | None:
        """Return the biases [e, w], or this rank's shard of each of `cuts` blocks of columns."""
        if biases is None:
            return None
        cut = self.sharding.experts
        result = biases.unflatten(0, (self.config.num_experts, -1)).chunk(cut.ep)[cut.ep_rank][experts]
        return result.unflatten(-1, (cuts, -1)).chunk(cut.etp, dim=-1)[cut.etp_rank].flatten(-2) if cuts else result

    def _by_expert(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        cut, number = self.sharding.experts, self.config.num_experts // self.sharding.experts.ep
        rows = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        mine = local_choices(chosen, rows, cut.ep_rank * number, number)
        token = mine // chosen.shape[1]
        counts = rows[cut.ep_rank * number :][:number]
        outputs = [
            self._expert(slice(expert, expert + 1), x.index_select(0, tokens).unsqueeze(0)).squeeze(0)
            for expert, tokens in enumerate(token.split(counts))
            if len(tokens)
        ]
        if not outputs:
            return torch.zeros_like(x)
        return weighted_sum(torch.cat(outputs), weights.flatten()[mine], token, len(x))

    def _evenly(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Compute with tensors without values: round-robin routing gives each expert the same number of rows."""
        ep = self.sharding.experts.ep
        way = balanced_routes(chosen, min(self.config.num_experts, chosen.numel()), 1)
        distinct = min(self.config.num_experts // ep, max(1, chosen.numel() // ep))
        rows = x.index_select(0, way.token[: len(way.token) // ep])
        output = self._expert(slice(0, distinct), rows.unflatten(0, (distinct, -1))).flatten(0, 1)
        if ep > 1:
            output = output.repeat(ep, 1)
        return unpermute(output, weights, way.row_of_choice)
