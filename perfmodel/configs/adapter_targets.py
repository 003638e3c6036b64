"""Target modules of adapters in the notation of frameworks: names, wildcards and regular expressions over module paths.

PEFT matches a list of names with the end of a module's path, and a string with the whole path (`re.fullmatch`). NeMo Automodel's names may
contain `*`. This module matches them with the paths of a layer's linear operators in transformers and Megatron-Core.

Sources: PEFT 0.21 tuners/tuners_utils.py (check_target_module_exists) and utils/constants.py; Automodel
nemo_automodel/components/_peft/module_matcher.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.models import load_model
from perfmodel.workload.training import linear_operators

#: Names of all linear modules.
_ALL = ("all-linear", "all", ".*", "*", "*_proj")
_SIGNS = re.compile(r"[\\()|^$]|\.[*+]|\[(?!['\"])")  # of a regular expression; a list may be written ['a', 'b']
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "model.text_model.", "base_model.model.model.", "")

_QKV = ("self_attn.qkv_proj", "self_attention.query_key_value", "attn.c_attn", "attn.Wqkv", "self_attn.W_pack", "self_attention.linear_qkv")
_GATE_UP = ("mlp.gate_up_proj", "mlp.linear_fc1")
_SHARED = ("mlp.shared_expert", "mlp.shared_experts")
#: Linear operator of a layer -> modules that contain it. The module of any other operator has the operator's name.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("self_attn.q_proj", *_QKV),
    "q_gate_proj": ("self_attn.q_proj", *_QKV),
    "k_proj": ("self_attn.k_proj", *_QKV),
    "v_proj": ("self_attn.v_proj", *_QKV),
    "o_proj": ("self_attn.o_proj", "self_attn.dense", "self_attention.dense", "attn.c_proj", "self_attention.linear_proj"),
    "q_a_proj": ("self_attn.q_a_proj", "self_attention.linear_q_down_proj"),
    "q_b_proj": ("self_attn.q_b_proj", "self_attention.linear_q_up_proj"),
    "kv_a_proj": ("self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj"),
    "kv_b_proj": ("self_attn.kv_b_proj", "self_attention.linear_kv_up_proj"),
    "gate_proj": ("mlp.gate_proj", "mlp.w1", *_GATE_UP),
    "up_proj": ("mlp.up_proj", "mlp.w3", "mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h", *_GATE_UP),
    "down_proj": ("mlp.down_proj", "mlp.w2", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.linear_fc2"),
    "shared_gate_proj": tuple(f"{shared}.{name}" for shared in _SHARED for name in ("gate_proj", "linear_fc1")),
    "shared_up_proj": tuple(f"{shared}.{name}" for shared in _SHARED for name in ("up_proj", "linear_fc1")),
    "shared_down_proj": tuple(f"{shared}.{name}" for shared in _SHARED for name in ("down_proj", "linear_fc2")),
    "experts_up": ("mlp.experts.gate_up_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.linear_fc1"),
    "experts_down": ("mlp.experts.down_proj", "mlp.experts.0.down_proj", "mlp.experts.linear_fc2"),
    "in_proj_qkvz": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "in_proj_ba": ("linear_attn.in_proj_ba", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "out_proj": ("linear_attn.out_proj", "mixer.out_proj"),
    "in_proj": ("mixer.in_proj",),
}
#: model_type -> default target modules of PEFT.
_PEFT_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "llama4", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    **dict.fromkeys(("opt", "gptj", "stablelm"), ("q_proj", "v_proj")),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon"), ("query_key_value",)),
    "gpt2": ("c_attn",),
    "mpt": ("Wqkv",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
_USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_targets(modules: object, model: object = None) -> list[str] | None:
    """Return the linear operators of a framework's list of target modules; None for all linear operators.

    modules   a list, names with commas, or one regular expression
    model     name, path or model that has the modules; for an unknown model the usual operators of a layer are taken

    Modules of vision towers, embeddings and routers are left out. A list without matches is returned unchanged, and the job refuses it.
    """
    if isinstance(modules, str) and _SIGNS.search(modules) and modules not in _ALL:
        targets, is_expression = [modules], True
    else:
        targets, is_expression = _names(modules), False
    if any(target in _ALL for target in targets):
        return None
    operators, num_layers = _operators(model)
    names = [name for target in targets for name in operators if _matches(target, name, num_layers, is_expression=is_expression)]
    return list(dict.fromkeys(names)) or targets


def peft_targets(model: object) -> list[str] | None:
    """Return the default target modules of PEFT; None for models without a default."""
    config = _model_config(model)
    return None if config is None else list(_PEFT_DEFAULTS.get(config.architecture, ())) or None


def _names(modules: object) -> list[str]:
    entries: Sequence[Any] = modules if isinstance(modules, list) else re.split(r"[,+\s]+", str(modules).strip("[] "))
    return [str(entry).strip("'\" ") for entry in entries if str(entry).strip("'\" ")]


def _operators(model: object) -> tuple[tuple[str, ...], int]:
    """Return the linear operators of a model's layer, and its number of layers."""
    config = _model_config(model)
    return (_USUAL, 1) if config is None else (linear_operators(config), config.num_hidden_layers)


def _model_config(model: object) -> TransformerConfig | None:
    try:
        return model if isinstance(model, TransformerConfig) else load_model(str(model))
    except InputError:
        return None


def _matches(target: str, operator: str, num_layers: int, *, is_expression: bool) -> bool:
    if is_expression:
        try:
            return any(re.fullmatch(target, path) for path in _paths(operator, num_layers))
        except re.error:
            return False
    if target == operator:
        return True
    if "experts" in operator and "experts" not in target:
        return False  # the tensor of all experts is a parameter, not a module: only its own name matches
    if "*" in target:  # a pattern for modules without fused products: *up_proj does not match gate_up_proj
        return fnmatchcase(next(_paths(operator, 1)), target)
    return any(path.endswith(f".{target}") for path in _paths(operator, 1))


def _paths(operator: str, num_layers: int) -> Iterator[str]:
    for module in _MODULES.get(operator, (operator,)):
        for layer in range(num_layers):
            yield from (f"{prefix}layers.{layer}.{module}" for prefix in _PREFIXES)
