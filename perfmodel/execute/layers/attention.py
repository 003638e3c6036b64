"""Attention of local heads: causal and windowed masks, score biases, and the attention kernels.

Shapes: b sequences, n heads, g heads of keys, q queries, z keys, d entries of a key, w of a value.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from perfmodel.execute.layers.dropout import dropout
from perfmodel.execute.layers.kernel import fused, like, operator
from perfmodel.execute.layers.masks import additive, causal, heads_of, marked
from perfmodel.execute.layers.softmax import seen_softmax
from perfmodel.foundation.session import session_cache

aten = torch.ops.aten
Tensor: TypeAlias = torch.Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's geometric slopes (Press et al. 2022), with their rule for head counts that are not a power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes)


def alibi_bias(slopes: Tensor, keys: int, *, later: int = 0) -> Tensor:
    """Return the ALiBi bias of the scores [1, n, 1, z] for slopes [n]: slope times distance to the last key of the sequence.

    Softmax is invariant to a shift common to all keys, so the distance to the query is not needed.
    later   keys of the sequence after these
    """
    distances = torch.arange(1 - keys - later, 1 - later, device=slopes.device)
    return slopes.view(1, -1, 1, 1) * distances.to(slopes.dtype)


@session_cache(maxsize=64)
def _last_queries(queries: int, keys: int) -> Tensor:
    """Return the causal mask of the last queries for flash kernels. Cached: torch cannot build it under a dispatch mode (our counters)."""
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


# ------------------------------------------------------------------------------------------------------- flash on CPUs
#
# torch's function uses the flash kernel of a CPU only for operands of one width and without sinks. Here forward and backward are one
# operator each, as on a GPU; the last query is at the position of the last key. Let Z be a row's sum of exponentials, s a head's sink and o
# the output of plain attention. The output is o Z / (Z + exp s). The plain kernel's backward is correct for that output if log(Z + exp s)
# replaces log Z.


def _as_queries(tensor: Tensor) -> Tensor:
    """Return the tensor [b, n, q, w] with the memory layout [b, q, n, w]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the empty output and the empty logarithms of the rows' sums."""
    b, n, s, _ = q.shape
    rest = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(b, s, n, v.shape[-1]).transpose(1, 2), rest


@fused("sink_attention", lambda q, k, v, *_: _empty(q, v), keeps_output=True, is_contiguous=False)
def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, chunked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute [b, n, q, d], [b, g, z, d], [b, g, z, d], sinks [n] -> [b, n, q, d] and the logarithm of each row's sum."""
    mask = additive(causal(q.shape[2], k.shape[2], window, chunked=chunked, device=q.device), q.dtype)
    keys, values = heads_of(k, q), heads_of(v, q)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    total = torch.logaddexp(rest, sinks.view(1, -1, 1).to(rest.dtype))
    return _as_queries(out * torch.exp(rest - total).unsqueeze(-1).to(out.dtype)), total


@sink_attention.backward(lambda gradient, q, k, v, sinks, *_: like(q, k, v, sinks))
def sink_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, chunked: bool, scale: float, out: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = additive(causal(q.shape[2], k.shape[2], window, chunked=chunked, device=q.device), q.dtype)
    given = gradient, q, heads_of(k, q), heads_of(v, q), out, rest
    for_q, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, False, attn_mask=mask, scale=scale)
    for_k, for_v = (piece.unflatten(1, (k.shape[1], -1)).sum(dim=2) for piece in others)
    share = torch.exp(sinks.view(1, -1, 1).to(rest.dtype) - rest)
    for_sinks = -(share * (gradient.to(rest.dtype) * out.to(rest.dtype)).sum(dim=-1)).sum(dim=(0, 2))
    return for_q.contiguous(), for_k.contiguous(), for_v.contiguous(), for_sinks.to(sinks.dtype)


@fused("uneven_attention", lambda q, k, v, *_: _empty(q, v), keeps_output=True, is_contiguous=False)
def uneven_attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute [b, n, q, d], [b, n, z, d], [b, n, z, w], chosen [b, q, top] or None -> [b, n, q, w] and the logarithm of each row's sum.

    w is at most d.
    """
    is_plain, mask = _causal(q, k, chosen)
    out, rest = aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), 0.0, is_plain, attn_mask=mask, scale=scale)
    return _as_queries(out[..., : v.shape[-1]]), rest


@uneven_attention.backward(lambda gradient, q, k, v, *_: like(q, k, v))
def uneven_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, scale: float, out: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    padded = (_padded(tensor, q) for tensor in (gradient, q, k, v, out))
    is_plain, mask = _causal(q, k, chosen)
    for_q, for_k, for_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *padded, rest, 0.0, is_plain, attn_mask=mask, scale=scale
    )
    return for_q, for_k, for_v[..., : v.shape[-1]].contiguous()


def _causal(q: Tensor, k: Tensor, chosen: Tensor | None) -> tuple[bool, Tensor | None]:
    """Return the causality as a flag, or as an additive mask if the queries are a later chunk or choose their keys."""
    queries, keys = q.shape[2], k.shape[2]
    if chosen is None and queries == keys:
        return True, None
    seen = causal(queries, keys, device=q.device)
    return False, additive(seen if chosen is None else (seen & marked(chosen, keys)).unsqueeze(1), q.dtype)


def _padded(x: Tensor, like: Tensor) -> Tensor:
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))


# --------------------------------------------------------------------------------------------------------- any device


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute [b, n, q, d], [b, g, z, d], [b, g, z, w] -> [b, n, q, w].

    mask    keys that each query sees, or a bias of the scores; None: all keys, or under `is_causal` those up to its own position
    sinks   score of each row that belongs to no key [1, n, 1 or q, 1]: it takes a share of the softmax and contributes no value
    """
    repeats = q.shape[1] // k.shape[1]
    if sinks is not None:  # no kernel supports sinks: compute the full square of scores
        scores = torch.matmul(q, heads_of(k, q).transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None and mask.dtype != torch.bool:
            scores, mask = scores + mask, None
        return torch.matmul(seen_softmax(scores, mask, sinks), heads_of(v, q))
    if mask is not None:  # fused kernels with a mask require equal numbers of key and query heads
        k, v = heads_of(k, q), heads_of(v, q)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=mask is None and repeats > 1
    )


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 0,
    chunked: bool = False,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of the last queries of the keys' sequence: each query sees the keys up to its own position.

    window    number of keys that a query sees, or (`chunked`) length of the chunk within which it sees keys; 0: all earlier keys
    slopes    slopes of ALiBi's biases [n]
    sinks     sink score of each head [n]
    chosen    the only keys that each query attends to [b, q, top]
    """
    queries, keys, is_cpu = q.shape[2], k.shape[2], q.device.type == "cpu"
    window = window if window < keys else 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if is_cpu and sinks is not None:
        return sink_attention(q, k, v, sinks, window, chunked, scale)
    if is_cpu and not window and slopes is None and (chosen is not None or v.shape[-1] < q.shape[-1]):
        return uneven_attention(q, heads_of(k, q), heads_of(v, q), chosen, scale)
    mask = None
    if window or slopes is not None or sinks is not None or chosen is not None:
        seen = causal(queries, keys, window, chunked=chunked, device=q.device)
        mask = seen if chosen is None else (seen & marked(chosen, keys)).unsqueeze(1)
        if slopes is not None:
            mask = additive(mask, q.dtype) + alibi_bias(slopes, keys)
    elif queries != keys:
        mask = _last_queries(queries, keys)
    row_sinks = None if sinks is None else sinks.view(1, -1, 1, 1)
    return attention(q, k, v, mask=mask, is_causal=mask is None, scale=scale, sinks=row_sinks)


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int, slopes: Tensor | None, probability: float) -> Tensor:
    """Compute `causal_attention` with separate operators for scores, softmax and context. probability: dropout probability."""
    k, v = heads_of(k, q), heads_of(v, q)
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(q.shape[-1] ** -0.5)
    if slopes is not None:
        scores.add_(alibi_bias(slopes, k.shape[2]))
    seen = causal(q.shape[2], k.shape[2], window, device=q.device)
    weights = seen_softmax(scores, seen, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype)
    del scores, seen
    return torch.matmul(dropout(weights, probability), v)


@operator("latent_attention", lambda q, kept, seen, width, scale: q.new_empty(*q.shape[:-1], width))
def latent_attention(q: Tensor, kept: Tensor, seen: Tensor | None, width: int, scale: float) -> Tensor:
    """Compute [b, n, c + r], [b, z, c + r], [b, 1, z] -> [b, n, c]. The latents are the keys; their first `width` entries c are the values.

    One operator, as on a GPU: it reads the cached latents once for keys and values.
    """
    scores = torch.bmm(q, kept.transpose(1, 2)).mul_(scale)
    weights = seen_softmax(scores, seen, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.bmm(weights, kept[..., :width])


@register_flop_formula(torch.ops.perfmodel.latent_attention)
def _latent_flops(q: list[int], kept: list[int], seen: list[int] | None, width: int, *_: object, **__: object) -> int:
    (b, n, d), z = q, kept[1]
    return sdpa_flop_count((b, 1, n, d), (b, 1, z, d), (b, 1, z, width))
