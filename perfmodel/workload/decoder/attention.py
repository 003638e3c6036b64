"""Dense attention: projections of queries, keys and values, grouped heads, a fused kernel or the full score matrix."""

from __future__ import annotations

from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.kinds.attention import Causal
from perfmodel.workload.kinds.attention import attention as fused_attention
from perfmodel.workload.kinds.dense import softmax


def attention_mixer(b: DecoderBuilder, x: str) -> str:
    model, weight_form_kv = b.model, b.weight_form_kv
    copies = " c" if weight_form_kv else ""
    q = b.linear("q_proj", x, "b s g r d h", "b s h", "g r d h", 3, "b s g r d")
    k = b.linear("k_proj", x, f"b s g{copies} d h", "b s h", "g d h", 2, f"b s g{copies} d")
    v = b.linear("v_proj", x, f"b s g{copies} d h", "b s h", "g d h", 2, f"b s g{copies} d")
    if model.biases.qkv_bias:
        q = b.bias("q_proj", q, "b s g r d", "b s g r d", "g r d")
        k = b.bias("k_proj", k, f"b s g{copies} d", f"b s g{copies} d", "g d")
        v = b.bias("v_proj", v, f"b s g{copies} d", f"b s g{copies} d", "g d")
    if model.norms.qk_norm:
        q = b.qk_norm("q_norm", q, "b s g r d", "g r")
        k = b.qk_norm("k_norm", k, f"b s g{copies} d", "g")
    if model.positions.position == "rotary":
        q = b.rotary("q_rotary", q, "b s g r d")
        k = b.rotary("k_rotary", k, f"b s g{copies} d")
    sinks = b.parameter("sinks", "g r", 2) if model.attention.attention_sinks else ""
    out = attention_core(b, q, k, v, "b z g r d" if weight_form_kv else "b z g d", sinks=sinks)
    if model.attention.attention_gate:
        heads = "b s g r d"
        gate = b.linear("q_gate_proj", x, f"{heads} h", "b s h", "g r d h", 3, heads)
        if model.biases.qkv_bias:
            gate = b.bias("q_gate_proj", gate, heads, heads, "g r d")
        out = b.pointwise("attention_gate", "sigmoid_gate", [(out, heads), (gate, heads)], heads)
    return b.linear("o_proj", out, "b s g r d h", "b s g r d", "h g r d", 1, "b s h")


def attention_core(
    b: DecoderBuilder, q: str, k: str, v: str, k_dims: str, *, width: str = "d", value: str = "d", sinks: str = "", chosen: str = ""
) -> str:
    """Write queries [b q g r width], keys [k_dims] and values -> [b q g r value]: a fused kernel, or scores, softmax and context.

    width, value   dims of a query or key head, and of a value head
    sinks          a parameter: a logit of each head without a key
    chosen         [b q it]: the keys that each query attends to (sparse attention); "": keys by the model's windows
    """
    model, core = b.model, "attention_core"
    depth, value_depth = b.sizes[width], b.sizes[value]
    q_dims, v_dims, out_dims = f"b q g r {width}", f"{k_dims.rpartition(' ')[0]} {value}", f"b q g r {value}"
    if b.attention == "flash":
        dims = f"b q z g_attn r_attn {width}" + (f" {value}" if value != width else "") + (" it" if chosen else "")
        top = b.sizes["it"] if chosen else 0
        operator = fused_attention(
            "attention",
            operand(q, q_dims),
            operand(k, k_dims),
            operand(v, v_dims),
            operand("attention.out", out_dims),
            b.of(dims),
            head_dim=depth,
            value_head_dim=value_depth if value != width else 0,
            causal=Causal(
                window=top or model.attention.window,
                windowed=1.0 if top else model.sliding_layer_fraction,
                chunked=bool(model.attention.attention_chunk),
                chosen=operand(chosen, "b q it") if chosen else None,
                shares_queries=b.shares_queries,
            ),
            sinks=operand(sinks, "g r") if sinks else None,
        )
        return b.add(operator, dims, group=core)
    square, square_dims = "b q z g_attn r_attn", "b g r q z"
    scores = b.product("scores", f"{square} {width}", (q, q_dims), (k, k_dims), ("scores.out", square_dims), group=core)
    operator = softmax(
        "softmax",
        operand(scores, square_dims),
        operand("softmax.out", square_dims),
        b.of(square),
        over="z",
        scale=depth**-0.5,
        causal_queries="q",
        sinks=operand(sinks, "g r") if sinks else None,
    )
    weights = b.add(operator, square, unsplit="z", group=core)
    if b.drops:
        weights = b.dropout("attention_weights_dropout", weights, square, square_dims, group=core)
    return b.product("context", f"{square} {value}", (weights, square_dims), (v, v_dims), ("attention.out", out_dims), group=core)
