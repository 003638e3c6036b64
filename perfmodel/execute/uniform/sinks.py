"""Attention in which each head has a score that no key has: it takes its share of the softmax and adds nothing (gpt-oss).

One operator each way, as fused kernels have it. With the sum of exponentials of a row Z, the sink's score s and plain attention's output
o, the output is o Z / (Z + exp s); the plain kernel's backward is right of that output and of log(Z + exp s) in the place of log Z.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

aten = torch.ops.aten


def _heads_of(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Keys or values for each query head."""
    repeats = like.shape[1] // x.shape[1]
    return x.repeat_interleave(repeats, dim=1) if repeats > 1 else x


def _mask(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """Mask that is added to scores; the last query is at the last key."""
    queries, keys = q.shape[2], k.shape[2]
    query = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1)
    key = torch.arange(keys, device=q.device).unsqueeze(0)
    hidden = (key > query) | (key <= query - window) if window else key > query
    return torch.zeros(queries, keys, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


@torch.library.custom_op("perfmodel::sink_attention", mutates_args=())
def sink_attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, n, q, d], [b, g, z, d], [b, g, z, d], [n] -> [b, n, q, d], which lies as [b, q, n, d], and the logarithm of each row's sum.

    window   keys that a query sees at most; 0: all before it
    """
    mask = _mask(q, k, window)
    keys, values = _heads_of(k, q), _heads_of(v, q)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, False, attn_mask=mask)
    whole = torch.logaddexp(rest, sinks.view(1, -1, 1).to(rest.dtype))
    shrunk = out * torch.exp(rest - whole).unsqueeze(-1).to(out.dtype)
    return shrunk.transpose(1, 2).contiguous().transpose(1, 2), whole


@sink_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    b, n, s, d = q.shape
    return q.new_empty(b, s, n, d).transpose(1, 2), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("perfmodel::sink_attention_backward", mutates_args=())
def sink_attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    rest: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = _mask(q, k, window)
    heads = q, _heads_of(k, q), _heads_of(v, q)
    for_q, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, *heads, out, rest, 0.0, False, attn_mask=mask)
    for_k, for_v = (each.unflatten(1, (k.shape[1], -1)).sum(dim=2) for each in others)
    share = torch.exp(sinks.view(1, -1, 1).to(rest.dtype) - rest)
    for_sinks = -(share * (gradient.float() * out.float()).sum(dim=-1)).sum(dim=(0, 2))
    return for_q.contiguous(), for_k.contiguous(), for_v.contiguous(), for_sinks.to(sinks.dtype)


@sink_attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    rest: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(sinks)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int) -> torch.Tensor:
        out, rest = sink_attention_op(q, k, v, sinks, window)
        ctx.save_for_backward(q, k, v, sinks, out, rest)
        ctx.window = window
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return (*sink_attention_backward(gradients[0], *ctx.saved_tensors, ctx.window), None)


def _of_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same by the full square of scores, where there is no kernel that tells the sums of its rows."""
    scores = torch.matmul(q, _heads_of(k, q).transpose(2, 3)).mul(q.shape[-1] ** -0.5).add(mask)
    own = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    shares = torch.softmax(torch.cat((scores, own), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(shares.to(v.dtype), _heads_of(v, q))


def sink_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, *, window: int = 0) -> torch.Tensor:
    """[b, n, q, d], [b, g, z, d], [b, g, z, d], [n] -> [b, n, q, d]: causal, the last query at the last key."""
    if q.device.type != "cpu":
        return _of_softmax(q, k, v, sinks, _mask(q, k, window))
    return _SinkAttention.apply(q, k, v, sinks, window)  # type: ignore[no-any-return, no-untyped-call]
