"""Attention without a mask, MLPs and learned positions, shared by several transformer networks."""

from __future__ import annotations

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.graph import Operand, TensorRole
from perfmodel.workload.kinds.attention import attention
from perfmodel.workload.networks.builder import NetworkBuilder

#: Dims of the projected queries, and of keys and values: g key-value heads, r query heads of each, d entries of a head.
QUERY, KEY = "b s g r d", "b s g d"


def attend(b: NetworkBuilder, prefix: str, q: str, k: str, v: str, *, fused: bool = True) -> str:
    """Write q[b,s,g,r,d], k and v[b,s,g,d] -> [b,s,g,r,d] without a mask; one fused kernel, or two products and a softmax."""
    depth = b.shape(q)[-1]
    if not fused:
        scores = b.einsum(f"{prefix}scores", (q, "b q g r d"), (k, "b z g d"), "b g r q z", unsplit="d")
        weights = b.softmax(f"{prefix}softmax", scores, "b g r q z", "z", scale=depth**-0.5)
        return b.einsum(f"{prefix}context", (weights, "b g r q z"), (v, "b z g d"), "b q g r d", unsplit="d")
    batch, queries_len, groups, shared, _ = b.shape(q)
    operator = attention(
        f"{prefix}attention",
        Operand(tensor=q, dims=("b", "q", "g", "r", "")),
        Operand(tensor=k, dims=("b", "z", "g", "")),
        Operand(tensor=v, dims=("b", "z", "g", "")),
        Operand(tensor=f"{prefix}attention.out", dims=("b", "q", "g", "r", "")),
        {"b": batch, "q": queries_len, "z": b.shape(k)[1], "g": groups, "r": shared},
        head_dim=depth,
        layer=b.layer,
    )
    return b.add(operator, *b.shape(q))


def self_attention(b: NetworkBuilder, prefix: str, x: str, *, heads: int, fused: bool) -> str:
    """Write the attention branch with biases and without a mask; every head has its own keys and values."""
    hidden = b.shape(x)[-1]
    sizes = {"g": heads, "d": head_dim(hidden, heads)}
    q = b.linear(f"{prefix}q_proj", x, "b s h", "g r d h", QUERY, unsplit="d", new=sizes | {"r": 1})
    k = b.linear(f"{prefix}k_proj", x, "b s h", "g d h", KEY, unsplit="d", new=sizes)
    v = b.linear(f"{prefix}v_proj", x, "b s h", "g d h", KEY, unsplit="d", new=sizes)
    y = attend(b, prefix, q, k, v, fused=fused)
    return b.linear(f"{prefix}o_proj", y, QUERY, "h g r d", "b s h", unsplit="d", new={"h": hidden})


def gelu_mlp(b: NetworkBuilder, prefix: str, x: str, intermediate: int) -> str:
    """Write the feed-forward branch with biases."""
    y = b.linear(f"{prefix}up_proj", x, "b s h", "f h", "b s f", new={"f": intermediate})
    y = b.pointwise(f"{prefix}gelu", "gelu", (y, "b s f"))
    return b.linear(f"{prefix}down_proj", y, "b s f", "h f", "b s h", new={"h": b.shape(x)[-1]})


def add(b: NetworkBuilder, name: str, x: str, y: str) -> str:
    return b.pointwise(name, "add", (x, "b s h"), (y, "b s h"))


def head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise bad_field("heads", heads, f"must divide hidden={hidden}", "use a divisor")
    return hidden // heads


def learned_positions(b: NetworkBuilder, name: str, x: str, rows: int) -> str:
    """Write x[b,s,h] + rows of a learned table at `positions`, as operators `name` and `name`_add."""
    _, seq_len, hidden = b.shape(x)
    if seq_len > rows:
        raise bad_field("seq_len", seq_len, f"{b.name} has learned positions for {rows}", "use a shorter one")
    ids = b.input("positions", seq_len, role=TensorRole.INDEX)
    positions = b.embedding(name, ids, "s", rows, hidden, feature_dim="h", table_dim="p")
    return b.pointwise(f"{name}_add", "add", (x, "b s h"), (positions, "s h"))
