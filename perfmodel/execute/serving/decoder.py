"""Decoder for serving: the modules and weights of the training model, with a KV cache in its attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from perfmodel.execute.local import local_tensor
from perfmodel.execute.serving.attention import CachedAttention, CachedLatent
from perfmodel.execute.serving.cache import PagedCache
from perfmodel.execute.serving.experts import ServedMixture
from perfmodel.execute.serving.states import CACHED_STATES
from perfmodel.execute.serving.step import ServedSharding, ServedStep
from perfmodel.execute.uniform.collective_ops import gather_sequence
from perfmodel.execute.uniform.data_parallel import canonical_name
from perfmodel.execute.uniform.experts import ExpertMixture
from perfmodel.execute.uniform.model import FeedForward, Layer, Transformer, kind_of
from perfmodel.execute.uniform.sharding import ExpertSharding
from perfmodel.execute.uniform.tensor_parallel import apply_tensor_parallel
from perfmodel.execute.uniform.weights import fill
from perfmodel.workload.config import TransformerConfig


class ServedLayer(Layer):
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

    def make_feed_forward(self, *, index: int, device: str) -> FeedForward | ExpertMixture:
        feed_forward = super().make_feed_forward(index=index, device=device)
        if isinstance(feed_forward, ExpertMixture):
            return ServedMixture(self.config, self.sharding, shared=getattr(feed_forward, "shared", None), device=device)
        return feed_forward


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
        _materialise(model, device)
        sharding.cache = PagedCache(config, num_blocks, num_sequences=num_sequences, tp=tp, dtype=dtype, device=device)
    for name, parameter in () if fake is not None else model.named_parameters():
        fill(config, canonical_name(name), parameter, sharding)
    return model.eval()


def _materialise(model: Decoder, device: str) -> None:
    """Allocate the parameters in place of those on the meta device. (torch's `to_empty` swaps tensors, which fails for fake ones.)"""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            local = local_tensor(parameter)
            empty = torch.empty_like(local, device=device, requires_grad=False)
            if isinstance(parameter, DTensor):
                empty = DTensor.from_local(
                    empty, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    model.tie_weights()
