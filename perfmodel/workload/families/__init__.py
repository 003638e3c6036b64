"""Hugging Face model families: the keys of their `config.json`, and constants of their code.

One function per family reads its keys and adds its constants. A missing size is an error. The exception is the `text_config` of a
vision-language model: Hugging Face omits values there that equal the class defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perfmodel.workload.config_fields import ConfigFields, Values
from perfmodel.workload.families.dense import DENSE
from perfmodel.workload.families.experts import EXPERTS
from perfmodel.workload.families.hybrid import HYBRID
from perfmodel.workload.families.latent import LATENT

FAMILIES: Mapping[str, Callable[[ConfigFields], Values]] = {**DENSE, **EXPERTS, **LATENT, **HYBRID}

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


_LINEAR_ATTENTION = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip

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
    "llama4_text": {
        **_class_defaults("202048 5120 8192 48 40 8 128 131072 -"),
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
    },
    "qwen3_5_text": {**_class_defaults("248320 4096 12288 32 16 4 256 32768 -"), **_LINEAR_ATTENTION},
    "qwen3_5_moe_text": {
        **_class_defaults("248320 2048 - 40 16 2 256 32768 -"),
        **_LINEAR_ATTENTION,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
}
