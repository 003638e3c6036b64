"""What each Hugging Face family writes into its `config.json`, and what it leaves to its code.

One function for each family says which keys it reads and what the family fixes. A size that the file leaves out is an error; the
one exception is the `text_config` of a vision-language model, which Hugging Face writes without the values that equal its class's defaults.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import InputError, bad_field
from perfmodel.workload.config import Activation, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """The keys of a config, read with their type checked. A JSON null is a key that is not there, as in Hugging Face's classes."""

    data: Mapping[str, Any]
    model_type: str
    defaults: Mapping[str, int]

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def count(self, *keys: str, default: int | None = None) -> int:
        """A size; later keys are older names of the first, and all that are there must agree."""
        found = {key: _whole(key, self.data[key]) for key in keys if self.has(key)}
        if len(set(found.values())) > 1:
            (first, value), (other, another) = list(found.items())[:2]
            raise bad_field(first, value, f"contradicts {other}={another}", "keep one of the two")
        if found:
            return next(iter(found.values()))
        if default is None:
            default = self.defaults.get(keys[0])
        if default is None:
            raise InputError(f"{keys[0]}: is missing, and model_type={self.model_type} needs it; add it to the config")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_field(key, printable(value), "must be true or false", "write one of them")
        return value

    def share(self, key: str, *, default: float = 0.0) -> float:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise bad_field(key, printable(value), "must be a share from 0 to below 1", "correct it in the config")
        return float(value)

    def activation(self, *keys: str, default: str) -> Activation:
        key = next((key for key in keys if self.has(key)), keys[0])
        value = self.data.get(key) if self.has(key) else default
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise bad_field(key, printable(value), "this activation is not modelled", f"known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def must_be(self, key: str, expected: object, lacking: str) -> None:
        """A switch that selects a variant which is not modelled."""
        value = self.data.get(key)
        if value is not None and value != expected:
            raise bad_field(key, printable(value), f"{lacking} not modelled yet", f"only {key}={json.dumps(expected)} is")


_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def _whole(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_field(key, printable(value), "must be a whole number", "correct it in the config")
    return value


# --- the families ---

Values = dict[str, Any]


def _sizes(fields: ConfigFields, *, kv_default: bool, head_dim_required: bool = False) -> Values:
    """The sizes under their usual names. Without head_dim the heads share out the hidden size."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    values = {
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("num_key_value_heads", default=heads if kv_default else None),
        "intermediate_size": fields.count("intermediate_size"),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings"),
    }
    if fields.has("head_dim") or head_dim_required:
        values["head_dim"] = fields.count("head_dim")
    else:
        values["head_dim"] = fields.defaults.get("head_dim") or _head_dim(hidden, heads)
    return values


def _head_dim(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise bad_field("num_attention_heads", printable(heads), f"must divide hidden_size={printable(hidden)}", "or give head_dim")
    return hidden // heads


def _gpt2(fields: ConfigFields) -> Values:
    hidden, heads = fields.count("n_embd", "hidden_size"), fields.count("n_head", "num_attention_heads")
    return {
        "num_hidden_layers": fields.count("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _head_dim(hidden, heads),
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
    """Our own: a GPT of Megatron-LM under Hugging Face's names; the vocabulary is the padded one."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    return {
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("num_key_value_heads", default=heads),
        "head_dim": fields.count("head_dim") if fields.has("head_dim") else _head_dim(hidden, heads),
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
        "head_dim": _head_dim(hidden, heads),
        "intermediate_size": fields.count("ffn_dim"),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings"),
        "position_offset": 2,  # modeling_opt.py: the first two rows of the table are never read
        "activation": fields.activation("activation_function", default="relu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "dropout": fields.share("dropout", default=0.1),
        **_GPT,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }


def _gpt_neox(fields: ConfigFields) -> Values:
    values = _sizes(fields, kv_default=True)
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
    if new_block:  # 40B and later: groups of heads; two norms unless num_ln_in_parallel_attn says one
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
        "head_dim": _head_dim(hidden, heads),
        "intermediate_size": fields.count("ffn_hidden_size", default=4 * hidden),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings", default=2048),  # the class's; ALiBi and rotary have no table
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
    """phi-1, 1.5 and 2: a parallel block with one norm, partial rotary positions, a bias even on the logits."""
    return {
        **_sizes(fields, kv_default=True),
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


#: Llama's block: gated MLP, RMSNorm, rotary positions, no bias anywhere.
_LLAMA: Values = {
    "gated_mlp": True,
    "norm": "rmsnorm",
    "position": "rotary",
    "qkv_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}


def _llama(fields: ConfigFields) -> Values:
    bias = fields.flag("attention_bias", default=False)
    return {
        **_sizes(fields, kv_default=True),
        **_LLAMA,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", default=False),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _mistral(fields: ConfigFields) -> Values:
    return {
        **_sizes(fields, kv_default=False),
        **_LLAMA,
        **_window(fields, used=fields.has("sliding_window") or bool(fields.defaults), every=0),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _phi3(fields: ConfigFields) -> Values:
    return {
        **_sizes(fields, kv_default=True),
        **_LLAMA,
        **_window(fields, used=fields.has("sliding_window"), every=0),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dropout": fields.share("resid_pdrop"),
    }


def _qwen2(fields: ConfigFields) -> Values:
    return {
        **_sizes(fields, kv_default=False),
        **_LLAMA,
        **_qwen_window(fields),
        "qkv_bias": True,
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _qwen3(fields: ConfigFields) -> Values:
    bias = fields.flag("attention_bias", default=False)
    return {
        **_sizes(fields, kv_default=False, head_dim_required=True),
        **_LLAMA,
        **_qwen_window(fields),
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
    }


def _gemma(fields: ConfigFields) -> Values:
    # hidden_act of the first Gemma configs says "gelu", but the model runs the tanh form unless hidden_activation is set.
    bias = fields.flag("attention_bias", default=False)
    return {
        **_sizes(fields, kv_default=False, head_dim_required=True),
        **_LLAMA,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "activation": fields.activation("hidden_activation", default="gelu_pytorch_tanh"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
    }


def _gemma2(fields: ConfigFields) -> Values:
    return {**_gemma(fields), **_window(fields, used=True, every=2), "sandwich_norm": True}


def _gemma3(fields: ConfigFields) -> Values:
    every = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return {**_gemma(fields), **_window(fields, used=True, every=every), "sandwich_norm": True, "qk_norm": True}


def _qwen_window(fields: ConfigFields) -> Values:
    """Qwen cuts the attention of the layers from `max_window_layers` on, if at all."""
    used = fields.flag("use_sliding_window", default=False)
    if used and not fields.has("layer_types") and fields.has("sliding_window"):
        first, layers = fields.count("max_window_layers", default=28), fields.count("num_hidden_layers")
        if 0 < first < layers:
            rule = f"layers 0 to {printable(first - 1)} ignore the window and the others do not, which is not modelled"
            raise bad_field("max_window_layers", printable(first), rule, "set use_sliding_window=false")
        used = first <= 0
    return _window(fields, used=used, every=0)


def _window(fields: ConfigFields, *, used: bool, every: int) -> Values:
    """The window, and every how many layers one ignores it; `layer_types`, where there, says it layer by layer."""
    switched_off = "sliding_window" in fields.data and not fields.has("sliding_window")  # null
    window = fields.count("sliding_window") if used and not switched_off else 0
    kinds = fields.data.get("layer_types")
    if kinds is None or not window:
        return {"sliding_window": window, "full_attention_every": every if window else 0}
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, (list, tuple)) or not kinds or any(not isinstance(kind, str) or kind not in known for kind in kinds):
        raise bad_field("layer_types", printable(kinds), f"must list {' or '.join(known)} for every layer", "other kinds are not modelled")
    full = [kind == "full_attention" for kind in kinds]
    if all(full):
        return {"sliding_window": 0, "full_attention_every": 0}
    every = full.index(True) + 1 if any(full) else 0
    repeats = all(is_full == (every > 0 and (i + 1) % every == 0) for i, is_full in enumerate(full))
    if not repeats or len(full) != fields.count("num_hidden_layers"):
        rule = "must have one entry a layer and repeat every so many layers"
        raise bad_field("layer_types", printable(kinds), rule, "other orders are not modelled")
    return {"sliding_window": window, "full_attention_every": every}


FAMILIES: Mapping[str, Callable[[ConfigFields], Values]] = {
    "gpt2": _gpt2,
    "megatron": _megatron,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "phi": _phi,
    "phi3": _phi3,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2_vl_text": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen3": _qwen3,
    "qwen3_vl_text": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}

_DEFAULTED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)


def _class_defaults(row: str) -> Mapping[str, int]:
    return {key: int(value) for key, value in zip(_DEFAULTED, row.split(), strict=True) if value != "-"}


#: Defaults of the configuration classes of transformers 5.23, for nested configs only.
CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": _class_defaults("32000 4096 11008 32 32 32 - 2048 -"),
    "mistral": _class_defaults("32000 4096 14336 32 32 8 - 131072 4096"),
    "qwen2": _class_defaults("151936 4096 22016 32 32 32 - 32768 4096"),
    "qwen2_vl_text": _class_defaults("152064 8192 29568 80 64 8 - 32768 4096"),
    "qwen2_5_vl_text": _class_defaults("152064 8192 29568 80 64 8 - 32768 4096"),
    "qwen3": _class_defaults("151936 4096 22016 32 32 32 128 32768 4096"),
    "qwen3_vl_text": _class_defaults("151936 4096 22016 32 32 32 128 128000 4096"),
    "gemma": _class_defaults("256000 3072 24576 28 16 16 256 8192 -"),
    "gemma2": _class_defaults("256000 2304 9216 26 8 4 256 8192 4096"),
    "gemma3_text": _class_defaults("262208 2304 9216 26 8 4 256 131072 4096"),
}
