"""Families with experts in place of the MLP, in all or some layers, and standard attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perfmodel.workload.config_fields import ConfigFields, Values, every_of, head_dim_of, layer_parts, no_rotary_every_of, window_of
from perfmodel.workload.families.dense import LLAMA, ernie, glm, llama, mistral, qwen2, qwen3, rotary
from perfmodel.workload.layer_specs import Experts, FeedForward, Mixer

# Normalisation of scores (norm_topk_prob, routed_scaling_factor), load-balancing losses and the load-balancing bias
# (e_score_correction_bias, a buffer) have no trained parameters and negligible work: they are not counted.


def _mixtral(fields: ConfigFields) -> Values:
    return {**mistral(fields), "experts": _plain_experts(fields)}


def _qwen2_moe(fields: ConfigFields) -> Values:
    """Return the values of Qwen2-MoE: a shared expert, scaled by a gate, in addition to the routed ones."""
    experts = qwen_experts(fields, shared_width=fields.count("shared_expert_intermediate_size"))
    bias = fields.flag("qkv_bias", default=True)
    return {**qwen2(fields), "qkv_bias": bias, **layer_parts(_layers_of_qwen(fields), experts=experts)}


def _qwen3_moe(fields: ConfigFields) -> Values:
    return {**qwen3(fields, head_dim_required=False), **layer_parts(_layers_of_qwen(fields), experts=qwen_experts(fields))}


def qwen_experts(fields: ConfigFields, *, shared_width: int = 0) -> Experts | None:
    return fields.record(
        Experts,
        num_experts=fields.count("num_experts", "num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=expert_width(fields),
        shared_width=shared_width,
        shared_gate=shared_width > 0,
    )


def _layers_of_qwen(fields: ConfigFields) -> list[tuple[Mixer, FeedForward]]:
    return [("attention", feed_forward) for feed_forward in feed_forwards_of_qwen(fields)]


def feed_forwards_of_qwen(fields: ConfigFields) -> list[FeedForward]:
    """Return the feed-forwards: every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    num_layers = fields.num_layers()
    step, dense = max(1, fields.count("decoder_sparse_step", default=1)), fields.indices("mlp_only_layers", num_layers)
    return ["experts" if i not in dense and (i + 1) % step == 0 else "dense" for i in range(num_layers)]


def expert_width(fields: ConfigFields) -> int:
    return fields.count("moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size")


def routed_and_shared(fields: ConfigFields, *, sigmoid: bool) -> Experts | None:
    """Return the experts under DeepSeek's key names."""
    width = expert_width(fields)
    shared = 0 if "n_shared_experts" in fields.data and not fields.has("n_shared_experts") else fields.count("n_shared_experts")  # null
    score = fields.choice("scoring_func", ("softmax", "sigmoid"), default="sigmoid" if sigmoid else "softmax")
    in_groups = fields.data.get("topk_method") != "greedy"  # greedy selection ignores groups
    return fields.record(
        Experts,
        num_experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=width,
        shared_width=width * shared,
        score=score,
        num_groups=fields.count("n_group", default=1) if in_groups else 1,
        top_groups=fields.count("topk_group", default=1) if in_groups else 1,
    )


def after_dense_layers(fields: ConfigFields, mixer: Mixer) -> list[tuple[Mixer, FeedForward]]:
    """Return layers whose first ones are dense: `first_k_dense_replace` of them, or by `mlp_layer_types`."""
    num_layers = fields.num_layers()
    fields.must_be("moe_layer_freq", 1, "experts in every n-th layer are")
    words: Sequence[str] = fields.of_each_layer("mlp_layer_types", ("dense", "sparse"), num_layers)
    if not words:
        dense = fields.count("first_k_dense_replace")
        words = ["dense" if i < dense else "sparse" for i in range(num_layers)]
    return [(mixer, "dense" if word == "dense" else "experts") for word in words]


def _deepseek_moe(fields: ConfigFields) -> Values:
    """Return the values of the first DeepSeek with experts (arXiv 2401.06066), before latent attention."""
    return {**llama(fields), **layer_parts(after_dense_layers(fields, "attention"), experts=routed_and_shared(fields, sigmoid=False))}


def _glm4_moe(fields: ConfigFields) -> Values:
    """Return the values of GLM-4.5: biases only of queries, keys and values; optional query and key norms."""
    return {
        **glm(fields),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": fields.flag("use_qk_norm", default=False),
        **layer_parts(after_dense_layers(fields, "attention"), experts=routed_and_shared(fields, sigmoid=True)),
        "num_mtp_layers": fields.count("num_nextn_predict_layers", default=0),
    }


def _gpt_oss(fields: ConfigFields) -> Values:
    """Return the values of gpt-oss: windows in every second layer, sinks, biases everywhere. Its clamps and the scale inside its SiLU are
    fused into the activation."""
    experts = fields.record(
        Experts,
        num_experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok", "experts_per_token"),
        width=fields.count("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    bias = fields.flag("attention_bias", default=True)
    return {
        **llama(fields),
        **window_of(fields, used=True, every=2),
        "head_dim": fields.count("head_dim", default=64),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "attention_sinks": True,
        "experts": experts,
    }


def _llama4(fields: ConfigFields) -> Values:
    """Return the values of Llama 4: chunked attention except in layers without rotary positions; one shared expert. The norm of queries and
    keys has no weights. Layers without rotary positions have no such norm, but it is counted there too."""
    num_layers = fields.num_layers()
    width = fields.count("intermediate_size")
    experts = fields.record(
        Experts,
        num_experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=width,
        shared_width=width,
        score="sigmoid",
    )
    step = max(1, fields.count("interleave_moe_layer_step", default=1))
    sparse = set(fields.indices("moe_layers", num_layers) if fields.has("moe_layers") else range(step - 1, num_layers, step))
    has_dense = len(sparse) < num_layers
    return {
        **llama(fields),
        "num_key_value_heads": fields.count("num_key_value_heads"),
        "qk_norm": fields.flag("use_qk_norm", default=True),
        "qk_norm_scope": "bare",
        "intermediate_size": fields.count("intermediate_size_mlp") if has_dense else width,
        **_chunks(fields, num_layers),
        **layer_parts([("attention", "experts" if i in sparse else "dense") for i in range(num_layers)], experts=experts),
    }


def _chunks(fields: ConfigFields, num_layers: int) -> Values:
    interval = fields.count("no_rope_layer_interval", default=4)
    no_rotary = no_rotary_every_of(fields) if fields.data.get("no_rope_layers") else interval
    words = fields.of_each_layer("layer_types", ("chunked_attention", "full_attention"), num_layers)
    full = [word == "full_attention" for word in words]
    every = every_of(fields, "layer_types", full) if words else no_rotary
    chunk = 0 if "attention_chunk_size" in fields.data and not fields.has("attention_chunk_size") else fields.count("attention_chunk_size")
    cut = chunk > 0 and not all(full or [False])
    return {**rotary(no_rotary), "attention_chunk": chunk if cut else 0, "full_attention_every": every if cut else 0}


def _dbrx(fields: ConfigFields) -> Values:
    """Return the values of DBRX: MPT's key names; LayerNorm without a bias."""
    hidden, heads = fields.count("d_model"), fields.count("n_heads")
    attention, inside = fields.nested("attn_config"), fields.nested("ffn_config")
    experts = inside.record(
        Experts,
        num_experts=inside.count("moe_num_experts"),
        top_k=inside.count("moe_top_k"),
        width=inside.count("ffn_hidden_size"),
    )
    return {
        **LLAMA,
        "num_hidden_layers": fields.count("n_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": attention.count("kv_n_heads"),
        "head_dim": head_dim_of(hidden, heads),
        "intermediate_size": inside.count("ffn_hidden_size"),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_seq_len"),
        "norm": "layernorm",
        "activation": inside.nested("ffn_act_fn").activation("name", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dropout": fields.share("resid_pdrop"),
        "experts": experts,
    }


def _grok1(fields: ConfigFields) -> Values:
    """Return the values of Grok-1 as ported to torch (hpcai-tech/grok-1): norms before and after each branch, a tied output matrix."""
    return {
        **llama(fields),
        "activation": fields.activation("hidden_act", default="gelu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "sandwich_norm": True,
        "experts": _plain_experts(fields),
    }


def _minimax_m2(fields: ConfigFields) -> Values:
    """Return the values of MiniMax-M2: queries and keys are normed over all heads together."""
    fields.must_be("use_qk_norm", True, "attention without norms of queries and keys is")
    fields.must_be("qk_norm_type", "per_layer", "a norm of each head is")
    fields.must_be("shared_intermediate_size", 0, "a shared expert is")
    if any(kind != 1 for kind in fields.entries("attn_type_list")):
        fields.refuse("attn_type_list", "lightning attention is not modelled yet", "only layers of type 1 are")
    experts = fields.record(
        Experts,
        num_experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        score=fields.choice("scoring_func", ("softmax", "sigmoid"), default="sigmoid"),
    )
    further = fields.count("num_mtp_modules", default=0) if fields.flag("use_mtp", default=False) else 0
    return {**llama(fields), "qk_norm": True, "qk_norm_scope": "all", "experts": experts, "num_mtp_layers": further}


def _olmoe(fields: ConfigFields) -> Values:
    return {**llama(fields), "qk_norm": True, "qk_norm_scope": "all", "experts": _plain_experts(fields)}


def _phimoe(fields: ConfigFields) -> Values:
    """Return the values of PhiMoE: LayerNorm, and a bias even on the logits."""
    experts = _plain_experts(fields)
    bias = fields.flag("attention_bias", default=False)
    return {
        **mistral(fields),
        "norm": "layernorm",
        "norm_bias": True,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "lm_head_bias": fields.flag("lm_head_bias", default=False),
        "experts": experts,
    }


def _granitemoe(fields: ConfigFields) -> Values:
    """Return the values of GraniteMoE: the fused input matrix is gate and up; GraniteMoeShared also has a shared expert."""
    return {
        **llama(fields),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "experts": _plain_experts(fields, shared_width=fields.count("shared_intermediate_size", default=0)),
    }


def _ernie_moe(fields: ConfigFields) -> Values:
    """Return the values of ERNIE 4.5 MoE: experts in every n-th layer of a range."""
    bias, width = fields.flag("use_bias", default=False), fields.count("moe_intermediate_size")
    experts = fields.record(
        Experts,
        num_experts=fields.count("moe_num_experts"),
        top_k=fields.count("moe_k"),
        width=width,
        bias=bias,
        shared_width=width * fields.count("moe_num_shared_experts"),
    )
    num_layers = fields.num_layers()
    first, last = fields.count("moe_layer_start_index"), fields.count("moe_layer_end_index", default=-1)
    every = max(1, fields.count("moe_layer_interval", default=1))
    sparse = range(first, num_layers if last == -1 else last + 1)
    parts = layer_parts(
        [("attention", "experts" if i in sparse and (i + 1) % every == 0 else "dense") for i in range(num_layers)], experts=experts
    )
    return {**ernie(fields), "lm_head_bias": bias, **parts}


def _plain_experts(fields: ConfigFields, *, shared_width: int = 0) -> Experts | None:
    """Return experts of every layer; `intermediate_size` is the width of one."""
    return fields.record(
        Experts,
        num_experts=fields.count("num_local_experts", "num_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        shared_width=shared_width,
    )


EXPERTS: Mapping[str, Callable[[ConfigFields], Values]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "deepseek": _deepseek_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "dbrx": _dbrx,
    "grok-1": _grok1,
    "minimax_m2": _minimax_m2,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "ernie4_5_moe": _ernie_moe,
}
