"""Latent attention in decode steps: queries attend to the cached latents directly (DeepSeek, arXiv 2405.04434, section 2.1.2).

The up-projection of keys is absorbed into the query, that of values into the output. All heads read one cache row of `key_value_rank +
rope_head_dim` entries, whose first part is also the value. The weights are those of `latent.py`, in two views.
"""

from __future__ import annotations

from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.kinds.attention import AttentionDims, attention
from perfmodel.workload.kinds.pieces import side_by_side

_HEADS = "b s g"


def absorbed_attention(b: DecoderBuilder, q: str, latents: str, rope_key: str) -> str:
    """Write q[b,s,g,r,qk], latents[b,s,lat], rope_key[b,s,rope] -> out[b,s,g,r,val], with one product before attention and one after it."""
    latent = b.model.parts.latent
    assert latent is not None
    heads = f"{_HEADS} r"
    nope_query = b.piece("nope_query", q, f"{heads} qk", f"{heads} qk nope", f"{heads} nope", start=0)
    absorbed = b.linear("k_up_proj", nope_query, f"{heads} lat nope", f"{heads} nope", "g nope lat", 2, f"{heads} lat")
    turned = b.piece("rope_query", q, f"{heads} qk", f"{heads} qk rope", f"{heads} rope", start=latent.nope_head_dim)
    dims = f"{heads} lat rope kva"
    parts = operand(absorbed, f"{heads} lat"), operand(turned, f"{heads} rope"), operand("queries.out", f"{heads} kva")
    queries = b.add(side_by_side("queries", *parts, b.of(dims)), dims)
    dims = "b s lat rope kva"
    parts = operand(latents, "b s lat"), operand(rope_key, "b s rope"), operand("cache.out", "b s kva")
    cache = b.add(side_by_side("cache", *parts, b.of(dims)), dims)
    dims = "b q z g_attn r_attn lat kva"
    operator = attention(
        "attention",
        operand(queries, "b q g r kva"),
        operand(cache, "b z kva"),
        operand(latents, "b z lat"),
        operand("attention.out", "b q g r lat"),
        b.of(dims),
        head_dim=b.sizes["kva"],
        value_head_dim=b.sizes["lat"],
        named=AttentionDims(kv_heads=()),
    )
    out = b.add(operator, dims, group="attention_core")
    return b.linear("v_up_proj", out, f"{heads} val lat", f"{heads} lat", "g val lat", 2, f"{heads} val")
