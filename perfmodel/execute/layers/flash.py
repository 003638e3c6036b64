"""Causal attention by the flash kernel of a CPU, which torch's own function reaches for operands of one width without sinks alone.

One operator each way, as a GPU's kernels are; the last query is at the last key. A head's sink is a score that no key has, which takes its
share of the softmax and adds nothing (gpt-oss): with the sum of exponentials of a row Z, the sink's score s and plain attention's output o,
the output is o Z / (Z + exp s); the plain kernel's backward is right of that output and of log(Z + exp s) in the place of log Z.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.kernel import differentiable, like
from perfmodel.execute.layers.masks import additive, causal, heads_of, marked

aten = torch.ops.aten
Tensor: TypeAlias = torch.Tensor


def _as_queries(tensor: Tensor) -> Tensor:
    """The same [b, n, q, w], which lies as [b, q, n, w]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logarithms of the rows' sums, without values."""
    b, n, s, _ = q.shape
    rest = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(b, s, n, v.shape[-1]).transpose(1, 2), rest


@torch.library.custom_op("perfmodel::sink_attention", mutates_args=())
def _sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, chunked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each row's sum."""
    mask = additive(causal(q.shape[2], k.shape[2], window, chunked=chunked, device=q.device), q.dtype)
    keys, values = heads_of(k, q), heads_of(v, q)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    whole = torch.logaddexp(rest, sinks.view(1, -1, 1).to(rest.dtype))
    return _as_queries(out * torch.exp(rest - whole).unsqueeze(-1).to(out.dtype)), whole


_sinks.register_fake(lambda q, k, v, *_: _empty(q, v))


@torch.library.custom_op("perfmodel::sink_attention_backward", mutates_args=())
def _sinks_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, chunked: bool, scale: float, out: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = additive(causal(q.shape[2], k.shape[2], window, chunked=chunked, device=q.device), q.dtype)
    given = gradient, q, heads_of(k, q), heads_of(v, q), out, rest
    for_q, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, False, attn_mask=mask, scale=scale)
    for_k, for_v = (each.unflatten(1, (k.shape[1], -1)).sum(dim=2) for each in others)
    share = torch.exp(sinks.view(1, -1, 1).to(rest.dtype) - rest)
    for_sinks = -(share * (gradient.to(rest.dtype) * out.to(rest.dtype)).sum(dim=-1)).sum(dim=(0, 2))
    return for_q.contiguous(), for_k.contiguous(), for_v.contiguous(), for_sinks.to(sinks.dtype)


_sinks_backward.register_fake(lambda gradient, q, k, v, sinks, *_: like(q, k, v, sinks))

#: ([b, n, q, d], [b, g, z, d], [b, g, z, d], sinks [n], window, chunked, scale) -> [b, n, q, d].
sink_attention = differentiable(_sinks, _sinks_backward, keeps_output=True, is_contiguous=False)


@torch.library.custom_op("perfmodel::uneven_attention", mutates_args=())
def _uneven(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each row's sum."""
    is_plain, mask = _causal(q, k, chosen)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), 0.0, is_plain, attn_mask=mask, scale=scale)
    return _as_queries(out[..., : v.shape[-1]]), rest


_uneven.register_fake(lambda q, k, v, *_: _empty(q, v))


@torch.library.custom_op("perfmodel::uneven_attention_backward", mutates_args=())
def _uneven_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, scale: float, out: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    padded = (_padded(each, q) for each in (gradient, q, k, v, out))
    is_plain, mask = _causal(q, k, chosen)
    for_q, for_k, for_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *padded, rest, 0.0, is_plain, attn_mask=mask, scale=scale
    )
    return for_q, for_k, for_v[..., : v.shape[-1]].contiguous()


_uneven_backward.register_fake(lambda gradient, q, k, v, *_: like(q, k, v))


def _causal(q: Tensor, k: Tensor, chosen: Tensor | None) -> tuple[bool, Tensor | None]:
    """Causality of attention: a flag, or a mask to add to the scores if queries are a later chunk or choose their keys."""
    queries, keys = q.shape[2], k.shape[2]
    if chosen is None and queries == keys:
        return True, None
    seen = causal(queries, keys, device=q.device)
    return False, additive(seen if chosen is None else (seen & marked(chosen, keys)).unsqueeze(1), q.dtype)


def _padded(x: Tensor, like: Tensor) -> Tensor:
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))


#: ([b, n, q, d], [b, n, z, d], [b, n, z, w], chosen [b, q, top] or None, scale) -> [b, n, q, w]; w at most d.
uneven_attention = differentiable(_uneven, _uneven_backward, keeps_output=True, is_contiguous=False)
