"""Latent attention: keys and values of every head are made from one latent for each token (`workload/decoder/latent.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right

from perfmodel.execute.local import local_tensor
from perfmodel.execute.norm import RMSNorm
from perfmodel.execute.uniform.collective_ops import add_gradients, add_loss, exchange, gather_copies, gather_sequence, share_gradient
from perfmodel.execute.uniform.experts import ReplicatedLinear
from perfmodel.execute.uniform.indexer import allowed, choose_keys
from perfmodel.execute.uniform.sharding import Sharding, rotary_angles
from perfmodel.workload.config import TransformerConfig

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

aten = torch.ops.aten
#: Of the norms of latents, as DeepSeek's code has it.
_EPSILON = 1e-6
#: Of the indexer's norm of keys: torch's own, as the graph's LayerNorm has it.
_INDEX_EPSILON = 1e-5


@torch.library.custom_op("perfmodel::uneven_attention", mutates_args=())
def uneven_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, n, s, d], [b, n, s, d], [b, n, s, w] -> [b, n, s, w], which lies as [b, s, n, w], and the logarithm of each row's sum.

    Causal, w at most d; the last query is at the last key. With `chosen` [b, s, top] a query attends to these keys alone.
    """
    is_plain, mask = _causal(q, k, chosen)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), 0.0, is_plain, attn_mask=mask)
    return out[..., : v.shape[-1]].transpose(1, 2).contiguous().transpose(1, 2), rest


@uneven_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    b, n, s, _ = q.shape
    return q.new_empty(b, s, n, v.shape[-1]).transpose(1, 2), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("perfmodel::uneven_attention_backward", mutates_args=())
def uneven_attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rest: torch.Tensor,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    padded = (_padded(each, q) for each in (gradient, q, k, v, out))
    is_plain, mask = _causal(q, k, chosen)
    for_q, for_k, for_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(*padded, rest, 0.0, is_plain, attn_mask=mask)
    return for_q, for_k, for_v[..., : v.shape[-1]].contiguous()


@uneven_attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rest: torch.Tensor,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _causal(q: torch.Tensor, k: torch.Tensor, chosen: torch.Tensor | None) -> tuple[bool, torch.Tensor | None]:
    """Causality of attention: a flag, or a mask to add to the scores if queries are a later chunk or choose their keys."""
    queries, keys = q.shape[2], k.shape[2]
    if chosen is not None:
        seen = allowed(chosen, keys).unsqueeze(1)
        return False, torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
    if queries == keys:
        return True, None
    later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(keys - queries + 1)
    return False, torch.zeros(queries, keys, dtype=q.dtype, device=q.device).masked_fill_(later, -torch.inf)


def _padded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))


class _UnevenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        out, rest = uneven_attention(q, k, v, chosen)
        ctx.save_for_backward(q, k, v, out, rest, chosen)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return (*uneven_attention_backward(gradients[0], *ctx.saved_tensors), None)


class LatentMixer(nn.Module):
    """Latents are made of each rank's own tokens by whole weights, and gathered over tp; heads of them are cut."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent, self.sharding, self.heads = config.latent, sharding, config.num_attention_heads
        latent, size = config.latent, config.hidden_size
        queries = self.heads * latent.score_head_dim

        def linear(columns: int, rows: int, *, bias: bool = False) -> nn.Linear:
            return nn.Linear(columns, rows, bias=bias, device=device)

        if latent.query_rank:
            self.q_a_proj = ReplicatedLinear(size, latent.query_rank, bias=config.qkv_bias, device=device)
            self.q_a_norm = RMSNorm(latent.query_rank, eps=_EPSILON, device=device)
            self.q_b_proj = linear(latent.query_rank, queries)
        else:
            self.q_proj = linear(size, queries)
        self.kv_a_proj = ReplicatedLinear(size, latent.key_value_rank + latent.rope_head_dim, bias=config.qkv_bias, device=device)
        self.kv_a_norm = RMSNorm(latent.key_value_rank, eps=_EPSILON, device=device)
        self.kv_b_proj = linear(latent.key_value_rank, self.heads * (latent.nope_head_dim + latent.value_head_dim))
        if latent.index_heads:
            self.index_q_proj = linear(latent.query_rank or size, latent.index_heads * latent.index_head_dim)
            self.index_k_proj = ReplicatedLinear(size, latent.index_head_dim, bias=False, device=device)
            self.index_k_norm = nn.LayerNorm(latent.index_head_dim, eps=_INDEX_EPSILON, device=device)
            self.index_weights_proj = ReplicatedLinear(size, latent.index_heads, bias=False, device=device)
        self.o_proj = linear(self.heads * latent.value_head_dim, size, bias=config.attention_output_bias)

    def _rotate(self, x: torch.Tensor, *, of_residual: bool = False) -> torch.Tensor:
        """[b, s, n, d]"""
        cosine, sine = rotary_angles(self.sharding, x, of_residual=of_residual)
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, n, qk]"""
        return self._of_heads(self._query_latent(x))

    def _query_latent(self, x: torch.Tensor) -> torch.Tensor:
        """Latent of the queries; may be a DTensor."""
        return self.q_a_norm(self.q_a_proj(x)) if self.latent.query_rank else x  # type: ignore[no-any-return]

    def _of_heads(self, compressed: torch.Tensor) -> torch.Tensor:
        latent = self.latent
        q = (self.q_b_proj if latent.query_rank else self.q_proj)(compressed)
        plain, turned = q.unflatten(-1, (-1, latent.score_head_dim)).split((latent.nope_head_dim, latent.rope_head_dim), dim=-1)
        return torch.cat((plain, self._rotate(turned)), dim=-1)

    def compress(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, s, h] -> what keys and values are made of: the latent [b, s, c], and the part of a key that all heads share [b, s, 1, r]"""
        latent = self.latent
        compressed, turned = self.kv_a_proj(x).split((latent.key_value_rank, latent.rope_head_dim), dim=-1)
        return self.kv_a_norm(compressed), self._rotate(turned.unsqueeze(2), of_residual=True)

    def expand(self, compressed: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [b, s, n, qk] and values [b, s, n, v]."""
        latent = self.latent
        made = self.kv_b_proj(compressed).unflatten(-1, (-1, latent.nope_head_dim + latent.value_head_dim))
        own, value = made.split((latent.nope_head_dim, latent.value_head_dim), dim=-1)
        return torch.cat((own, shared.expand(-1, -1, own.shape[2], -1)), dim=-1), value.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] of this rank's residual stream -> the same"""
        if isinstance(x, DTensor):
            x = x.to_local()
        compressed, chosen = self._query_latent(x), None
        if self.latent.index_heads:
            compressed, read = self._for_indexer(compressed)
            chosen, loss = self._choose(x, read)
            q = add_loss(self._of_heads(compressed), loss)
            del read, loss
        else:
            q = self._of_heads(compressed)
        compressed, shared = self.compress(x)
        k, v = self.expand(compressed, self._for_heads(shared))
        del compressed, shared
        group, exchanges = self.sharding.cp_group, self.sharding.exchanges_heads
        if group is not None and exchanges:
            q, k, v = (exchange(each, split=2, join=1, group=group) for each in (q, k, v))
        elif group is not None:
            # contiguous chunks: later keys are never looked at
            seen = (self.sharding.cp_rank + 1) * q.shape[1]
            k, v = gather_sequence(k, 1, group)[:, :seen], gather_sequence(v, 1, group)[:, :seen]
        context = self._attend(q, k, v, chosen)
        del q, k, v, chosen
        if group is not None and exchanges:
            context = exchange(context, split=1, join=2, group=group)
        output: torch.Tensor = self.o_proj(context)
        return output

    def _for_indexer(self, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query latents of all tokens: for heads, of which each rank has some, and for the indexer, which each rank has whole.

        Gathered once; what ranks hand back is added up, of what is the same on all ranks each its share.
        """
        ways = self.sharding.tp
        if ways == 1:
            return compressed, compressed
        if not isinstance(compressed, DTensor):
            weight = (self.q_b_proj if self.latent.query_rank else self.q_proj).weight
            assert isinstance(weight, DTensor)
            residual = Shard(1) if self.sharding.sequence_parallel else Replicate()
            compressed = DTensor.from_local(compressed, weight.device_mesh, [residual], run_check=False)
        compressed = compressed.redistribute(placements=[Replicate()])
        return compressed, share_gradient(compressed.to_local(grad_placements=[Partial()]), ways)

    def _choose(self, x: torch.Tensor, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys that each query attends to, by small heads of all tokens: (which [b, s, top], what to add to the loss)."""
        group = self.sharding.tp_group if self.sharding.sequence_parallel else None
        q, k, weights = self.indexed(x, compressed)
        if group is not None:
            k, weights = gather_copies(k, 1, group), gather_copies(weights, 1, group)
        return choose_keys(q, k, weights, top=min(self.latent.index_top, q.shape[1]), scale=self.sharding.loss_scale)

    def indexed(self, x: torch.Tensor, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The indexer's queries [b, s, n, d] of all tokens, and of those of the residual stream keys [b, s, d] and weights [b, s, n]."""
        latent = self.latent
        q = self._turn_first(self.index_q_proj(compressed).unflatten(-1, (-1, latent.index_head_dim)))
        k = local_tensor(self.index_k_norm(self.index_k_proj(x))).unsqueeze(2)
        k = self._turn_first(k, of_residual=True).squeeze(2)
        return q, k, self.index_weights_proj(x)

    def _turn_first(self, x: torch.Tensor, *, of_residual: bool = False) -> torch.Tensor:
        """The first entries of [b, s, n, d] by their positions."""
        turned, plain = x.split((self.latent.rope_head_dim, x.shape[-1] - self.latent.rope_head_dim), dim=-1)
        return torch.cat((self._rotate(turned, of_residual=of_residual), plain), dim=-1)

    def _for_heads(self, shared: torch.Tensor) -> torch.Tensor:
        """Input of a rank's heads for all tokens; its gradient is summed over the ranks' heads."""
        group = self.sharding.tp_group
        if group is None:
            return shared
        return gather_sequence(shared, 1, group) if self.sharding.sequence_parallel else add_gradients(shared, group)

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """[b, q, n, qk], [b, z, n, qk], [b, z, n, v] -> [b, q, n * v]; chosen [b, q, top]: the keys that each query attends to"""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if q.device.type == "cpu":
            context = _UnevenAttention.apply(q, k, v, chosen)  # type: ignore[no-untyped-call]
        elif chosen is not None:
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed(chosen, k.shape[2]).unsqueeze(1))
        else:
            queries, keys = q.shape[2], k.shape[2]
            mask = None if queries == keys else causal_lower_right(queries, keys)
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return context.transpose(1, 2).flatten(2)
