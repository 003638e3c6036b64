"""Fused attention with grouped queries, and rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from perfmodel.foundation.errors import InputError
from perfmodel.workload.causal import CausalWindow
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Extent, FusedAttention, Stream, extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Causal:
    """Causal masking: a query attends to the keys up to its own position.

    window          most recent keys that it attends to; 0: all
    windowed        share with that window among the layers that the operator stands for
    chunked         the window does not slide: a query attends to keys of its own chunk of `window`
    chosen          [b,q,top]: the keys that a query attends to, for all heads (a sparse indexer): an input, saved for backward
    shares_queries  ranks may share queries although later ones attend to more keys: the cost model accounts for the imbalance
    """

    window: int = 0
    windowed: float = 1.0
    chunked: bool = False
    chosen: Operand | None = None
    shares_queries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDims:
    """Names of the dims of fused attention, where they differ from the defaults or are several."""

    batch: tuple[str, ...] = ("b",)
    queries: tuple[str, ...] = ("q",)
    keys: tuple[str, ...] = ("z",)
    heads: tuple[str, ...] = ("g", "r")
    kv_heads: tuple[str, ...] = ("g",)


_USUAL = AttentionDims()


def attention(
    name: str,
    q: Operand,
    k: Operand,
    v: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    head_dim: int,
    value_head_dim: int = 0,
    causal: Causal | None = None,
    sinks: Operand | None = None,
    named: AttentionDims = _USUAL,
    layer: str = "",
) -> Operator:
    """Return softmax(q k / sqrt(head_dim)) v in one kernel: q[b,q,g,r,""], k[b,z,g,""], v[b,z,g,""] -> y[b,q,g,r,""].

    r query heads share key-value head g.

    dims     contains those of `named`; the head dim, last in every operand, is no dim or an unsplit one: it is never sharded
    value_head_dim   of v and y, where it differs from that of q and k
    causal   None: every query attends to all keys
    sinks    sinks[g,r]: a logit of each head without a key; it takes part in the softmax and adds nothing (gpt-oss)

    Keys are unsplit, and so are causal queries that are not shared. Saved: q, k, v, the output and the log-sum-exp of each row.
    """
    batch, queries, keys, heads = named.batch, named.queries, named.keys, named.heads
    for dim in (*batch, *queries, *keys, *heads, *named.kv_heads):
        if dim not in dims:
            raise InputError(f"operator {name}: dims={tuple(dims)}: must have b, q, z, g and r; add {dim}")
    num_keys = prod(map(dims.__getitem__, keys))
    window = causal.window if causal is not None and causal.window < num_keys else 0
    chosen = causal.chosen if causal is not None else None
    inputs = (q, k, v, *filter(None, (sinks, chosen)))
    widths = (head_dim, head_dim, value_head_dim or head_dim, value_head_dim or head_dim)
    saved = list[Data]()
    for position, operand, width in zip((0, 1, 2, len(inputs)), (q, k, v, output), widths, strict=True):
        saved.append(Data(extent=_entries(dims, operand, width), of=position))
    work = FusedAttention(
        batch=extent(dims, batch),
        heads=extent(dims, heads),
        kv_heads=extent(dims, named.kv_heads),
        queries=extent(dims, queries),
        keys=extent(dims, keys),
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        mask=None if causal is None else CausalWindow(window=causal.window, windowed_fraction=causal.windowed, is_chunked=causal.chunked),
    )
    return Operator(
        name=name,
        kind="attention",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(work,),
        backward=(work,),
        roles=DimRoles(
            unsplit=(
                *(keys if causal is None or causal.shares_queries else (*keys, *queries)),
                *(chosen.dims[-1:] if chosen is not None else ()),
            )
        ),
        saved=(
            *saved,
            Data(extent=extent(dims, (*batch, *queries, *heads)), itemsize=4.0),
            *((Data(extent=extent(dims, chosen.dims), of=len(inputs) - 1),) if chosen is not None else ()),
        ),
        settings={
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "causal": causal is not None,
            "window": window,
        }
        | ({"chunked": True} if causal is not None and causal.chunked and window else {}),
        layer=layer,
    )


def _entries(dims: Mapping[str, int], operand: Operand, last: int) -> Extent:
    """Return the extent of an operand whose last position has `last` entries, with a dim or without."""
    return (*extent(dims, operand.dims[:-1]), (last, operand.dims[-1]))


def rotary(
    name: str,
    x: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    head_dim: int,
    base: float = 10000.0,
    start: int | None = None,
) -> Operator:
    """Return the rotation of pairs of entries of each head by position: x[b,s,g,""] -> y[b,s,g,""].

    The sequence is position 1, the head dim is last. With `start` only the `head_dim` entries from there on are rotated.

    As separate operators (torch), backward holds two products, a negated half and their concatenation: one and a half times the output.

    Source: Su et al., RoFormer, arXiv 2104.09864, equation 34; entry i is paired with i + head_dim / 2, as in Llama.
    """
    if head_dim % 2:
        raise InputError(f"operator {name}: head_dim={head_dim}: must be even, entries are rotated in pairs; use an even one")
    entries = _entries(dims, x, head_dim)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=1)
    return Operator(
        name=name,
        kind="rotary",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="rotary", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="rotary", elements=entries, accesses=(written.gradient, read.gradient)),),
        scratch=(Data(extent=((3, ""), *_entries(dims, x, head_dim // 2))),),
        settings={"head_dim": head_dim, "base": base} | ({} if start is None else {"start": start}),
    )
