"""Settings of published runs in the words of their sources, as the settings that they are (docs/settings.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.context_forms import ULYSSES, ZIGZAG, rules_of_form
from perfmodel.parallel.loss_forms import CHUNKED_LOSS, FUSED_LOSS, WHOLE_LOSS


def _offloaded(value: object) -> object:
    """Whether checkpoints are offloaded to the host; None if not stated."""
    return True if isinstance(value, str) and re.search("offload|host|cpu", value.lower()) else None


def _loss(value: object) -> object:
    text = re.sub("[^a-z]", "", value.lower()) if isinstance(value, str) else ""
    if "liger" in text or "fusedlinear" in text or "cutcrossentropy" in text:
        return FUSED_LOSS
    if "chunk" in text:
        return CHUNKED_LOSS
    return WHOLE_LOSS if text in ("fulllogits", "nll") else value


def _kernel(value: object) -> object:
    """`sdpa, cuDNN` is what torch's scaled_dot_product_attention chose."""
    return re.sub(r"^sdpa\W+", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value


def _fused_if(value: object) -> object:
    return FUSED_LOSS if value is True else WHOLE_LOSS if value is False else None


def _parameters(value: object) -> object:
    """`{params: cpu}`."""
    return True if isinstance(value, Mapping) and value.get("params") == "cpu" else None


def _form(value: object) -> object:
    """`ring (torch)` is what torch calls keys that are gathered: its ring says nothing of who has which positions."""
    return ULYSSES if isinstance(value, str) and value.lower().startswith(ULYSSES) else None


def _as_it_is(value: object) -> object:
    return value


#: What sources call a setting -> its name, and its value in our words; None: it says nothing of it.
WORDS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "context_parallel": ("cp_form", _form),
    "loss": ("loss", _loss),
    "attention_kernel": ("attention_kernel", _kernel),
    "activation_checkpointing_offload": ("checkpoint_offload", _as_it_is),
    "gradient_checkpointing": ("checkpoint_offload", _offloaded),
    "param_offload": ("parameter_offload", _as_it_is),
    "liger": ("loss", _fused_if),
    "fused_loss": ("fused_cross_entropy", _as_it_is),
    "offload": ("parameter_offload", _parameters),
    "activations_offload": ("activation_offload", _as_it_is),
}


#: What is no setting of a profile, and read all the same (`fine_tuning.py`, `case_plan.py`).
READ_APART = frozenset({"base_weights", "base_format", "pure_bf16", "device_map"})


def settings_of_case(settings: object) -> dict[str, Any]:
    """The settings of a run under their own names; what is stated under its own name wins."""
    given = settings if isinstance(settings, Mapping) else {}
    found = {name: value for name, value in given.items() if name not in WORDS}
    for name, value in given.items():
        if name in WORDS:
            ours, read = WORDS[name]
            if (known := read(value)) is not None:
                found.setdefault(ours, known)
    return found


def context_of_case(
    profile: ExecutionProfile, *, cp: int, tp: int, num_key_value_heads: int, assumed: list[str]
) -> tuple[ExecutionProfile, str | None]:
    """The profile of a run that states a form of context parallelism, and the rule set of that form; None: the usual one.

    Ulysses over more ranks than there are key-value heads copies these, which no rule set does: it is taken for a balanced ring.
    """
    rules = rules_of_form(profile.communication.context_form, cp=cp, tp=tp)
    if rules is not None and num_key_value_heads % (cp * tp):
        assumed.append("cp_form")
        return with_settings(profile, {"cp_form": ZIGZAG}), None
    return profile, rules
