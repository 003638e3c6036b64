"""Defaults of published runs by the name of their framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeDefaults:
    """Recomputation of runs that do not state it in full.

    recompute           if the run states none
    selective           operators that "selective" recomputation runs again; selective_sharded: of runs under ZeRO 3, if different
    """

    recompute: str = "none"
    selective: tuple[str, ...] = ("attention_core",)
    selective_sharded: tuple[str, ...] = ()

    def operators(self, zero: int) -> tuple[str, ...]:
        """Return the operators that "selective" recomputation runs again under a ZeRO stage."""
        return (self.selective_sharded if zero == 3 else ()) or self.selective


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Meaning of the memory figures of runs.

    memory_kind         reserved (by the allocator) or allocated (in tensors)
    memory_rank         pipeline rank: first, last or the fullest
    """

    memory_kind: str = "reserved"
    memory_rank: str = "fullest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDefaults:
    """Defaults of runs of mixture-of-experts models.

    folds_experts       the tensor parallelism inside an expert is 1 if the run does not state it (else that of attention)
    dispatcher          dispatcher of tokens to experts, if the run does not state it
    flex_on             prefixes of chip names on which the dispatcher is flex
    graphs_experts_on   chips on which its recipes run such models under CUDA graphs; on others launches are as in Megatron-LM; None: as in
                        the profile
    hides_exchanges_on  chips on which the experts' all-to-alls overlap with another microbatch, if the schedule has one for it
    has_recipes         the release in its name determines the recipes of such models (strategies/releases)
    forces_neighbours   forced balanced routing sends a token to neighbouring experts, else to any
    """

    folds_experts: bool = False
    dispatcher: str = "alltoall"
    flex_on: tuple[str, ...] = ()
    graphs_experts_on: tuple[str, ...] | None = None
    hides_exchanges_on: tuple[str, ...] = ()
    has_recipes: bool = False
    forces_neighbours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDefaults:
    """Settings of runs.

    settings            default settings (docs/settings.md)
    of_method           default settings of runs whose `method` contains this word: full, lora, qlora, rl
    breaks_compile      words of methods whose modules torch.compile cannot keep in one graph, independent of the run's settings
    words               values of settings in the framework's terms -> values of perfmodel
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    of_method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    breaks_compile: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def setup(self, stated: object, method: object = None) -> dict[str, Any]:
        """Return the settings of a run: the defaults, replaced by the stated ones."""
        setup = dict(self.settings)
        for word in re.findall(r"[a-z0-9]+", method.lower()) if isinstance(method, str) else ():
            setup |= self.of_method.get(word, {})
        for name, value in stated.items() if isinstance(stated, Mapping) else ():
            translations = self.words.get(name, {})
            setup[name] = translations.get(value, value) if isinstance(value, str) else value
        if isinstance(method, str) and any(word in method.lower() for word in self.breaks_compile):
            setup["compile"] = False
        return setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Defaults of one framework, as in `strategies/framework_patterns.yaml`, whose entries have the fields of the groups too.

    source              source of its defaults
    pattern             regular expression of its names (the first match counts)
    profile             execution profile
    sharded             execution profile of runs that state a ZeRO stage above 0; "": the same
    borrows             the profile is that of its nearest relative: an interval is wider
    attention           kernel, if the run states none
    zero                ZeRO stage, if the run states neither a stage nor a distributed optimizer
    sequence_parallel   with tensor parallelism, if the run does not state it
    interleaves         largest number of virtual stages, if the run states none; 1: no interleaving
    fills_memory        one pass over the local batch if the run states no micro-batch (else micro-batches of one sequence)
    adapters            training method of a run that states adapters without details
    trains_mtp          its models have the multi-token-prediction modules of their configs, if the run does not state it
    """

    name: str
    pattern: str
    profile: str
    source: str = ""
    sharded: str = ""
    borrows: bool = False
    attention: str = "flash"
    zero: int = 0
    sequence_parallel: bool = False
    interleaves: int = 1
    fills_memory: bool = False
    adapters: str = "lora:16"
    trains_mtp: bool = True
    recomputation: RecomputeDefaults
    figures: MemoryFigures
    experts: ExpertDefaults
    options: SettingDefaults

    def when_sharded(self, zero_stage: object) -> Framework:
        """Return the framework with its defaults for training with ZeRO."""
        if not self.sharded or zero_stage not in (1, 2, 3):
            return self
        options = replace(self.options, settings={**self.options.settings, "pure_bf16": None}, of_method={})
        return replace(self, profile=self.sharded, options=options)


#: Field of a framework -> record of a group of keys.
_GROUPS = {"recomputation": RecomputeDefaults, "figures": MemoryFigures, "experts": ExpertDefaults, "options": SettingDefaults}


@lru_cache(maxsize=1)
def framework_patterns() -> tuple[Framework, ...]:
    """Return the entries of `strategies/framework_patterns.yaml`, in file order."""
    entries: list[dict[str, Any]] = read_yaml(resource_dir("strategies") / "framework_patterns.yaml")["frameworks"]
    by_name = {entry["name"]: entry for entry in entries}
    frameworks = []
    for entry in entries:
        base = by_name[entry["base"]] if "base" in entry else {}
        both = {key: value for key, value in base.items() if key != "source"} | entry
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in both.items() if key != "base"}
        for name, record in _GROUPS.items():
            values[name] = record(**{key.name: values.pop(key.name) for key in fields(record) if key.name in values})
        frameworks.append(Framework(**values))
    return tuple(frameworks)


def framework_of(name: object) -> Framework:
    """Return the framework that a run names; for an unknown or missing name the last entry: `generic`, and ZeRO 1 with replicas."""
    text = name.lower()[:200] if isinstance(name, str) else ""
    return next(framework for framework in framework_patterns() if re.match(f".*(?:{framework.pattern})", text, re.DOTALL))


def assumed_virtual_stages(framework: Framework, num_layers: int, pp: int) -> int:
    """Return the default virtual stages of a run: the largest number that the framework interleaves and that divides the layers."""
    for stages in range(framework.interleaves, 1, -1):
        if num_layers % (pp * stages) == 0 or stage_layers_with_ends(num_layers, pp * stages) is not None:
            return stages
    return 1


def stage_layers_with_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return the layers of each stage with embedding and head counted as a layer each, if the stages are even only then; else None.

    Source: Megatron-Core's `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` (Llama 3.1 405B: 126 layers).
    """
    if num_stages < 2 or num_layers % num_stages == 0 or (num_layers + 2) % num_stages:
        return None
    layers = (num_layers + 2) // num_stages
    return (layers - 1, *(layers,) * (num_stages - 2), layers - 1)
