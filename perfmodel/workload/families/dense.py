"""Families with attention and a dense MLP in all layers."""

from collections.abc import Callable, Mapping

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.config import printable
from perfmodel.workload.config_fields import ConfigFields, Values, head_dim_of, no_rotary_every_of, sizes_of, window_of

# Constant factors (logit_scale, embedding_multiplier, residual_multiplier, soft caps) and clamps (clip_qkv) have no parameters and are
# fused into existing kernels: they are not counted.


def _gpt2(fields: ConfigFields) -> Values:
    hidden, heads = fields.count("n_embd", "hidden_size"), fields.count("n_head", "num_attention_heads")
    return {
        "num_hidden_layers": fields.count("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim_of(hidden, heads),
        "intermediate_size": fields.count("n_inner", "intermediate_size", default=4 * hidden),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("n_positions", "max_position_embeddings"),
        "activation": fields.activation("activation_function", default="gelu_new"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("resid_pdrop", default=0.1),
        **_GPT,
    }


#: GPT-2's block: everything has a bias, positions are a table.
_GPT: Values = {
    "gated_mlp": False,
    "norm": "layernorm",
    "position": "learned",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
}


def _megatron(fields: ConfigFields) -> Values:
    """Return the values of perfmodel's own format: a Megatron-LM GPT with Hugging Face's names and the padded vocabulary."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    return {
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("num_key_value_heads", default=heads),
        "head_dim": fields.count("head_dim") if fields.has("head_dim") else head_dim_of(hidden, heads),
        "intermediate_size": fields.count("intermediate_size", default=4 * hidden),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings"),
        "activation": fields.activation("hidden_act", default="gelu_new"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("hidden_dropout", default=0.1),
        **_GPT,
    }


def _opt(fields: ConfigFields) -> Values:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.must_be("do_layer_norm_before", True, "norms after each branch (OPT-350m) are")
    fields.must_be("_remove_final_layer_norm", False, "a model without its final norm is")
    fields.must_be("layer_norm_elementwise_affine", True, "norms without weights are")
    fields.must_be("word_embed_proj_dim", hidden, "a projection between embedding and hidden size (OPT-350m) is")
    bias = fields.flag("enable_bias", default=True)
    return {
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim_of(hidden, heads),
        "intermediate_size": fields.count("ffn_dim"),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings"),
        "position_offset": 2,  # modeling_opt.py: the first two rows of the table are unused
        "activation": fields.activation("activation_function", default="relu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("dropout", default=0.1),
        **_GPT,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }


def _gpt_neox(fields: ConfigFields) -> Values:
    values = sizes_of(fields, kv_default=True)
    bias = fields.flag("attention_bias", default=True)
    return {
        **values,
        **_GPT,
        "position": "rotary",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "parallel_block": fields.flag("use_parallel_residual", default=True),
        "activation": fields.activation("hidden_act", default="gelu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dropout": fields.share("hidden_dropout"),
    }


def _falcon(fields: ConfigFields) -> Values:
    hidden = fields.count("hidden_size", "n_embed")
    heads = fields.count("num_attention_heads", "n_head")
    new_block = fields.flag("new_decoder_architecture", default=False)
    parallel = new_block or fields.flag("parallel_attn", default=True)
    if new_block:  # 40B and later: grouped heads; two norms unless num_ln_in_parallel_attn is 1
        kv_heads = fields.count("num_kv_heads", "n_head_kv", default=heads)
        shared_norm = fields.count("num_ln_in_parallel_attn", default=2) == 1
    else:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
        shared_norm = parallel
    bias = fields.flag("bias", default=False)
    return {
        "num_hidden_layers": fields.count("num_hidden_layers", "n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim_of(hidden, heads),
        "intermediate_size": fields.count("ffn_hidden_size", default=4 * hidden),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count(
            "max_position_embeddings", default=2048
        ),  # class default; ALiBi and rotary positions have no table
        **_GPT,
        "position": "alibi" if fields.flag("alibi", default=False) else "rotary",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "parallel_block": parallel,
        "shared_norm": shared_norm,
        "activation": fields.activation("activation", default="gelu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("hidden_dropout"),
    }


def _phi(fields: ConfigFields) -> Values:
    """Return the values of phi-1, 1.5 and 2: a parallel block with one norm, partial rotary positions, a bias even on the logits."""
    return {
        **sizes_of(fields, kv_default=True),
        **_GPT,
        "position": "rotary",
        "lm_head_bias": True,
        "parallel_block": True,
        "shared_norm": True,
        "qk_norm": fields.flag("qk_layernorm", default=False),
        "activation": fields.activation("hidden_act", default="gelu_new"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dropout": fields.share("resid_pdrop"),
    }


def _bloom(fields: ConfigFields) -> Values:
    hidden, heads = fields.count("hidden_size", "n_embed"), fields.count("n_head", "num_attention_heads")
    fields.must_be("apply_residual_connection_post_layernorm", False, "a residual after the norm is")
    return {
        "num_hidden_layers": fields.count("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim_of(hidden, heads),
        "intermediate_size": 4 * hidden,  # modeling_bloom.py, regardless of n_inner
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("seq_length", default=2048),  # training length; ALiBi has no table
        **_GPT,
        "position": "alibi",
        "embedding_layernorm": True,
        "activation": "gelu_tanh",
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("hidden_dropout"),
    }


def _gptj(fields: ConfigFields) -> Values:
    """Return the values of GPT-J: a parallel block with one norm; biases only in the MLP and on the logits."""
    return {
        **_gpt2(fields),
        "position": "rotary",
        "qkv_bias": False,
        "attention_output_bias": False,
        "lm_head_bias": True,
        "parallel_block": True,
        "shared_norm": True,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dropout": fields.share("resid_pdrop"),
    }


def _mpt(fields: ConfigFields) -> Values:
    """Return the values of transformers' form of MPT: ALiBi, no bias."""
    hidden, heads = fields.count("d_model", "hidden_size"), fields.count("n_heads", "num_attention_heads")
    attention = fields.nested("attn_config")
    attention.must_be("alibi", True, "positions other than ALiBi are")
    attention.must_be("attn_type", "multihead_attention", "keys and values that heads share are")
    attention.must_be("qk_ln", False, "norms of queries and keys are")
    attention.must_be("prefix_lm", False, "a prefix that is seen from both sides is")
    fields.must_be("no_bias", True, "biases are")
    return {
        "num_hidden_layers": fields.count("n_layers", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim_of(hidden, heads),
        "intermediate_size": fields.count("expansion_ratio", default=4) * hidden,  # 4 in transformers; mosaicml's own code reads it
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_seq_len", default=2048),
        **_GPT,
        "position": "alibi",
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "activation": "gelu",
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("resid_pdrop"),
    }


def _starcoder2(fields: ConfigFields) -> Values:
    fields.must_be("mlp_type", "default", "a gated MLP is")
    fields.must_be("norm_type", "layer_norm", "RMSNorm is")
    bias = fields.flag("use_bias", default=True)
    return {
        **sizes_of(fields, kv_default=False),
        **_GPT,
        **window_of(fields, used=fields.has("sliding_window"), every=0),
        "position": "rotary",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "activation": fields.activation("hidden_act", default="gelu_pytorch_tanh"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("residual_dropout"),
    }


#: Llama's block: gated MLP, RMSNorm, rotary positions, no bias.
LLAMA: Values = {
    "gated_mlp": True,
    "norm": "rmsnorm",
    "position": "rotary",
    "qkv_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}


def _nemotron(fields: ConfigFields) -> Values:
    """Return the values of Nemotron-4: LayerNorm, an MLP of two matrices."""
    activation = fields.activation("hidden_act", default="relu2")
    return {**llama(fields), "gated_mlp": False, "norm": "layernorm", "norm_bias": True, "activation": activation}


def ernie(fields: ConfigFields) -> Values:
    bias = fields.flag("use_bias", default=False)
    tied = fields.flag("tie_word_embeddings", default=True)
    return {**llama(fields), "qkv_bias": bias, "attention_output_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied}


def _seed_oss(fields: ConfigFields) -> Values:
    return {
        **llama(fields),
        "qkv_bias": fields.flag("attention_bias", default=True),
        "attention_output_bias": fields.flag("attention_out_bias", default=False),
    }


def _hunyuan(fields: ConfigFields) -> Values:
    return {**llama(fields), "mlp_bias": False, "qk_norm": True}


def _exaone4(fields: ConfigFields) -> Values:
    """Return the values of EXAONE 4: norms only after the branches; layers without the window have no rotary positions."""
    pattern = fields.data.get("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else fields.count("sliding_window_pattern", default=4)
    window = window_of(fields, used=fields.has("sliding_window"), every=every)
    positions = rotary(window["full_attention_every"]) if window["sliding_window"] else {}
    values = {**llama(fields), "qkv_bias": False, "attention_output_bias": False, "mlp_bias": False, "qk_norm": True}
    return {**values, "pre_norm": False, "sandwich_norm": True, **window, **positions}


def llama(fields: ConfigFields) -> Values:
    bias = fields.flag("attention_bias", default=False)
    return {
        **sizes_of(fields, kv_default=True),
        **LLAMA,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", default=False),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def olmo2(fields: ConfigFields) -> Values:
    """Return the values of OLMo 2: norms only after the branches; queries and keys are normed over all heads together."""
    return {**llama(fields), "mlp_bias": False, "pre_norm": False, "sandwich_norm": True, "qk_norm": True, "qk_norm_scope": "all"}


def _olmo3(fields: ConfigFields) -> Values:
    return {**olmo2(fields), **window_of(fields, used=True, every=4)}


def glm(fields: ConfigFields) -> Values:
    """Return the values of GLM-4-9B and GLM-Edge in transformers' form (glm-4-9b-hf)."""
    return {
        **sizes_of(fields, kv_default=False, head_dim_required=True),
        **LLAMA,
        "qkv_bias": fields.flag("attention_bias", default=True),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _glm4(fields: ConfigFields) -> Values:
    """Return the values of GLM-4-0414."""
    return {**glm(fields), "sandwich_norm": True}


def _smollm3(fields: ConfigFields) -> Values:
    fields.must_be("use_sliding_window", False, "attention in windows is")
    tied = fields.flag("tie_word_embeddings", default=True)
    return {**llama(fields), "tie_word_embeddings": tied, **rotary(no_rotary_every_of(fields))}


def rotary(no_rotary_every: int) -> Values:
    return {"position": "none"} if no_rotary_every == 1 else {"position": "rotary", "no_rotary_every": no_rotary_every}


def _cohere(fields: ConfigFields) -> Values:
    """Return the values of Command R: a parallel block with one LayerNorm without bias, and a tied output matrix."""
    return {
        **llama(fields),
        "mlp_bias": False,
        "norm": "layernorm",
        "parallel_block": True,
        "shared_norm": True,
        "qk_norm": fields.flag("use_qk_norm", default=False),
        "qk_norm_scope": "own",
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
    }


def _cohere2(fields: ConfigFields) -> Values:
    """Return the values of Command R7B and Command A: only layers with a window have rotary positions."""
    window = window_of(fields, used=fields.has("sliding_window"), every=fields.count("sliding_window_pattern", default=4))
    positions = rotary(window["full_attention_every"]) if window["sliding_window"] else {"position": "none"}
    return {**_cohere(fields), "qk_norm": False, **window, **positions}


def mistral(fields: ConfigFields) -> Values:
    return {
        **sizes_of(fields, kv_default=False),
        **LLAMA,
        **window_of(fields, used=fields.has("sliding_window") or bool(fields.defaults), every=0),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _phi3(fields: ConfigFields) -> Values:
    return {
        **sizes_of(fields, kv_default=True),
        **LLAMA,
        **window_of(fields, used=fields.has("sliding_window"), every=0),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dropout": fields.share("resid_pdrop"),
    }


def qwen2(fields: ConfigFields) -> Values:
    return {
        **sizes_of(fields, kv_default=False),
        **LLAMA,
        **_qwen_window(fields),
        "qkv_bias": True,
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def qwen3(fields: ConfigFields, *, head_dim_required: bool = True, width: str = "intermediate_size") -> Values:
    bias = fields.flag("attention_bias", default=False)
    return {
        **sizes_of(fields, kv_default=False, head_dim_required=head_dim_required, width=width),
        **LLAMA,
        **_qwen_window(fields),
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _gemma(fields: ConfigFields) -> Values:
    # The first Gemma configs have hidden_act "gelu", but the model runs the tanh form unless hidden_activation is set.
    bias = fields.flag("attention_bias", default=False)
    return {
        **sizes_of(fields, kv_default=False, head_dim_required=True),
        **LLAMA,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "activation": fields.activation("hidden_activation", default="gelu_pytorch_tanh"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
    }


def _gemma2(fields: ConfigFields) -> Values:
    return {**_gemma(fields), **window_of(fields, used=True, every=2), "sandwich_norm": True}


def _gemma3(fields: ConfigFields) -> Values:
    every = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return {**_gemma(fields), **window_of(fields, used=True, every=every), "sandwich_norm": True, "qk_norm": True}


def _qwen_window(fields: ConfigFields) -> Values:
    """Return the window: Qwen's layers from `max_window_layers` on have it, if `use_sliding_window` is set."""
    used = fields.flag("use_sliding_window", default=False)
    if used and not fields.has("layer_types") and fields.has("sliding_window"):
        first, layers = fields.count("max_window_layers", default=28), fields.count("num_hidden_layers")
        if 0 < first < layers:
            rule = f"layers 0 to {printable(first - 1)} ignore the window and the others do not, which is not modelled"
            raise bad_field("max_window_layers", printable(first), rule, "set use_sliding_window=false")
        used = first <= 0
    return window_of(fields, used=used, every=0)


DENSE: Mapping[str, Callable[[ConfigFields], Values]] = {
    "gpt2": _gpt2,
    "megatron": _megatron,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "bloom": _bloom,
    "gptj": _gptj,
    "mpt": _mpt,
    "starcoder2": _starcoder2,
    "phi": _phi,
    "phi3": _phi3,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2_vl_text": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo2": olmo2,
    "olmo3": _olmo3,
    "glm": glm,
    "glm4": _glm4,
    "smollm3": _smollm3,
    "granite": llama,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "nemotron": _nemotron,
    "ernie4_5": ernie,
    "seed_oss": _seed_oss,
    "hunyuan_v1_dense": _hunyuan,
    "exaone4": _exaone4,
}
