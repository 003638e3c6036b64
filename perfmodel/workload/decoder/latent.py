"""Latent attention in training: the keys and values of every head are computed from one latent per token (DeepSeek, arXiv 2405.04434).

Unsharded weights compute the latents in the layout of the residual stream; the latents are gathered in place of the hidden state. Weights
from latents to heads are sharded by heads. Every head has its own keys: the number of key-value heads equals that of heads.
"""

from __future__ import annotations

from perfmodel.workload.decoder.absorbed import absorbed_attention
from perfmodel.workload.decoder.attention import attention_core
from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.decoder.indexer import write_indexer
from perfmodel.workload.kinds.dense import rms_norm
from perfmodel.workload.kinds.pieces import copy, side_by_side

_HEADS = "b s g"


def latent_mixer(b: DecoderBuilder, x: str) -> str:
    latent = b.model.parts.latent
    assert latent is not None
    compressed = x
    if latent.query_rank:
        compressed = _from_stream(b, "q_a_proj", x, "qa")
        compressed = _norm(b, "q_a_norm", compressed, "qa")
        q = b.linear("q_b_proj", compressed, f"{_HEADS} r qk qa", "b s qa", "g r qk qa", 3, f"{_HEADS} r qk")
    else:
        q = b.linear("q_proj", x, f"{_HEADS} r qk h", "b s h", "g r qk h", 3, f"{_HEADS} r qk")
    chosen = write_indexer(b, x, compressed, "qa" if latent.query_rank else "h") if latent.index_heads else ""
    q = b.rotary("q_rotary", q, f"{_HEADS} r qk", head_dim=latent.rope_head_dim, start=latent.nope_head_dim)
    # The latent of each token, for keys and values, and the rotary key shared by all heads.
    compressed = _from_stream(b, "kv_a_proj", x, "kva")
    tokens = b.piece("latent", compressed, "b s kva", "b s_res kva lat", "b s lat", start=0)
    tokens = _norm(b, "kv_a_norm", tokens, "lat", times_larger=b.sizes["kva"] / b.sizes["lat"])
    shared = b.piece("rope_key", compressed, "b s kva", "b s_res kva rope", "b s rope", start=latent.key_value_rank)
    shared = b.rotary("k_rotary", shared, "b s_res rope", tensor_dims="b s rope", head_dim=latent.rope_head_dim, start=0)
    if b.absorbs:
        out = absorbed_attention(b, q, tokens, shared)
    else:  # a key per head, with a part shared by all heads, and a value
        heads = b.linear("kv_b_proj", tokens, f"{_HEADS} kvb lat", "b s lat", "g kvb lat", 2, f"{_HEADS} kvb")
        nope_key = b.piece("nope_key", heads, f"{_HEADS} kvb", f"{_HEADS} kvb nope", f"{_HEADS} nope", start=0)
        dims = f"{_HEADS} nope rope qk"
        operands = operand(nope_key, f"{_HEADS} nope"), operand(shared, "b s rope"), operand("keys.out", f"{_HEADS} qk")
        k = b.add(side_by_side("keys", *operands, b.of(dims)), dims, parts={nope_key: b.sizes["kvb"] / b.sizes["nope"]})
        value = b.piece("value", heads, f"{_HEADS} kvb", f"{_HEADS} kvb val", f"{_HEADS} val", start=latent.nope_head_dim)
        dims = f"{_HEADS} val"
        v = b.add(copy("values", operand(value, dims), operand("values.out", dims), b.of(dims)), dims)
        out = attention_core(b, q, k, v, "b z g qk", width="qk", value="val", chosen=chosen)
    return b.linear("o_proj", out, f"{_HEADS} r val h", f"{_HEADS} r val", "h g r val", 1, "b s h")


def _from_stream(b: DecoderBuilder, name: str, x: str, latent: str) -> str:
    """Write a product in the layout of the residual stream."""
    out = b.linear(name, x, f"b s_res {latent} h", "b s h", f"{latent} h", 1, f"b s {latent}")
    return b.bias(name, out, f"b s_res {latent}", f"b s {latent}", latent) if b.model.biases.qkv_bias else out


def _norm(b: DecoderBuilder, name: str, x: str, latent: str, *, times_larger: float = 1.0) -> str:
    """Write an RMSNorm, whatever the norms of the layers are. times_larger: size of the tensor of which the input is a view."""
    dims, tensor_dims = f"b s_res {latent}", f"b s {latent}"
    weight = operand(b.parameter(f"{name}.weight", latent, 1), latent)
    operator = rms_norm(name, operand(x, tensor_dims), weight, operand(f"{name}.out", tensor_dims), b.of(dims))
    return b.add(operator, dims, parts={x: times_larger} if times_larger > 1.0 else {})
