"""Read a Hugging Face `config.json` into a `TransformerConfig`, without `transformers`.

This file selects the language-model part of the config, refuses unsupported models and names missing parts; `families` reads the keys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.files import listed, read_text
from perfmodel.foundation.session import session_cache
from perfmodel.workload.config import TransformerConfig, printable
from perfmodel.workload.config_fields import ConfigFields
from perfmodel.workload.families import CLASS_DEFAULTS, FAMILIES
from perfmodel.workload.families.dense import DENSE
from perfmodel.workload.families.latent import LATENT, WITH_INDEXER
from perfmodel.workload.imported.decoder import decoder_of, is_saved_graph, read_graph


def read_config(source: Mapping[str, Any] | str | Path, *, name: str = "") -> TransformerConfig:
    """Return the model of a `config.json`, given as its contents, its path or its folder. Also reads the decoder in a file that `perfmodel
    import --save` wrote."""
    if not isinstance(source, (str, Path)):
        return _model_of(source, "config", name)
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: cannot be read ({reason}); give a config.json or the folder that holds it") from None
    text = read_text(path, "config.json or of the folder that holds it")
    return _config_of(text, str(path), name or (path.parent.resolve().name if path.name == "config.json" else path.stem))


@session_cache(maxsize=32)
def _config_of(text: str, path: str, name: str) -> TransformerConfig:
    """Return the model of a file's text; cached, because every prediction reads the same few files."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); give a Hugging Face config.json") from None
    return _model_of(data, path, name)


def _model_of(data: object, origin: str, name: str) -> TransformerConfig:
    if not isinstance(data, Mapping):
        raise InputError(f"{origin}: must be a JSON object of fields, not {type(data).__name__}; give a Hugging Face config.json")
    if is_saved_graph(data):
        return decoder_of(read_graph(data, where=origin), name=name)
    left_out = " and ".join(part for key, part in _TOWERS.items() if isinstance(data.get(key), Mapping) and data[key])
    nested = data.get("text_config")
    if isinstance(nested, Mapping):  # a vision-language model: only its language model is modelled
        text = dict(nested)
        text.setdefault("tie_word_embeddings", data.get("tie_word_embeddings"))
        text.setdefault("model_type", _TEXT_MODEL_TYPE.get(_text(data, "model_type")))
        model_type = _model_type(text)
        fields = ConfigFields(data=text, model_type=model_type, defaults=CLASS_DEFAULTS.get(model_type, {}))
    else:
        full_type = _text(data, "model_type")  # older Qwen files have no text_config: the language model's keys are next to the tower's
        model_type = _TEXT_MODEL_TYPE[full_type] if left_out and full_type in _TEXT_MODEL_TYPE else _model_type(data)
        fields = ConfigFields(data=data, model_type=model_type, defaults={})
    _refuse(fields)
    try:
        values = FAMILIES[model_type](fields)
    except InputError:
        if not fields.faults:  # otherwise a placeholder may have caused it
            raise
    if fields.faults:
        raise InputError(listed(list(dict.fromkeys(fields.faults))))
    called = name or _text(data, "_name_or_path").rstrip("/").rpartition("/")[2] or model_type
    return TransformerConfig.of(name=called, architecture=model_type, left_out=left_out, source=_text(data, "_source") or origin, **values)


#: Parts of a model other than the language model, by key.
VISION_TOWER = "its vision tower"
_TOWERS: Mapping[str, str] = {"vision_config": VISION_TOWER, "audio_config": "its audio tower"}


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


# --- unsupported configs ------------------------------------------------------------------------------------------------

_MOE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_ENCODER = "an encoder (attention in both directions, another loss)"
_ENCODER_DECODER = "an encoder with cross-attention to the decoder"
_RECURRENT = "recurrent layers of another kind than Mamba-2 (nemotron_h) and gated delta rules (qwen3_next)"
_MAMBA_1 = "Mamba-1 layers (Mamba-2, as in nemotron_h, is modelled)"
_MAMBA_2 = "Mamba-2 layers in another arrangement than nemotron_h"
_CROSS = "cross-attention to images"

#: Prefixes of `model_type`; the longest match counts.
_UNSUPPORTED: Mapping[str, str] = {
    "granitemoehybrid": _MAMBA_2,
    "minimax": "lightning attention (attn_type_list)",
    "minimax_m3": "attention to chosen blocks of keys (sparse_attention_config)",
    "ernie4_5_vl": "experts of several widths (moe_intermediate_size as a list)",
    "hunyuan_v1_moe": "experts that differ layer by layer (moe_topk as a list)",
    "longcat": "two attentions in a layer and experts that do nothing (zero_expert_num)",
    "kimi_linear": "Kimi delta attention (linear_attn_config)",
    "bailing": "experts and attention of another arrangement (num_shared_experts, first_k_dense_replace)",
    "mimo_v2": "layers with several numbers of heads (swa_num_key_value_heads)",
    "step3": "experts and attention of another arrangement (share_expert_dim)",
    "deepseek_v4": "compressed attention and several residual streams (compress_ratios, hc_mult)",
    "gemma3n": "several residual streams (altup_num_inputs)",
    "gemma4": "layers with several head dims (global_head_dim)",
    "nemotron-nas": "layers that differ one by one (block_configs)",
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm": _ENCODER,
    "camembert": _ENCODER,
    "distilbert": _ENCODER,
    "albert": _ENCODER,
    "electra": _ENCODER,
    "deberta": _ENCODER,
    "modernbert": _ENCODER,
    "megatron-bert": _ENCODER,
    "mpnet": _ENCODER,
    "vit": _ENCODER,
    "clip": _ENCODER,
    "t5": _ENCODER_DECODER,
    "mt5": _ENCODER_DECODER,
    "umt5": _ENCODER_DECODER,
    "bart": _ENCODER_DECODER,
    "mbart": _ENCODER_DECODER,
    "pegasus": _ENCODER_DECODER,
    "marian": _ENCODER_DECODER,
    "whisper": _ENCODER_DECODER,
    "mamba": _MAMBA_1,
    "mamba2": _MAMBA_2,
    "falcon_mamba": _MAMBA_1,
    "falcon_h1": _MAMBA_2,
    "jamba": _MAMBA_1,
    "zamba": _MAMBA_1,
    "zamba2": _MAMBA_2,
    "bamba": _MAMBA_2,
    "rwkv": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "mllama": _CROSS,
}


def _refuse(fields: ConfigFields) -> None:
    """Refuse keys that change a decoder of a known family into something else."""
    data, family = fields.data, fields.model_type
    for keys, others, above in ((_MOE_KEYS, DENSE, 1), (_MLA_KEYS, [other for other in FAMILIES if other not in LATENT], 0)):
        numbers = [key for key in keys if isinstance(data.get(key), (int, float)) and not isinstance(data[key], bool)]
        given = [key for key in numbers if data[key] > above]
        if family in others and given:
            fields.refuse(given[0], f"model_type={family} has no such key", "name the family that has it, or leave it out")
    if data.get("is_encoder_decoder") is True or data.get("add_cross_attention") is True:
        raise _not_modelled(family, _ENCODER_DECODER)
    for key, lacking in _VARIANTS.items():
        if data.get(key) and not (key == "index_topk" and family in WITH_INDEXER):
            fields.refuse(key, f"{lacking} not modelled yet", "only models without are")


#: Keys of variants that no family supports.
_VARIANTS: Mapping[str, str] = {
    "moe_latent_size": "experts behind a projection of the hidden state are",
    "zero_expert_num": "experts that do nothing are",
    "linear_attn_config": "Kimi delta attention is",
    "sparse_attention_config": "attention to chosen blocks of keys is",
    "index_topk": "an indexer of keys is",
    "compress_ratios": "compressed attention is",
    "hc_mult": "several residual streams are",
    "num_kv_shared_layers": "layers that share keys and values are",
    "hidden_size_per_layer_input": "an embedding for each layer is",
    "swa_num_key_value_heads": "layers with several numbers of heads are",
    "global_head_dim": "layers with several head dims are",
    "block_configs": "layers that differ one by one are",
}


def _not_modelled(model_type: str, lacking: str) -> InputError:
    return bad_field("model_type", model_type, f"needs {lacking}, which perfmodel does not model yet", "give another model")


def _model_type(data: Mapping[str, Any]) -> str:
    value = data.get("model_type")
    if value is None:
        names = data.get("architectures")
        first = names[0] if isinstance(names, (list, tuple)) and names else None
        value = _MODEL_TYPE_OF_CLASS.get(first) if isinstance(first, str) else None
        if value is None and isinstance(data.get("_class_name"), str):
            rule = "is a diffusers config, of a network that is no language model"
            remedy = "`perfmodel shard MODULE:FACTORY` takes any torch module"
            raise bad_field("_class_name", data["_class_name"], rule, remedy)
        if value is None:
            known = f"use one of {', '.join(FAMILIES)}"
            raise InputError(f"model_type: is missing, and architectures does not tell it either; {known}")
    if not isinstance(value, str):
        raise bad_field("model_type", printable(value), "must be a text", "use one of " + ", ".join(FAMILIES))
    if value in FAMILIES:
        return value
    prefix = max((known for known in _UNSUPPORTED if value.startswith(known)), key=len, default="")
    if prefix:
        raise _not_modelled(value, _UNSUPPORTED[prefix])
    raise InputError(f"model_type={value[:80]!r}: there is no reader for this architecture{suggest(value, FAMILIES)}")


_MODEL_TYPE_OF_CLASS: Mapping[str, str] = {
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "GPTNeoXForCausalLM": "gpt_neox",
    "FalconForCausalLM": "falcon",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "DbrxForCausalLM": "dbrx",
    "Grok1ModelForCausalLM": "grok-1",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Qwen3NextForCausalLM": "qwen3_next",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoeForCausalLM": "olmoe",
    "PhimoeForCausalLM": "phimoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "MiniCPM3ForCausalLM": "minicpm3",
    "NemotronForCausalLM": "nemotron",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "SeedOssForCausalLM": "seed_oss",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "Exaone4ForCausalLM": "exaone4",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "BloomForCausalLM": "bloom",
    "GPTJForCausalLM": "gptj",
    "MPTForCausalLM": "mpt",
    "MptForCausalLM": "mpt",
    "Starcoder2ForCausalLM": "starcoder2",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
}

#: Family of the language model in a vision-language model whose `text_config` does not name it.
_TEXT_MODEL_TYPE: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "llava": "llama",
    "llava_next": "llama",
    "idefics3": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "paligemma": "gemma",
}
