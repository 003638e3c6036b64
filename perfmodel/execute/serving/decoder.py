"""The decoder that serves: the training model's modules and weights, with a cache where training attends to whole sequences."""

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
from perfmodel.execute.uniform.data_parallel import clean_name
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
            made = CACHED_STATES[mixer](self.config, self.sharding, device=device)
            made.index = index
            return made
        if mixer == "latent":
            return CachedLatent(self.config, self.sharding, index=index, device=device)
        return CachedAttention(self.config, self.sharding, index=index, device=device)

    def make_feed_forward(self, *, index: int, device: str) -> FeedForward | ExpertMixture:
        made = super().make_feed_forward(index=index, device=device)
        if isinstance(made, ExpertMixture):
            return ServedMixture(self.config, self.sharding, shared=getattr(made, "shared", None), device=device)
        return made


class Decoder(Transformer):
    """All layers on one rank, or cut over tp."""

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
        """Logits [chunks, vocabulary] of the tokens that follow `step.chunks`; what layers keep of these is in the cache then."""
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
    """A decoder with an empty cache and the weights with which training begins; modules that predict further tokens are left out.

    num_sequences   that have room for their states; 0: as many as there are blocks
    mesh      of one axis, tp; None: one rank
    experts   how experts are cut over the ranks of tp; None: each is cut
    fake      a mode in which tensors have no values: weights and cache are made in it, and not filled
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
        fill(config, clean_name(name), parameter, sharding)
    return model.eval()


def _materialise(model: Decoder, device: str) -> None:
    """Parameters in memory in the place of those on the meta device. (torch's `to_empty` swaps tensors, which fake ones do not bear.)"""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            local = local_tensor(parameter)
            made = torch.empty_like(local, device=device, requires_grad=False)
            if isinstance(parameter, DTensor):
                made = DTensor.from_local(
                    made, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
            module.register_parameter(name, nn.Parameter(made, requires_grad=False))
    model.tie_weights()
