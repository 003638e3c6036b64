"""Decoder for serving: the modules and weights of the training model, with a cache in its mixers and experts on the ranks of tp."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from perfmodel.execute.layers.experts import choose, expert_feed_forward, unpermute, weighted_sum
from perfmodel.execute.local import local_tensor, placed_like
from perfmodel.execute.serving.attention import CACHED_STATES, CachedAttention, CachedLatent
from perfmodel.execute.serving.cache import PagedCache
from perfmodel.execute.serving.step import ServedSharding, ServedStep
from perfmodel.execute.uniform.collective_ops import gather_sequence
from perfmodel.execute.uniform.experts import ExpertMixture
from perfmodel.execute.uniform.model import Layer, Transformer, kind_of
from perfmodel.execute.uniform.routing import balanced_routes, local_choices
from perfmodel.execute.uniform.sharding import ExpertSharding
from perfmodel.execute.uniform.tensor_parallel import apply_tensor_parallel
from perfmodel.execute.uniform.weights import canonical_name, fill
from perfmodel.workload.config import TransformerConfig


class ServedMixture(ExpertMixture):
    """Mixture that reads only the weights of experts that some token chose. Shared and routed experts are reduced together."""

    adds_before_reduction = True
    sharding: ServedSharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [1, t, h] -> [1, t, h]."""
        rows = x.flatten(0, 1)
        weights, chosen = choose(self.router(rows), self.config, self._fixed(rows))
        output = (self._evenly if self.sharding.is_abstract else self._by_expert)(rows, weights, chosen).view(x.shape)
        if hasattr(self, "shared"):
            shared = self.shared(x)
            output = output + (shared * torch.sigmoid(self.shared_gate(x)) if hasattr(self, "shared_gate") else shared)
        if self.sharding.tp_group is not None:
            dist.all_reduce(output, group=self.sharding.tp_group)
        return output

    def _expert(self, experts: slice, rows: torch.Tensor) -> torch.Tensor:
        """Compute [e, m, h] -> [e, m, h] for experts of this rank."""
        (up, up_bias), (down, down_bias) = self.experts.up.of_experts(), self.experts.down.of_experts()
        if self.sharding.experts.etp_rank:  # the ranks that shard an expert are summed, so only one adds the last bias
            down_bias = None
        biases = (None if up_bias is None else up_bias[experts], None if down_bias is None else down_bias[experts])
        function, is_gated = self.experts.function, self.experts.is_gated
        return expert_feed_forward(rows, up[experts], down[experts], function=function, is_gated=is_gated, biases=biases)

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


class ServedLayer(Layer):
    mixture_type = ServedMixture
    sharding: ServedSharding

    def make_mixer(self, *, index: int, fused: bool, recompute_core: bool, device: str) -> nn.Module:
        mixer = kind_of(self.config, index).mixer
        if mixer in CACHED_STATES:
            module = CACHED_STATES[mixer](self.config, self.sharding, device=device)
            module.index = index
            return module
        if mixer == "latent":
            return CachedLatent(self.config, self.sharding, index=index, device=device)
        return CachedAttention(self.config, self.sharding, index=index, device=device)


class Decoder(Transformer):
    """All layers on one rank, or sharded over tp."""

    layer_type = ServedLayer
    sharding: ServedSharding

    def __init__(self, config: TransformerConfig, sharding: ServedSharding, *, device: str) -> None:
        super().__init__(config, sharding=sharding, device=device)

    @property
    def cache(self) -> PagedCache:
        assert self.sharding.cache is not None
        return self.sharding.cache

    @torch.no_grad()
    def run(self, step: ServedStep) -> torch.Tensor:
        """Return the logits [chunks, vocabulary] of the tokens after `step.chunks`, whose keys and values are written to the cache."""
        self.sharding.begin(step)
        x = self.embed(step.tokens.unsqueeze(0))
        for index, layer in self.layers.items():
            self.beat(f"layer {index}")
            x = layer(x)
        logits = self.lm_head(self.final_norm(x[:, step.last]))
        if self.sharding.tp_group is not None:
            logits = gather_sequence(logits, 2, self.sharding.tp_group)
        return logits.squeeze(0)[:, : self.config.vocab_size]


def build_decoder(
    config: TransformerConfig,
    *,
    num_blocks: int,
    num_sequences: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    mesh: DeviceMesh | None = None,
    experts: ExpertSharding | None = None,
    fake: AbstractContextManager[object] | None = None,
) -> Decoder:
    """Return a decoder with an empty cache and the initial weights of training, without modules for multi-token prediction.

    num_sequences   capacity for recurrent states; 0: the number of blocks
    mesh            of one axis, tp; None: one rank
    experts         sharding of experts over the ranks of tp; None: every expert is sharded over tp
    fake            a fake-tensor mode: weights and cache are allocated in it, and not filled
    """
    config = replace(config, num_mtp_layers=0)
    group = mesh.get_group("tp") if mesh is not None else None
    tp = mesh.size() if mesh is not None else 1
    rank = mesh.get_local_rank() if mesh is not None else 0
    sharding = ServedSharding(tp=tp, tp_rank=rank, tp_group=group, experts=experts or ExpertSharding(etp=tp, etp_rank=rank))
    model = Decoder(config, sharding, device="meta")
    if mesh is not None:
        apply_tensor_parallel(model, mesh, sequence_parallel=False)
    sharding.is_abstract = fake is not None
    model.to(dtype)
    with fake or nullcontext():
        # torch's `to_empty` swaps the tensors, which fails for fake ones
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(local_tensor(parameter), device=device, requires_grad=False)
                module.register_parameter(name, nn.Parameter(placed_like(empty, parameter), requires_grad=False))
        model.tie_weights()
        sharding.cache = PagedCache(config, num_blocks, num_sequences=num_sequences, tp=tp, dtype=dtype, device=device)
    for name, parameter in () if fake is not None else model.named_parameters():
        fill(config, canonical_name(name), parameter, sharding)
    return model.eval()
