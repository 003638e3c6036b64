"""Modules that can be recomputed by name, as in Megatron-LM's --recompute-modules, and their operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.foundation.errors import bad_field, shown, suggest
from perfmodel.foundation.values import several
from perfmodel.workload.config import TransformerConfig

_EXPERTS = ("permute", "sort", "experts_up", "experts_activation", "experts_down", "unsort", "unpermute")

#: Module -> operators that backward recomputes. Their outputs are not saved; the inputs of the first one are.
MODULES: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("attention_core",),
    "layernorm": ("attention_norm", "mlp_norm", "q_a_norm", "kv_a_norm"),
    "mla_up_proj": ("q_b_proj", "q_rotary", "kv_b_proj", "nope_key", "keys", "value", "values"),
    "mlp": ("gate_proj", "up_proj", "activation", "gate_product"),
    "moe_act": ("experts_activation",),
    "moe": ("router", "route", *_EXPERTS),
}


def read_modules(value: object, name: str) -> tuple[str, ...]:
    """Return the named modules, from a list or a text with commas."""
    names = several(value) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(module, str) for module in names):
        raise bad_field(name, shown(value), "must name modules", f"use some of {', '.join(MODULES)}")
    for module in names:
        if module not in MODULES:
            rule = f"is no module that can be recomputed{suggest(module, MODULES)}"
            raise bad_field(name, shown(module), rule, f"use some of {', '.join(MODULES)}")
    return tuple(module for module in MODULES if module in names)


def lacking(operators: Sequence[str], model: TransformerConfig) -> str:
    """Return a requested module that no layer of the model has; "" if there is none."""
    has = {
        "mla_up_proj": model.parts.latent is not None,
        "mlp": any(kind.feed_forward == "dense" for kind in model.layer_kinds),
        **dict.fromkeys(("moe_act", "moe"), model.parts.experts is not None),
    }
    return next((name for name, is_present in has.items() if not is_present and set(MODULES[name]) <= set(operators)), "")


def useful_lists(model: TransformerConfig) -> tuple[tuple[str, ...], ...]:
    """Return the modules that a search tries, of models with experts or latents: cheap to recompute and large to save."""
    if model.parts.experts is None and model.parts.latent is None:
        return ()
    names = ["layernorm"] + ["mla_up_proj"] * (model.parts.latent is not None) + ["moe_act"] * (model.parts.experts is not None)
    return (tuple(names),)


def recompute_words(recompute: str, operators: Sequence[str]) -> str:
    """Return recomputation as text: the modules by name, unless it is the core of attention alone."""
    names = [name for name, parts in MODULES.items() if set(parts) <= set(operators)]
    return "+".join(names) if recompute == "selective" and names != ["core_attn"] and names else recompute


def operators_of(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the operators of these modules."""
    return tuple(operator for module in modules for operator in MODULES[module])
