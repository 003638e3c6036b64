"""Latent attention: keys and values of every head are made from one latent for each token (`workload/decoder/latent.py`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right

from perfmodel.execute.norm import RMSNorm
from perfmodel.execute.uniform.collective_ops import add_gradients, exchange, gather_sequence
from perfmodel.execute.uniform.experts import ReplicatedLinear
from perfmodel.execute.uniform.sharding import Sharding, rotary_angles
from perfmodel.workload.config import TransformerConfig

aten = torch.ops.aten
#: Of the norms of latents, as DeepSeek's code has it.
_EPSILON = 1e-6


@torch.library.custom_op("perfmodel::uneven_attention", mutates_args=())
def uneven_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, n, s, d], [b, n, s, d], [b, n, s, w] -> [b, n, s, w], which lies as [b, s, n, w], and the logarithm of each row's sum.

    Causal, w at most d; the last query is at the last key.
    """
    is_plain, mask = _causal(q, k)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), 0.0, is_plain, attn_mask=mask)
    return out[..., : v.shape[-1]].transpose(1, 2).contiguous().transpose(1, 2), rest


@uneven_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b, n, s, _ = q.shape
    return q.new_empty(b, s, n, v.shape[-1]).transpose(1, 2), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("perfmodel::uneven_attention_backward", mutates_args=())
def uneven_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    padded = (_padded(each, q) for each in (gradient, q, k, v, out))
    is_plain, mask = _causal(q, k)
    for_q, for_k, for_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(*padded, rest, 0.0, is_plain, attn_mask=mask)
    return for_q, for_k, for_v[..., : v.shape[-1]].contiguous()


@uneven_attention_backward.register_fake
def _(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _causal(q: torch.Tensor, k: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """What tells the kernel that no query sees a later key: that it is so, or where queries are a later chunk, what is added to scores."""
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys:
        return True, None
    later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(keys - queries + 1)
    return False, torch.zeros(queries, keys, dtype=q.dtype, device=q.device).masked_fill_(later, -torch.inf)


def _padded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))


class _UnevenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, rest = uneven_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, rest)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return uneven_attention_backward(gradients[0], *ctx.saved_tensors)


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
        self.o_proj = linear(self.heads * latent.value_head_dim, size, bias=config.attention_output_bias)

    def _rotate(self, x: torch.Tensor, *, of_residual: bool = False) -> torch.Tensor:
        """[b, s, n, d]"""
        cosine, sine = rotary_angles(self.sharding, x, of_residual=of_residual)
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, n, qk]"""
        latent = self.latent
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))) if latent.query_rank else self.q_proj(x)
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
        q = self.queries(x)
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
        context = self._attend(q, k, v)
        del q, k, v
        if group is not None and exchanges:
            context = exchange(context, split=1, join=2, group=group)
        output: torch.Tensor = self.o_proj(context)
        return output

    def _for_heads(self, shared: torch.Tensor) -> torch.Tensor:
        """Of all tokens what a rank's heads read; what each rank's heads make of its gradient is added up."""
        group = self.sharding.tp_group
        if group is None:
            return shared
        return gather_sequence(shared, 1, group) if self.sharding.sequence_parallel else add_gradients(shared, group)

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[b, q, n, qk], [b, z, n, qk], [b, z, n, v] -> [b, q, n * v]"""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if q.device.type == "cpu":
            context = _UnevenAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        else:
            queries, keys = q.shape[2], k.shape[2]
            mask = None if queries == keys else causal_lower_right(queries, keys)
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return context.transpose(1, 2).flatten(2)
