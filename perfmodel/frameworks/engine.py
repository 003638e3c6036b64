"""Serving engines as data (`strategies/engines/*.yaml`): memory, scheduling, kernels and host, each with version and source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from perfmodel.foundation.errors import InputError, bad_field, one_line, suggest
from perfmodel.foundation.grouped import Grouped, group_of
from perfmodel.foundation.records import INLINE, record_from_data
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.engine_formats import EngineFormat

DEFAULT_ENGINE = "vllm"
EXTENTS = ("any", "whole", "none")
ATTENTIONS = ("any", "latent", "none")
GENERIC_ENGINE = "generic"
"""Engine with the mean values of the known ones, for an unknown engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVersions:
    """Options that differ in some versions of an engine.

    since          first of these versions
    before         first version after them
    sampler_bytes  value of the memory option in these versions
    graph_bytes    value of the memory option in these versions
    """

    since: str
    before: str
    sampler_bytes: float
    graph_bytes: float

    def has(self, version: tuple[int, ...]) -> bool:
        return version_of(self.since) <= version < version_of(self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChips:
    """Options that differ on some chips.

    memory_below_bytes   these chips have less memory; 0: any memory
    chip                 word in the names of these chips; empty: any chip
    max_batch, max_tokens, reserve_bytes, least_reserve_bytes   values of the options on them
    largest_graph        largest batch with a captured graph
    """

    memory_below_bytes: float = 0.0
    chip: str = ""
    max_batch: int
    max_tokens: int
    reserve_bytes: float = 0.0
    least_reserve_bytes: float = 0.0
    largest_graph: int

    def has(self, chip: str, capacity: float) -> bool:
        return self.chip in chip and (not self.memory_below_bytes or capacity < self.memory_below_bytes)


def version_of(text: str) -> tuple[int, ...]:
    """Return the version in a text: (1, 2, 0) of "trtllm 1.2.0rc6.post3"; () if there is none."""
    match = re.search(r"(?<![\w.])v?(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _check_least_1(name: str, value: int) -> None:
    if value < 1:
        raise bad_field(name, value, "must be at least 1", "correct the engine")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise bad_field(name, value, "must lie in 0..1", "correct the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of a rank (inference.md's `u C - W - A - G - N`, or `u (C - W - A - G - N)`).

    memory_fraction           u: share of the memory that the engine may fill
    fraction_of_free          u is a share of the free memory after the engine is loaded, not of the whole memory
    activation_factor         A = 2 T n d x factor, by tensor-parallel degree 1, 2, 4, 8; of models with experts `expert_activation_factor`
    expert_activation_factor  the same of models with experts
    least_activation_bytes    smallest A
    graph_bytes               G: captured graphs
    context_bytes             N: driver, libraries, communicators
    link_bytes                part of N that exists only for tp > 1
    reserve_bytes             further reserved memory; with the next four in place of A and G, if an engine reserves by a rule (SGLang)
    reserve_token_bytes       reserved per token of a step
    reserve_chip_bytes        reserved per chip of a replica
    reserve_rank_bytes        reserved per attention rank, if there are several
    least_reserve_bytes       smallest sum of these
    block_tokens              tokens of a block of the cache
    reserves_answers          a request is admitted if the cache can hold its prompt and its whole answer; else if it can hold the prompt,
                              and the latest requests are preempted and recomputed when the cache is full
    sampler_bytes             peak memory of the sampler in the profile run, per running sequence and entry of the vocabulary; it counts
                              where it is more than A
    keeps_expert_workspace    inputs and outputs of the experts' products are in persistent buffers, which stay while the sampler runs
    """

    memory_fraction: float
    fraction_of_free: bool = False
    activation_factor: tuple[float, ...] = (11.0, 6.5, 5.0, 5.0)
    expert_activation_factor: tuple[float, ...] = (22.0, 13.0, 10.0, 10.0)
    least_activation_bytes: float = 70e6
    graph_bytes: float = 1.5e9
    context_bytes: float = 0.5e9
    link_bytes: float = 0.4e9
    reserve_bytes: float = 0.0
    reserve_token_bytes: float = 0.0
    reserve_chip_bytes: float = 0.0
    reserve_rank_bytes: float = 0.0
    least_reserve_bytes: float = 0.0
    block_tokens: int = 16
    reserves_answers: bool = True
    sampler_bytes: float = 0.0
    keeps_expert_workspace: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise bad_field("memory_fraction", self.memory_fraction, "must be a share of the memory", "correct the engine")
        _check_least_1("block_tokens", self.block_tokens)
        for name in ("activation_factor", "expert_activation_factor"):
            factors = getattr(self, name)
            if len(factors) != 4 or min(factors) < 0:
                raise bad_field(name, factors, "must be four factors, by tp 1, 2, 4 and 8", "correct the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScheduling:
    """Scheduling of requests into steps.

    max_batch        concurrent sequences
    max_tokens       tokens of a step (a chunk of a prompt and one token of each decoding sequence)
    has_chunks       chunked prefill: chunks of prompts run in the same steps as decoding; else prompts run alone, first
    gathers_prompts  attention ranks wait for one another's prompts, so that all of them prefill in the same step
    lockstep         s in 0..1: synchronisation of requests (0: evenly spread, 1: waves)
    graph_sizes      batch sizes with captured graphs; a step is padded to the next size
    """

    max_batch: int = 1024
    max_tokens: int = 8192
    has_chunks: bool = True
    gathers_prompts: bool = False
    lockstep: float = 0.15
    graph_sizes: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        _check_least_1("max_batch", self.max_batch)
        _check_least_1("max_tokens", self.max_tokens)
        _check_share("lockstep", self.lockstep)
        if not self.graph_sizes or self.graph_sizes[0] < 1 or any(a >= b for a, b in pairwise(self.graph_sizes)):
            raise bad_field("graph_sizes", self.graph_sizes, "must be batches from 1, each larger than the last", "correct the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRuns:
    """Plans that the engine can run ("any", "whole", "none").

    attention_dp            attention data parallelism: any degree; only over all chips of a stage (with tp 1); none
    expert_parallel         expert-parallel degree: any; either all chips of a stage or 1; only 1, with each expert sharded over all chips
    has_decode_context      decode context parallelism: ranks of tp with the same cache can split its tokens
    prefill_context         prefill context parallelism, in which chips split the tokens of a prompt: "any", "latent" (latent attention
                            only), "none"
    prefill_context_beside  degrees other than tp and ep that it combines with prefill context parallelism: pp, attention_dp
    prefill_context_since   first version with it, if later than `version`; a search then proposes it only on request
    """

    attention_dp: str = "any"
    expert_parallel: str = "any"
    has_decode_context: bool = False
    prefill_context: str = "none"
    prefill_context_beside: tuple[str, ...] = ()
    prefill_context_since: str = ""

    def __post_init__(self) -> None:
        for name, known in (("attention_dp", EXTENTS), ("expert_parallel", EXTENTS), ("prefill_context", ATTENTIONS)):
            if getattr(self, name) not in known:
                raise bad_field(name, getattr(self, name), f"must be one of {', '.join(known)}", "correct the engine")
        if set(self.prefill_context_beside) - {"pp", "attention_dp"}:
            raise bad_field("prefill_context_beside", self.prefill_context_beside, "must be of pp, attention_dp", "correct the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """Host times.

    step_time           host time of a step, in addition to the device time
    sequence_time       host time of a step, per sequence
    request_time        h0: from a request's arrival to its prefill, and back with its first token
    border_steps        decode steps between the end of a prefill and the first token
    layer_prefill_time  host time of a layer in a prefill without graphs: a lower bound of the prefill time
    has_graphs          decode replays CUDA graphs; else each kernel is launched
    launch_time         launch time of a kernel
    overlaps_host       scheduling overlaps with the device: the longer of the two counts
    """

    step_time: float = 0.0
    sequence_time: float = 0.0
    request_time: float = 0.0
    border_steps: float = 0.0
    layer_prefill_time: float = 0.0
    has_graphs: bool = True
    launch_time: float = 0.0
    overlaps_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKernels:
    """Kernels: fusion and rates.

    floor_fraction             exposed share of a kernel's minimum time in a replayed graph
    fuses_all_reduce           small all-reduces use the engine's own kernels
    fuses_casts                the cast of activations before low-precision products is part of the previous kernel; else a separate kernel
    fuses_kernels              products of one input are one call, and norms, additions and rotary embeddings share launches; else each
                               operator is a kernel
    sparse_attention_time      time of a layer with sparse attention for casts, scores and selection, in addition to products and reads
    rank_skew_time             time of an all-reduce in addition to its kernel: its ranks, launched one by one, arrive one after another
    shares_key_values          decode reads the keys and values of a head once for all query heads that share them; else for each query head
    tunes_products             its library has kernels for products of few rows; else they run at `few_rows_fraction` of the full rate
    few_rows_fraction          1 with such kernels
    decode_attention_fraction  rate of its decode attention kernel, over that of the fused kernel of the chip's calibration
    formats                    formats of weights, by kind of chip; none: all formats that the chip has units for
    """

    floor_fraction: float = 0.5
    fuses_all_reduce: bool = True
    fuses_casts: bool = False
    fuses_kernels: bool = True
    sparse_attention_time: float = 0.0
    rank_skew_time: float = 0.0
    shares_key_values: bool = True
    tunes_products: bool = True
    few_rows_fraction: float = 1.0
    decode_attention_fraction: float = 1.0
    formats: tuple[EngineFormat, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.decode_attention_fraction <= 2.0:
            rule = "must be above 0, and 2 at most"
            raise bad_field("decode_attention_fraction", self.decode_attention_fraction, rule, "correct the engine")
        if not 0.0 < self.few_rows_fraction <= 1.0:
            raise bad_field("few_rows_fraction", self.few_rows_fraction, "must be above 0, and 1 at most", "correct the engine")
        _check_share("floor_fraction", self.floor_fraction)

    @property
    def casts(self) -> float:
        """Share of casts that are separate kernels."""
        return 0.0 if self.fuses_casts else 1.0


ENGINE_GROUPS: Mapping[str, Any] = {
    "memory": EngineMemory,
    "scheduling": EngineScheduling,
    "runs": EngineRuns,
    "host": EngineHost,
    "kernels": EngineKernels,
}
ENGINE_GROUP_OF: Mapping[str, str] = group_of(ENGINE_GROUPS)
"""Option of an engine -> its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Grouped):
    """A serving engine: options in groups.

    name      name in `--engine` and in tables
    version   version that the options describe
    source    source code, documentation or measurements, with their version
    versions  options that differ in other versions
    chips     options that differ on some chips: the first entry that has the chip counts
    notes     sources of single options, by name
    """

    GROUP_OF: ClassVar[Mapping[str, str]] = ENGINE_GROUP_OF

    name: str
    version: str
    source: str
    memory: EngineMemory = field(metadata=INLINE)
    scheduling: EngineScheduling = field(default_factory=EngineScheduling, metadata=INLINE)
    runs: EngineRuns = field(default_factory=EngineRuns, metadata=INLINE)
    host: EngineHost = field(default_factory=EngineHost, metadata=INLINE)
    kernels: EngineKernels = field(default_factory=EngineKernels, metadata=INLINE)
    versions: tuple[EngineVersions, ...] = ()
    chips: tuple[EngineChips, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def at(self, version: tuple[int, ...]) -> Engine:
        """Return the engine with the options of a version; () for an unknown one."""
        unlike = next((options for options in self.versions if options.has(version)), None)
        return self if unlike is None else self.having(sampler_bytes=unlike.sampler_bytes, graph_bytes=unlike.graph_bytes)

    def on(self, chip: str, capacity: float) -> Engine:
        """Return the engine with its defaults on a chip, by the chip's name and memory. [byte]"""
        defaults = next((entry for entry in self.chips if entry.has(chip, capacity)), None)
        if defaults is None:
            return self
        return self.having(
            max_batch=defaults.max_batch,
            max_tokens=defaults.max_tokens,
            reserve_bytes=defaults.reserve_bytes,
            least_reserve_bytes=defaults.least_reserve_bytes,
            graph_sizes=tuple(size for size in self.scheduling.graph_sizes if size <= defaults.largest_graph),
        )


#: Short name of an engine -> its name.
SHORT_NAMES = {"trt-llm": "tensorrt-llm", "trtllm": "tensorrt-llm"}


def list_engines() -> tuple[str, ...]:
    """Return the names of the shipped engines."""
    return tuple(sorted(path.stem for path in (resource_dir("strategies") / "engines").glob("*.yaml")))


def load_engine(name: str | Path | Engine = DEFAULT_ENGINE) -> Engine:
    """Return a shipped engine by name (`SHORT_NAMES` included), or a user's by path, which is read again if its file changed."""
    if isinstance(name, Engine):
        return name
    shipped = SHORT_NAMES.get(str(name).lower(), str(name).lower())
    if shipped in list_engines():
        return _load(shipped, is_shipped=True)
    path, quoted = Path(name), one_line(str(name), 60)
    try:
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(f"engine={quoted}: is neither an engine's name nor a file; see `perfmodel engines`") from error
    if not is_file:
        raise InputError(f"engine={quoted}: is not known{suggest(str(name), list_engines())}; see `perfmodel engines`")
    return _load(str(path.resolve()), is_shipped=False)


@session_cache(maxsize=64, file=lambda name, is_shipped: "" if is_shipped else name)
def _load(name: str, *, is_shipped: bool) -> Engine:
    """Load a shipped engine by its name, or a user's by its path."""
    from perfmodel.foundation.files import read_yaml

    path = resource_dir("strategies") / "engines" / f"{name}.yaml" if is_shipped else Path(name)
    data: Any = read_yaml(path)
    if isinstance(data, dict) and "base" in data:
        base = data["base"]
        if base not in list_engines():
            raise InputError(f"{path.name}: base={one_line(str(base), 40)}: is no engine that ships{suggest(str(base), list_engines())}")
        shipped: Any = read_yaml(resource_dir("strategies") / "engines" / f"{base}.yaml")  # without numbers fitted to runs
        data = {key: value for key, value in {**shipped, **data}.items() if key != "base"}
    if is_shipped and isinstance(data, dict):
        data = {**data, **{number: fit["value"] for number, fit in fitted_numbers().get(name, {}).items()}}
    if not is_shipped:
        from perfmodel.foundation.schema import check, model_of

        check(model_of(Engine), data, where=path.name)
    return record_from_data(Engine, data, where=path.name)


@lru_cache(maxsize=1)
def fitted_numbers() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the numbers of shipped engines fitted to published runs: engine -> number -> value, range and runs.

    Written by `python -m lab.serving.engines`.
    """
    from perfmodel.foundation.files import read_yaml

    path = resource_dir("strategies") / "engines_fitted.yaml"
    numbers: Any = read_yaml(path).get("engines", {}) if path.is_file() else {}
    return numbers if isinstance(numbers, dict) else {}
