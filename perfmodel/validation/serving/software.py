"""Engine and launch options of a published serving run, by `strategies/serving_patterns.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.engine import GENERIC_ENGINE, version_of
from perfmodel.validation.fields import optional_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch options of an engine.

    max_batch, max_tokens   of an attention rank; 0: the engine's defaults
    cache                   replaces the cache's stated dtype; None: as stated
    """

    max_batch: int = 0
    max_tokens: int = 0
    cache: Dtype | None = None


@cache
def _patterns() -> Mapping[str, Any]:
    return read_yaml(resource_dir("strategies") / "serving_patterns.yaml")


def _applies(entry: Mapping[str, Any], chip: str, version: tuple[int, ...]) -> bool:
    """Return whether an entry is of this chip and of this version of the engine; () for an unknown version."""
    since, before = (version_of(entry[name]) if name in entry else limit for name, limit in (("since", ()), ("before", (99,))))
    return chip.startswith(tuple(entry.get("chips", ("",)))) and since <= version < before


def engine_of(framework: object, *, chip: str = "") -> str:
    """Return the name of a profile in `strategies/engines/`; `generic` if no engine is named.

    framework   "vllm 0.10.2", "TensorRT-LLM v0.17 (in-flight batching)", ...
    """
    text = framework.lower()[:200] if isinstance(framework, str) else ""
    for entry in _patterns()["engines"]:
        if re.search(entry["pattern"], text) and _applies(entry, chip, version_of(text)):
            return str(entry["engine"])
    return GENERIC_ENGINE


def launch_of(inputs: Mapping[str, Any], engine: str, chip: str, version: tuple[int, ...]) -> Launch:
    """Return the launch options of the run that `inputs` describe."""
    name = (inputs.get("model") or {}).get("name")
    if inputs.get("input_len_mean") is None or not name:
        return Launch()
    for entry in _patterns()["launches"]:
        if engine == entry["engine"] and name.startswith(entry["model"]) and _applies(entry, chip, version):
            clients = optional_count(inputs, "batch") if entry.get("of_clients") else None
            cache = Dtype(entry["cache"]) if "cache" in entry else None
            return Launch(max_batch=clients or entry.get("max_batch", 0), max_tokens=entry.get("max_tokens", 0), cache=cache)
    return Launch()
