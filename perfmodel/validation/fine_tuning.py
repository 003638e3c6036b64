"""Fine-tuning of a published run: method, adapters, format of the base model and optimizer, as its source states them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.validation.fields import optional_count, stated_count
from perfmodel.workload.base_formats import BASE_FORMATS
from perfmodel.workload.job import Optimizer
from perfmodel.workload.training import DEFAULT_BASE, FULL_TRAINING, Method, Training


@cache
def _words() -> Mapping[str, Any]:
    return read_yaml(resource_dir("strategies") / "fine_tuning_words.yaml")


def states_training(inputs: Mapping[str, Any]) -> bool:
    """Return whether a run states its training method."""
    return inputs.get("train") is not None or bool(_method(inputs))


def _method(inputs: Mapping[str, Any]) -> str:
    """Return the method that a run names; LoRA if it describes adapters without a method, empty if it states neither."""
    value = inputs.get("method")
    if isinstance(value, str):
        return value.lower()
    return str(Method.LORA) if inputs.get("lora") is not None else ""


def trains_adapters(inputs: Mapping[str, Any]) -> bool:
    """Return whether a run states that it trains adapters only."""
    value = inputs.get("train")
    if value is not None:
        return value != str(Method.FULL)
    return any(word in _method(inputs) for word in ("lora", "dora"))


def stated_training(inputs: Mapping[str, Any]) -> Training:
    """Return the training of `method`, `lora` and `settings.base_weights`. Raises InputError if it is not predicted."""
    modality = inputs.get("modality")
    if modality not in (None, "text"):
        raise bad_field("modality", one_line(modality, 40), "is not modelled", "give runs over text")
    method = _method(inputs) or str(Method.FULL)
    words = set(re.findall(r"[a-z0-9_]+", method))
    for name, reason in _words()["not_predicted"].items():
        if name in words:
            raise bad_field("method", one_line(method, 40), f"{reason}, which is not predicted", "give full, lora or qlora")
    for name in _words()["other_adapters"]:
        if name in words:
            raise bad_field("method", one_line(method, 40), "adapters of this form are not modelled", "give lora or qlora")
    if not words & {*Method} - {Method.FULL}:
        return FULL_TRAINING
    fields, settings = inputs.get("lora") or {}, inputs.get("settings") or {}
    stated = str(settings.get("base_weights") or settings.get("base_format") or "").lower()
    base = ""  # the frozen weights have the format of the computation
    if stated and stated not in ("bf16", "fp16", "16-bit"):
        base = next((name for name in _words()["bases"] if name in stated), "")
        if not base:
            raise bad_field("settings.base_weights", one_line(stated, 40), "is not known", f"use {', '.join(BASE_FORMATS)}")
    elif fields.get("base_bits") == 8:
        base = "int8"
    elif words & {Method.QLORA, Method.QDORA} or fields.get("base_bits") == 4:
        base = DEFAULT_BASE
    plain, quantized = (Method.DORA, Method.QDORA) if words & {Method.DORA, Method.QDORA} else (Method.LORA, Method.QLORA)
    return Training(
        method=quantized if base else plain,
        rank=optional_count(fields, "r") or stated_count(fields, "rank", default=16),
        targets=_targets(fields.get("targets")),
        num_adapters=stated_count(fields, "adapters", default=1),
        base=base,
    )


def _targets(value: object) -> tuple[str, ...]:
    """Return linear operators from a free-form list of targets; empty: all of them."""
    text = (" ".join(map(str, value)) if isinstance(value, list) else str(value or "")).lower()
    words = re.findall(r"[a-z_]+", text)
    if not words or "all" in words:
        return ()
    named = [name for word in words for name in _words()["targets"].get(word, ())]
    # "attention q, v" names operators of attention, "attention" alone is all of them
    if "attention" in words and not any(name in ("q_proj", "k_proj", "v_proj", "o_proj") for name in named):
        named.append("attention")
    if not named:
        rule = "names no linear operator that is known here"
        raise bad_field("lora.targets", one_line(text, 60), rule, "name attention, mlp, experts or operators such as q_proj")
    return tuple(dict.fromkeys(named))


def stated_optimizer(inputs: Mapping[str, Any]) -> Optimizer | None:
    """Return the optimizer that a run names; None: it names none."""
    value = inputs.get("optimizer")
    if value is None:
        return None
    text = str(value).lower()
    if "host" in text or "offload" in text:
        raise bad_field("optimizer", one_line(text, 40), "is not modelled on the host", "give runs with the optimizer on the chip")
    optimizer = next((candidate for name, candidate in _words()["optimizers"].items() if name in text), None)
    if optimizer is None:
        raise InputError(f"optimizer={one_line(text, 40)}: is not modelled; give one of {', '.join(Optimizer)}")
    return Optimizer(optimizer)
