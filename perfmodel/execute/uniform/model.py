"""The transformer that executes a plan: built from a `TransformerConfig`, as a full model or as one pipeline stage.

Weights are stored as in Hugging Face: q, k and v are separate matrices. Parameter names are global (`layers.7.attention.q_proj.weight` on
the stage that holds layer 7), so that stages, shards and the single-process reference use the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from perfmodel.execute.layers.activations import ACTIVATIONS
from perfmodel.execute.layers.attention import alibi_slopes, attention, causal_attention, unfused_attention
from perfmodel.execute.layers.dropout import dropout
from perfmodel.execute.layers.norm import NORM_EPSILON, RMS_EPSILON
from perfmodel.execute.layers.rotary import rotate
from perfmodel.execute.layers.vocabulary import token_vectors
from perfmodel.execute.local import applied_locally, local_tensor
from perfmodel.execute.uniform.collective_ops import add_loss, exchange, gather_sequence, reduce_partial, scatter_partial
from perfmodel.execute.uniform.experts import ExpertMixture, ReplicatedLinear
from perfmodel.execute.uniform.latent import LatentMixer
from perfmodel.execute.uniform.norm import RMSNorm
from perfmodel.execute.uniform.recurrent import DeltaMixer, MambaMixer
from perfmodel.execute.uniform.sharding import Sharding, rotary_angles
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import LayerSpec, layer_order

#: Weight of the mean MTP loss, added to the next-token loss: DeepSeek-V3's initial value (arXiv 2412.19437, section 4.2).
MTP_LOSS_WEIGHT = 0.3


def _norm(config: TransformerConfig, size: int, device: str) -> nn.Module:
    if config.norms.norm == "rmsnorm":
        return RMSNorm(size, eps=RMS_EPSILON, device=device)
    return nn.LayerNorm(size, eps=NORM_EPSILON, bias=config.biases.norm_bias, device=device)


def padded_vocab(config: TransformerConfig, ways: int) -> int:
    """Return the rows of the embedding, padded to a multiple of `ways` tensor-parallel ranks."""
    return math.ceil(config.vocab_size / ways) * ways


def window_of(config: TransformerConfig, index: int) -> int:
    """Return the number of keys that a query of layer `index` sees; 0: all earlier keys."""
    every = config.attention.full_attention_every
    return 0 if every and (index + 1) % every == 0 else config.attention.sliding_window


def has_rotary(config: TransformerConfig, index: int) -> bool:
    """Return whether layer `index` applies rotary embedding to queries and keys."""
    every = config.positions.no_rotary_every
    return config.positions.position == "rotary" and not (every and (index + 1) % every == 0)


class CoreAttention(nn.Module):
    """Scores, softmax and context of the local heads; queries may be a later chunk of the keys' sequence."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, fused: bool, window: int) -> None:
        super().__init__()
        self.config, self.sharding, self.fused, self.window = config, sharding, fused, window

    def slopes(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return the ALiBi slopes of the local heads, whose number is that of q [b, q, n, d]."""
        if self.config.positions.position != "alibi":
            return None
        first = self.sharding.head_rank * q.shape[2]
        return alibi_slopes(self.config.num_attention_heads)[first : first + q.shape[2]].to(q)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [b, s_q, n, d], [b, s_k, g, d], [b, s_k, g, d] and sinks [n] -> [b, s_q, n * d]."""
        if self.sharding.cp > 1 and not self.sharding.exchanges_heads:
            # Contiguous chunks: this rank's queries end with its chunk, so later keys are sliced off.
            last = (self.sharding.cp_rank + 1) * q.shape[1]
            k, v = k[:, :last], v[:, :last]
        slopes = self.slopes(q)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if sinks is None and not self.fused:
            context = unfused_attention(q, k, v, window=self.window, slopes=slopes, probability=self.sharding.dropout)
        elif sinks is None and self.sharding.is_abstract:
            context = attention(q, k, v, is_causal=True)
        else:
            context = causal_attention(q, k, v, window=self.window, slopes=slopes, sinks=sinks)
        return context.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(
        self, config: TransformerConfig, sharding: Sharding, *, index: int, fused: bool, recompute_core: bool, device: str
    ) -> None:
        super().__init__()
        self.config, self.sharding, self.recompute_core = config, sharding, recompute_core
        size, depth = config.hidden_size, config.head_dim
        query, key = config.num_attention_heads * depth, config.num_key_value_heads * depth
        self.q_proj = nn.Linear(size, query, bias=config.biases.qkv_bias, device=device)
        self.k_proj = nn.Linear(size, key, bias=config.biases.qkv_bias, device=device)
        self.v_proj = nn.Linear(size, key, bias=config.biases.qkv_bias, device=device)
        if config.attention.attention_gate:
            self.q_gate_proj = nn.Linear(size, query, bias=config.biases.qkv_bias, device=device)
        self.o_proj = nn.Linear(query, size, bias=config.biases.attention_output_bias, device=device)
        self.is_rotary = has_rotary(config, index)
        if config.norms.qk_norm:
            over_all = config.norms.qk_norm_scope == "all"
            self.q_norm = _norm(config, query if over_all else depth, device)
            self.k_norm = _norm(config, key if over_all else depth, device)
        if config.attention.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_attention_heads, device=device))
        self.core = CoreAttention(config, sharding, fused=fused, window=window_of(config, index))

    def local_sinks(self) -> tuple[torch.Tensor, ...]:
        """Return the sinks of this rank's heads; () for a model without sinks."""
        return (local_tensor(self.sinks),) if self.config.attention.attention_sinks else ()

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute [b, s, h] -> queries, keys and values of the local heads, [b, s, n or g, d]."""
        depth = self.config.head_dim
        q, k, v = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        over_all = self.config.norms.qk_norm_scope == "all"
        if self.config.norms.qk_norm and over_all:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (tensor.unflatten(-1, (-1, depth)) for tensor in (q, k, v))
        if self.config.norms.qk_norm and not over_all:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.is_rotary:
            angles = rotary_angles(self.sharding, q, depth)
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q, k, v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        group, exchanges = self.sharding.cp_group, self.sharding.exchanges_heads
        if group is not None and exchanges:
            q, k, v = (exchange(tensor, split=2, join=1, group=group) for tensor in (q, k, v))
        elif group is not None:
            k, v = gather_sequence(k, 1, group), gather_sequence(v, 1, group)
        if self.recompute_core:
            context = checkpoint(self.core, q, k, v, *self.local_sinks(), use_reentrant=False, preserve_rng_state=False)
        else:
            context = self.core(q, k, v, *self.local_sinks())
        del q, k, v  # free gathered keys and values right after their last reader
        if group is not None and exchanges:
            context = exchange(context, split=1, join=2, group=group)
        return self.finish(context, x)

    def finish(self, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, n * d] -> [b, s, h], with the output gate of the layer's input where there is one."""
        if self.config.attention.attention_gate:
            context = context * torch.sigmoid(self.q_gate_proj(x))
        output: torch.Tensor = self.o_proj(context)
        return output


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig, *, inner: int, gated: bool, bias: bool, device: str) -> None:
        super().__init__()
        size = config.hidden_size
        self.activation = ACTIVATIONS[config.mlp.activation]
        if gated:
            self.gate_proj = nn.Linear(size, inner, bias=bias, device=device)
        self.up_proj = nn.Linear(size, inner, bias=bias, device=device)
        self.down_proj = nn.Linear(inner, size, bias=bias, device=device)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.gate_proj(x)) * self.up_proj(x) if self.gated else self.activation(self.up_proj(x))
        output: torch.Tensor = self.down_proj(inner)
        return output


def kind_of(config: TransformerConfig, index: int) -> LayerSpec:
    """Return the kind of layer `index`."""
    kinds = {kind.name: kind for kind in config.layer_kinds}
    return kinds[layer_order(config.layer_kinds)[index]]


class Branches(nn.Module):
    """Attention and MLP in parallel: their outputs are added before the reduction over tp."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, for_attention: torch.Tensor, for_mlp: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(for_attention) + self.mlp(for_mlp)
        return output


class SharedInputBranches(Branches):
    """Branches with one shared norm, whose output is redistributed once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x)


#: Modules of mixers other than attention.
MIXERS: dict[str, Callable[..., nn.Module]] = {"latent": LatentMixer, "mamba": MambaMixer, "delta": DeltaMixer}


class Layer(nn.Module):
    """One transformer block, sequential or parallel, with the norms of its configuration."""

    mixture_type: type[ExpertMixture] = ExpertMixture

    def __init__(
        self, config: TransformerConfig, sharding: Sharding, *, index: int, fused: bool, recompute_core: bool, device: str
    ) -> None:
        super().__init__()
        self.config, self.sharding = config, sharding
        kind = kind_of(config, index)
        self.has_mixer, self.has_feed_forward = kind.mixer != "none", kind.feed_forward != "none"
        if self.has_mixer:
            mixer = self.make_mixer(index=index, fused=fused, recompute_core=recompute_core, device=device)
            if config.norms.pre_norm:
                self.attention_norm = _norm(config, config.hidden_size, device)
        if self.has_feed_forward:
            mlp = self.make_feed_forward(index=index, device=device)
        if config.parallel_block:
            self.branches = SharedInputBranches(mixer, mlp) if config.norms.shared_norm else Branches(mixer, mlp)
            if not config.norms.shared_norm:
                self.mlp_norm = _norm(config, config.hidden_size, device)
            return
        if self.has_mixer:
            self.attention = mixer
        if self.has_feed_forward:
            self.mlp = mlp
            if config.norms.pre_norm:
                self.mlp_norm = _norm(config, config.hidden_size, device)
        if config.norms.sandwich_norm:
            for branch, is_there in (("attention", self.has_mixer), ("mlp", self.has_feed_forward)):
                if is_there:
                    self.add_module(f"{branch}_post_norm", _norm(config, config.hidden_size, device))

    @property
    def mixer(self) -> nn.Module | None:
        """The mixer; None for a layer without one."""
        return self.attention if self.has_mixer else None

    @property
    def feed_forward(self) -> nn.Module | None:
        return self.mlp if self.has_feed_forward else None

    def make_mixer(self, *, index: int, fused: bool, recompute_core: bool, device: str) -> nn.Module:
        mixer = kind_of(self.config, index).mixer
        if mixer != "attention":
            return MIXERS[mixer](self.config, self.sharding, device=device)
        return Attention(self.config, self.sharding, index=index, fused=fused, recompute_core=recompute_core, device=device)

    def make_feed_forward(self, *, index: int, device: str) -> FeedForward | ExpertMixture:
        config, experts = self.config, self.config.parts.experts
        if kind_of(config, index).feed_forward == "dense":
            return FeedForward(
                config, inner=config.intermediate_size, gated=config.mlp.gated_mlp, bias=config.biases.mlp_bias, device=device
            )
        assert experts is not None
        shared = None
        if experts.shared_width:
            shared = FeedForward(config, inner=experts.shared_width, gated=experts.gated, bias=experts.bias, device=device)
        return self.mixture_type(config, self.sharding, shared=shared, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.parallel_block:
            normed = self.attention_norm(x)
            branches = self.branches(normed) if self.config.norms.shared_norm else self.branches(normed, self.mlp_norm(x))
            return x + dropout(local_tensor(branches), self.sharding.dropout)
        if self.has_mixer:
            attended = self.attention(self.attention_norm(x) if self.config.norms.pre_norm else x)
            if self.config.norms.sandwich_norm:
                attended = self.attention_post_norm(attended)
            x = x + dropout(local_tensor(attended), self.sharding.dropout)
            del attended
        if self.has_feed_forward:
            transformed = self.mlp(self.mlp_norm(x) if self.config.norms.pre_norm else x)
            if self.config.norms.sandwich_norm:
                transformed = self.mlp_post_norm(transformed)
            x = x + dropout(local_tensor(transformed), self.sharding.dropout)
        return x


class MTPModule(Layer):
    """Multi-token-prediction module: a layer like the last one, on the hidden state and the embedding of the next token."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, fused: bool, device: str) -> None:
        last = config.num_hidden_layers - 1
        super().__init__(config, sharding, index=last, fused=fused, recompute_core=False, device=device)
        size = config.hidden_size
        self.hidden_norm, self.embedding_norm = _norm(config, size, device), _norm(config, size, device)
        self.joint_proj = ReplicatedLinear(2 * size, size, bias=False, device=device)
        self.final_norm = _norm(config, size, device)

    def forward(self, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        joint = torch.cat((local_tensor(self.hidden_norm(x)), local_tensor(self.embedding_norm(token))), dim=-1)
        del x, token
        return super().forward(self.joint_proj(joint))


class TokenEmbedding(nn.Module):
    """Embedding table whose rows may be sharded over tp: each rank looks up its own rows, and the results are summed.

    (torch's row-wise DTensor embedding leaves the table's gradient partial over tp and unsharded on each rank.)
    """

    def __init__(self, rows: int, size: int, sharding: Sharding, *, device: str) -> None:
        super().__init__()
        self.sharding = sharding
        self.weight = nn.Parameter(torch.empty(rows, size, device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            return token_vectors(self.weight, tokens)
        weight, group = self.weight.to_local(), self.weight.device_mesh.get_group("tp")
        vectors = token_vectors(weight, tokens, first=self.sharding.tp_rank * weight.shape[0])
        return scatter_partial(vectors, 1, group) if self.sharding.sequence_parallel else reduce_partial(vectors, group)


class PositionEmbedding(nn.Module):
    """Learned positions of this rank's part of the sequence."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__()
        self.sharding = sharding
        self.offset = config.positions.position_offset
        self.weight = nn.Parameter(torch.empty(config.num_position_rows, config.hidden_size, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, ways, index = applied_locally(self.weight), self.sharding.cp, self.sharding.cp_rank
        if self.sharding.sequence_parallel:
            ways, index = ways * self.sharding.tp, index * self.sharding.tp + self.sharding.tp_rank
        if self.sharding.positions is not None:
            return x + weight[self.offset + self.sharding.positions]
        length = x.shape[1]
        first = self.offset + index * length
        return x + weight[first : first + length]


class Transformer(nn.Module):
    """Layers `first_layer` to `first_layer + num_layers`, with the embedding and the head if this stage has them."""

    layer_type: type[Layer] = Layer

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sharding: Sharding | None = None,
        first_layer: int = 0,
        num_layers: int | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        fused_attention: bool = True,
        recompute_core: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        sharding = sharding or Sharding()
        self.config, self.sharding = config, sharding
        vocab = padded_vocab(config, sharding.tp)
        count = config.num_hidden_layers if num_layers is None else num_layers
        if has_embedding or (has_head and config.num_mtp_layers):
            self.embedding = TokenEmbedding(vocab, config.hidden_size, sharding, device=device)
        if has_embedding:
            if config.positions.position == "learned":
                self.position_embedding = PositionEmbedding(config, sharding, device=device)
            if config.norms.embedding_layernorm:
                self.embedding_norm = _norm(config, config.hidden_size, device)
        self.layers = nn.ModuleDict(
            {
                str(index): self.layer_type(
                    config, sharding, index=index, fused=fused_attention, recompute_core=recompute_core, device=device
                )
                for index in range(first_layer, first_layer + count)
            }
        )
        if has_head:
            self.final_norm = _norm(config, config.hidden_size, device)
            self.lm_head = nn.Linear(config.hidden_size, vocab, bias=config.biases.lm_head_bias, device=device)
            for depth in range(config.num_mtp_layers):
                self.add_module(f"mtp{depth}", MTPModule(config, sharding, fused=fused_attention, device=device))
        self.has_embedding, self.has_head = has_embedding, has_head
        self.tie_weights()
        self.beat: Callable[[str], None] = lambda what: None
        #: Loss of logits and targets; used here for the MTP loss.
        self.loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @property
    def shares_table(self) -> bool:
        """Whether the head reads the embedding table too."""
        return self.config.tie_word_embeddings or self.config.num_mtp_layers > 0

    @property
    def mtp_modules(self) -> list[MTPModule]:
        """Multi-token-prediction modules in order."""
        return [module for module in self.children() if isinstance(module, MTPModule)]

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings and hasattr(self, "embedding") and self.has_head:
            self.lm_head.weight = self.embedding.weight

    def _mtp_loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the weighted MTP loss; tokens [b, depths + 1, s]: row d is shifted by d + 1 positions."""
        assert self.loss is not None
        losses = []
        for depth, module in enumerate(self.mtp_modules):
            self.beat(f"further token {depth}")
            x = module(x, self.embedding(tokens[:, depth]))
            losses.append(self.loss(self.lm_head(module.final_norm(x)), tokens[:, depth + 1]))
        return torch.stack(losses).sum() * (MTP_LOSS_WEIGHT / len(losses))

    def _beat_backward(self, index: str, gradient: torch.Tensor) -> None:
        self.beat(f"backward of layer {index}")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute [b, s] -> [b, s, h]."""
        x: torch.Tensor = self.embedding(tokens)
        if hasattr(self, "position_embedding"):
            x = self.position_embedding(x)
        if hasattr(self, "embedding_norm"):
            x = local_tensor(self.embedding_norm(x))
        return dropout(x, self.sharding.dropout)

    def forward(self, x: torch.Tensor, mtp_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Compute token ids [b, s] or activations [b, s, h] -> activations, or this rank's columns of the logits.

        mtp_tokens   tokens for MTP modules [b, depths + 1, s], shifted by one position, two, ...
        """
        if self.has_embedding:
            x = self.embed(x)
        for index, layer in self.layers.items():
            self.beat(f"layer {index}")
            x = layer(x)
            if x.requires_grad:
                x.register_hook(partial(self._beat_backward, index))
        if self.has_head:
            if self.config.num_mtp_layers:
                assert mtp_tokens is not None
                x = add_loss(x, self._mtp_loss(x, mtp_tokens))
            x = self.lm_head(self.final_norm(x))
        return x
