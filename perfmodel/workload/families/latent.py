"""Families with multi-head latent attention: DeepSeek V2 and V3 and their successors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.config import printable
from perfmodel.workload.config_fields import ConfigFields, Values, layer_parts
from perfmodel.workload.families.dense import LLAMA
from perfmodel.workload.families.experts import after_dense_layers, routed_and_shared
from perfmodel.workload.layer_specs import LatentAttention


def _with_indexer(fields: ConfigFields) -> Values:
    """Return the values of DeepSeek V3.2 and GLM-5: sparse attention to the keys that an indexer selects."""
    if any(kind != "full" for kind in fields.entries("indexer_types")):
        fields.refuse("indexer_types", "layers that share an indexer are not modelled yet", "only layers with one each are")
    return _deepseek(fields, sigmoid=True, has_indexer=True)


def _minicpm3(fields: ConfigFields) -> Values:
    """Return the values of MiniCPM3: latent attention and a dense MLP; scales of embedding, residual and logits are constants."""
    shared_out = fields.count("hidden_size") // max(1, fields.count("num_attention_heads"))
    return {**_attention(fields), "latent": _latent(fields, value_head_dim=shared_out)}


def _deepseek(fields: ConfigFields, *, sigmoid: bool, has_indexer: bool = False) -> Values:
    latent, experts = _latent(fields, has_indexer=has_indexer), routed_and_shared(fields, sigmoid=sigmoid)
    return {
        **_attention(fields),
        **layer_parts(after_dense_layers(fields, "latent"), latent=latent, experts=experts),
        "num_mtp_layers": fields.count("num_nextn_predict_layers", default=0),
    }


def _latent(fields: ConfigFields, *, has_indexer: bool = False, value_head_dim: int | None = None) -> LatentAttention | None:
    """Return the latent attention. `q_lora_rank` may be null; head_dim is not read, because it at most repeats the rope width."""
    return fields.record(
        LatentAttention,
        query_rank=fields.count("q_lora_rank", default=0),
        key_value_rank=fields.count("kv_lora_rank"),
        nope_head_dim=fields.count("qk_nope_head_dim"),
        rope_head_dim=fields.count("qk_rope_head_dim"),
        value_head_dim=fields.count("v_head_dim", default=value_head_dim),
        index_heads=fields.count("index_n_heads") if has_indexer else 0,
        index_head_dim=fields.count("index_head_dim") if has_indexer else 0,
        index_top=fields.count("index_topk") if has_indexer else 0,
    )


def _attention(fields: ConfigFields) -> Values:
    """Return the values other than the latents. Every head has its own keys and values; the score width is that of queries."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if kv_heads != heads:
        rule = f"contradicts kv_lora_rank: latent attention makes keys and values for each of the num_attention_heads={printable(heads)}"
        fields.faults.append(str(bad_field("num_key_value_heads", printable(kv_heads), rule, "correct one of the two")))
    bias = fields.flag("attention_bias", default=False)
    return {
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "hidden_size": fields.count("hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim"),
        "intermediate_size": fields.count("intermediate_size"),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings"),
        **LLAMA,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


LATENT: Mapping[str, Callable[[ConfigFields], Values]] = {
    "deepseek_v2": partial(_deepseek, sigmoid=False),
    "deepseek_v3": partial(_deepseek, sigmoid=True),
    "kimi_k2": partial(_deepseek, sigmoid=True),
    "deepseek_v32": _with_indexer,
    "glm_moe_dsa": _with_indexer,
    "minicpm3": _minicpm3,
}

#: Families of these whose `index_topk` is the number of keys that a query attends to.
WITH_INDEXER = frozenset(("deepseek_v32", "glm_moe_dsa"))
