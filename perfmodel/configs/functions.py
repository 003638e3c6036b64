"""Functions in expressions of the config tables: models by name, and the notation of frameworks for stages and adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfmodel.configs.adapter_targets import adapter_targets, peft_targets
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.layout import shorter_ends_stage_layers
from perfmodel.workload.models import list_models, load_model


def _shipped(*parts: Any) -> str | None:
    """Return the shipped model with the name of these parts; of a path the last component counts."""
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in list_models()}
    text = "".join(str(part).rstrip("/").rpartition("/")[2] for part in parts if part is not None).lower()
    text = re.sub(r"[^a-z0-9]", "", text)
    while text not in known:
        shorter = re.sub(r"(hf|instruct|base|chat|thinking|fp8|bf16|fp16|25\d\d|v01|it|pt)$", "", text)
        shorter = re.sub(r"^meta(?=llama)", "", shorter) if shorter == text else shorter
        if shorter == text:
            return None
        text = shorter
    return known[text]


def _hub(name: object) -> str | None:
    """Return a hub id or path unchanged if its model is known; else the shipped model of this name, if there is one."""
    text = str(name)
    try:
        load_model(text)
    except InputError:
        return _shipped(text) or text
    return text


def _first_group(pattern: str, text: object) -> str | None:
    """Return the first group of a pattern in a text."""
    match = re.search(pattern, str(text), re.IGNORECASE)
    return match[1] if match else None


def _layout(text: str) -> list[int]:
    """Return the layers of each stage of Megatron's layout: `Et*7|t*9|t*9|t*7L`."""
    expanded = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), text)
    expanded = re.sub(r"([a-zA-Z])\*(\d{1,4})", lambda match: match[1] * int(match[2]), expanded)
    return [stage.count("t") for stage in expanded.split("|")]


def _megatron_layout(stage_layers: Sequence[int]) -> str:
    """Return Megatron's layout of stages: `Et*7|t*9|t*7L`."""
    stages = [f"t*{count}" if count else "" for count in stage_layers]
    return f"E{'|'.join(stages)}L"


def _module_layers(names: object) -> list[int] | None:
    """Return the layers of each stage of torchtitan's module_fqns_per_model_part."""
    if not isinstance(names, list) or not all(isinstance(stage, list) for stage in names):
        return None
    return [sum(str(name).startswith("layers.") for name in stage) for stage in names]


def _module_names(stage_layers: Sequence[int], head: str = "output") -> list[list[str]]:
    """Return torchtitan's modules of each stage: embedding first, norm and head last."""
    modules: list[list[str]] = []
    layer = 0
    for count in stage_layers:
        modules.append([f"layers.{index}" for index in range(layer, layer + count)])
        layer += count
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", head]
    return modules


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "max": max,
    "int": int,
    "len": len,
    "text": str,
    "lower": lambda text: None if text is None else str(text).lower(),
    "split": lambda text: str(text).strip("[]").replace("+", ",").split(",") if not isinstance(text, list) else text,
    "joined": lambda separator, items: separator.join(map(str, items)),
    "list_of": lambda count, item: [item] * min(count, 4096),
    "found": _first_group,
    "shipped": _shipped,
    "hub": _hub,
    "layout": _layout,
    "megatron_layout": _megatron_layout,
    "module_layers": _module_layers,
    "module_names": _module_names,
    "split_with_ends": lambda layers, stages: list(shorter_ends_stage_layers(layers, stages)),
    "adapter_targets": adapter_targets,
    "peft_targets": peft_targets,
}
