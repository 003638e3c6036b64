"""Fused attention with grouped queries, and the rotation of queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.errors import InputError
from perfmodel.workload.causal import ALL_BEFORE, CausalMask
from perfmodel.workload.kinds.extents import extent
from perfmodel.workload.network import Extent, FusedAttention, NetworkOperator, Operand, Stream


def attention(
    name: str,
    q: Operand,
    k: Operand,
    v: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    head_dim: int,
    scale: float = 0.0,
    causal: bool = False,
    window: int = 0,
    layer: str = "",
) -> NetworkOperator:
    """softmax(scale q k) v in one kernel: q[b,q,g,r,""], k[b,z,g,""], v[b,z,g,""] -> y[b,q,g,r,""]; r query heads share key-value head g.

    dims     must have b, q, z, g, r; the head dim is no dim, it is never cut
    scale    0: head_dim ** -0.5
    window   a causal query sees its last so many keys; 0: all before it

    Keys stay whole, and so do causal queries: later shares of them would see more keys than earlier ones. Kept for backward: q, k, v, the
    output and the log-sum-exp of each row.
    """
    missing = [dim for dim in ("b", "q", "z", "g", "r") if dim not in dims]
    if missing:
        raise InputError(f"operator {name}: dims={tuple(dims)}: must have b, q, z, g and r; add {missing[0]}")
    if window and not causal:
        raise InputError(f"operator {name}: window={window}: needs a causal mask; set causal or leave the window out")
    depth: Extent = ((head_dim, ""),)
    work = FusedAttention(
        batch=extent(dims, "b"),
        heads=extent(dims, "gr"),
        kv_heads=extent(dims, "g"),
        queries=extent(dims, "q"),
        keys=extent(dims, "z"),
        head_dim=head_dim,
        causal_fraction=_mask(dims["q"], window).fraction if causal else 1.0,
    )
    return NetworkOperator(
        name=name,
        kind="attention",
        dims=dims,
        inputs=(q, k, v),
        output=output,
        forward=(work,),
        backward=(work,),
        whole=("z", "q") if causal else ("z",),
        saved=(*((*extent(dims, operand.dims), *depth) for operand in (q, k, v, output)), extent(dims, "bqgr")),
        kept=(q.tensor, k.tensor, v.tensor, output.tensor),
        settings={"head_dim": head_dim, "scale": scale or head_dim**-0.5, "causal": causal, "window": window},
        layer=layer,
    )


def _mask(queries: int, window: int) -> CausalMask:
    return CausalMask(window_fraction=window / queries, windowed_fraction=1.0) if 0 < window < queries else ALL_BEFORE


def rotary(
    name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, head_dim: int, base: float = 10000.0, layer: str = ""
) -> NetworkOperator:
    """Pairs of entries of each head rotated by its position: x[b,s,g,""] -> y[b,s,g,""]; the sequence is position 1, the head dim last.

    Source: Su et al., RoFormer, arXiv 2104.09864, equation 34; entry i is paired with i + head_dim / 2, as in Llama.
    """
    if head_dim % 2:
        raise InputError(f"operator {name}: head_dim={head_dim}: must be even, entries are rotated in pairs; use an even one")
    entries: Extent = (*extent(dims, x.dims), (head_dim, ""))
    stream = Stream(kernel="rotary", elements=entries, accesses=(entries, entries))
    return NetworkOperator(
        name=name,
        kind="rotary",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(stream,),
        backward=(stream,),
        settings={"head_dim": head_dim, "base": base},
        layer=layer,
    )
