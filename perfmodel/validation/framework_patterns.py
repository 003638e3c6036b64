"""Defaults of published runs by the name of their framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from perfmodel.foundation.resources import resource_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Defaults of one framework, as `strategies/framework_patterns.yaml` has them.

    source       where its defaults were read
    pattern      what its name looks like (the first that matches wins)
    profile      execution profile
    attention    kernel, where the run states none
    zero         ZeRO stage, where the run states neither a stage nor a distributed optimizer
    recompute    where the run states none
    sequence_parallel   with tensor parallelism, where the run does not say
    selective    operators that "selective" recomputation runs again; selective_sharded: of runs under ZeRO 3, where that is something else
    interleaves  the most virtual stages of a pipeline whose number the run does not state; 1: none
    fills_memory one pass over the local batch where the run states no micro-batch (else micro-batches of one sequence)
    memory_kind  what its memory figures count: reserved (all that the allocator holds) or allocated (what is in tensors)
    memory_rank  the pipeline rank that they are of: first, last or the fullest
    adapters     what a run trains of which no more is known than that it trains adapters only
    borrows      the profile is that of its nearest relative: an interval is wider
    folds_experts   the tensor parallelism inside an expert is 1 where the run does not state it (else that of attention)
    dispatcher   how tokens reach their experts, where the run does not say
    flex_on      chips, by the beginning of their names, on which that is flex
    graphs_experts_on    chips on which its recipes run models with experts under CUDA graphs; elsewhere they launch as Megatron-LM does;
                         None: as the profile has it
    hides_exchanges_on   chips on which what experts exchange travels beside another microbatch, where the schedule has one for it
    has_recipes  the release in its name says how its recipes run models with experts (strategies/releases)
    trains_mtp   its models have the modules for further tokens that their configs state, where the run does not say
    forces_neighbours   balanced routing that is forced sends a token to neighbouring experts, else to any
    settings     of its setup, where the run does not state them (docs/settings.md)
    of_method    the same of runs whose `method` has this word: full, lora, qlora, rl
    breaks_compile   words of methods whose modules torch.compile cannot keep in one graph, whatever the run states
    words        values of settings as its users state them -> what they mean here
    sharded      execution profile of runs that state a ZeRO stage above 0; "": the same
    """

    name: str
    pattern: str
    profile: str
    source: str = ""
    attention: str = "flash"
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    selective: tuple[str, ...] = ("attention_core",)
    selective_sharded: tuple[str, ...] = ()
    interleaves: int = 1
    fills_memory: bool = False
    memory_kind: str = "reserved"
    memory_rank: str = "fullest"
    adapters: str = "lora:16"
    borrows: bool = False
    folds_experts: bool = False
    dispatcher: str = "alltoall"
    flex_on: tuple[str, ...] = ()
    graphs_experts_on: tuple[str, ...] | None = None
    hides_exchanges_on: tuple[str, ...] = ()
    has_recipes: bool = False
    trains_mtp: bool = True
    forces_neighbours: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    breaks_compile: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sharded: str = ""

    def setup(self, stated: object, method: object = None) -> dict[str, Any]:
        """Settings of a run that states this."""
        found = dict(self.settings)
        for word in re.findall(r"[a-z0-9]+", method.lower()) if isinstance(method, str) else ():
            found |= self.of_method.get(word, {})
        for name, value in stated.items() if isinstance(stated, Mapping) else ():
            meanings = self.words.get(name, {})
            found[name] = meanings.get(value, value) if isinstance(value, str) else value
        if isinstance(method, str) and any(word in method.lower() for word in self.breaks_compile):
            found["compile"] = False
        return found

    def when_sharded(self, zero_stage: object) -> Framework:
        """As it runs where ZeRO shards what it trains."""
        if not self.sharded or zero_stage not in (1, 2, 3):
            return self
        return replace(self, profile=self.sharded, settings={**self.settings, "pure_bf16": None}, of_method={})


@lru_cache(maxsize=1)
def framework_patterns() -> tuple[Framework, ...]:
    """The entries of `strategies/framework_patterns.yaml`, in their order."""
    from perfmodel.foundation.files import read_yaml

    entries: list[dict[str, Any]] = read_yaml(resource_dir("strategies") / "framework_patterns.yaml")["frameworks"]
    by_name = {entry["name"]: entry for entry in entries}
    return tuple(_framework(entry, by_name) for entry in entries)


def _framework(entry: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]]) -> Framework:
    under = by_name[entry["base"]] if "base" in entry else {}
    both = {key: value for key, value in under.items() if key != "source"} | dict(entry)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in both.items() if key != "base"}
    return Framework(**values)


def framework_of(name: object) -> Framework:
    """The framework that a run names; an unknown or missing name is nobody's: `generic`, and ZeRO 1 where there are replicas."""
    text = name.lower()[:200] if isinstance(name, str) else ""
    return next(framework for framework in framework_patterns() if re.match(f".*(?:{framework.pattern})", text, re.DOTALL))


def assumed_virtual_stages(framework: Framework, num_layers: int, pp: int) -> int:
    """Virtual stages of a run that does not state them: the most that the framework interleaves and that divide the layers."""
    for stages in range(framework.interleaves, 1, -1):
        if num_layers % (pp * stages) == 0 or stage_layers_with_ends(num_layers, pp * stages) is not None:
            return stages
    return 1


def stage_layers_with_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding and the head count as a layer each, if that and only that makes the stages even.

    Source: Megatron-Core's `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` (Llama 3.1 405B: 126 layers).
    """
    if num_stages < 2 or num_layers % num_stages == 0 or (num_layers + 2) % num_stages:
        return None
    each = (num_layers + 2) // num_stages
    return (each - 1, *(each,) * (num_stages - 2), each - 1)
