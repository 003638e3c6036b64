"""Latent attention: keys and values of every head are made from one latent for each token (`workload/decoder/latent.py`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from perfmodel.execute.norm import RMSNorm
from perfmodel.execute.uniform.sharding import Sharding, rotary_angles
from perfmodel.workload.config import TransformerConfig

aten = torch.ops.aten
#: Of the norms of latents, as DeepSeek's code has it.
_EPSILON = 1e-6


@torch.library.custom_op("perfmodel::uneven_attention", mutates_args=())
def uneven_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, n, s, d], [b, n, s, d], [b, n, s, w] -> [b, n, s, w], which lies as [b, s, n, w], and the logarithm of each row's sum.

    Causal, w at most d.
    """
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), 0.0, True)
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
    for_q, for_k, for_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(*padded, rest, 0.0, True)
    return for_q, for_k, for_v[..., : v.shape[-1]].contiguous()


@uneven_attention_backward.register_fake
def _(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


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
    """Of whole sequences and all heads."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent, self.sharding, self.heads = config.latent, sharding, config.num_attention_heads
        latent, size = config.latent, config.hidden_size
        queries = self.heads * latent.score_head_dim

        def linear(columns: int, rows: int, *, bias: bool = False) -> nn.Linear:
            return nn.Linear(columns, rows, bias=bias, device=device)

        if latent.query_rank:
            self.q_a_proj = linear(size, latent.query_rank, bias=config.qkv_bias)
            self.q_a_norm = RMSNorm(latent.query_rank, eps=_EPSILON, device=device)
            self.q_b_proj = linear(latent.query_rank, queries)
        else:
            self.q_proj = linear(size, queries)
        self.kv_a_proj = linear(size, latent.key_value_rank + latent.rope_head_dim, bias=config.qkv_bias)
        self.kv_a_norm = RMSNorm(latent.key_value_rank, eps=_EPSILON, device=device)
        self.kv_b_proj = linear(latent.key_value_rank, self.heads * (latent.nope_head_dim + latent.value_head_dim))
        self.o_proj = linear(self.heads * latent.value_head_dim, size, bias=config.attention_output_bias)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, n, d]"""
        cosine, sine = rotary_angles(self.sharding, x)
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
        return self.kv_a_norm(compressed), self._rotate(turned.unsqueeze(2))

    def expand(self, compressed: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [b, s, n, qk] and values [b, s, n, v]."""
        latent = self.latent
        made = self.kv_b_proj(compressed).unflatten(-1, (-1, latent.nope_head_dim + latent.value_head_dim))
        own, value = made.split((latent.nope_head_dim, latent.value_head_dim), dim=-1)
        return torch.cat((own, shared.expand(-1, -1, own.shape[2], -1)), dim=-1), value.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]"""
        q = self.queries(x)
        k, v = self.expand(*self.compress(x))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if q.device.type == "cpu":
            context = _UnevenAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        else:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        del q, k, v
        output: torch.Tensor = self.o_proj(context.transpose(1, 2).flatten(2))
        return output
