"""Settings of published runs, converted from the spellings of their sources to setting names (docs/settings.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.choices import CHUNKED_LOSS, FUSED_LOSS, ULYSSES, WHOLE_LOSS, ZIGZAG, rules_of_form
from perfmodel.parallel.framework_ref import passed_over


def _offloaded(value: object) -> object:
    """Return whether checkpoints are offloaded to the host; None if not stated."""
    return True if isinstance(value, str) and re.search("offload|host|cpu", value.lower()) else None


def _loss(value: object) -> object:
    text = re.sub("[^a-z]", "", value.lower()) if isinstance(value, str) else ""
    if "liger" in text or "fusedlinear" in text or "cutcrossentropy" in text:
        return FUSED_LOSS
    if "chunk" in text:
        return CHUNKED_LOSS
    return WHOLE_LOSS if text in ("fulllogits", "nll") else value


def _kernel(value: object) -> object:
    """Return the kernel without the prefix in `sdpa, cuDNN`: the backend that torch's scaled_dot_product_attention chose."""
    return re.sub(r"^sdpa\W+", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value


def _form(value: object) -> object:
    """Return the form of context parallelism; None if it is unknown.

    `ring (torch)` is torch's name for an all-gather of keys and values: it does not determine the distribution of positions.
    """
    return ULYSSES if isinstance(value, str) and value.lower().startswith(ULYSSES) else None


def _unchanged(value: object) -> object:
    return value


#: Setting of a source -> (setting name, conversion of its value, which returns None for a value without information).
SPELLINGS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "context_parallel": ("cp_form", _form),
    "loss": ("loss", _loss),
    "attention_kernel": ("attention_kernel", _kernel),
    "activation_checkpointing_offload": ("checkpoint_offload", _unchanged),
    "gradient_checkpointing": ("checkpoint_offload", _offloaded),
    "param_offload": ("parameter_offload", _unchanged),
    "liger": ("loss", lambda value: FUSED_LOSS if value is True else WHOLE_LOSS if value is False else None),
    "fused_loss": ("fused_cross_entropy", _unchanged),
    "offload": ("parameter_offload", lambda value: True if isinstance(value, Mapping) and value.get("params") == "cpu" else None),
    "activations_offload": ("activation_offload", _unchanged),
}


#: Settings that are no option of a profile, and are read elsewhere (`fine_tuning.py`, `case_plan.py`).
READ_APART = frozenset({"base_weights", "base_format", "pure_bf16", "device_map"})


def settings_passed_over(inputs: Mapping[str, Any]) -> list[str]:
    """Return the stated settings that are not read."""
    return [name for name in passed_over(settings_of_case(inputs.get("settings"))) if name not in READ_APART]


def settings_of_case(settings: object) -> dict[str, Any]:
    """Return the settings of a run by their setting names; one that is stated by its setting name takes precedence."""
    given = settings if isinstance(settings, Mapping) else {}
    canonical = {name: value for name, value in given.items() if name not in SPELLINGS}
    for name, value in given.items():
        if name in SPELLINGS:
            setting, read = SPELLINGS[name]
            if (known := read(value)) is not None:
                canonical.setdefault(setting, known)
    return canonical


def context_of_case(
    profile: ExecutionProfile, *, cp: int, tp: int, num_key_value_heads: int, assumed: list[str]
) -> tuple[ExecutionProfile, str | None]:
    """Return the profile of a run that states a form of context parallelism, and the rule set of that form; None: the default rule set.

    Ulysses over more ranks than key-value heads replicates these heads, which no rule set does: it is predicted as a balanced ring.
    """
    rules = rules_of_form(profile.communication.context_form, cp=cp, tp=tp)
    if rules is not None and num_key_value_heads % (cp * tp):
        assumed.append("cp_form")
        return with_settings(profile, {"cp_form": ZIGZAG}), None
    return profile, rules
