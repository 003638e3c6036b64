"""One engine step: its sequences, prompts and tokens, and the engine's kernels. Its rows are priced from this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.kernels import small_all_reduce_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.engine import EngineKernels
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.workload.quantization import Quantization

Array = NDArray[np.float64]
Group = tuple[Array, Sequence[Array]]
"""Size of a group of ranks, and its members inside one domain of each tier."""

_ALL_REDUCE = COLLECTIVE_CODE[CollectiveKind.ALL_REDUCE]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFormats:
    """Formats of a step.

    quantization    of quantized weights, and of experts
    plain           of activations and of other weights
    cache_bytes     of an element of the cache          [byte]
    """

    quantization: Quantization
    plain: Quantization
    cache_bytes: float

    @property
    def element_bytes(self) -> float:
        """Bytes of an element of activations and unquantized weights."""
        return self.plain.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineStep:
    """One step on one attention rank, as flat columns.

    decoding     sequences with `new_tokens` rows each over `cached` tokens, including the new ones
    prompts      of `prompt_tokens` new tokens each after `prompt_cached`
    tokens       rows of all attention ranks together, routed to the experts (a single prompt occupies one rank, not all)
    copies       decode rows that further ranks of pcp compute too: they are routed to the experts as well
    sharing      pcp: ranks that share the tokens of each prompt
    padded       rows of this rank, padded to captured graphs
    dcp, cut     ranks inside tp that share the tokens of a cache, and those of pcp (1: each stores all of it)
    chips        of a stage; expert_parts: ranks that experts are sharded over
    groups       of ranks: tp; pcp, which share prompts; tokens, which have different tokens
    distinct_experts   activated by the tokens if all requests are one prompt; 0: by even routing
    takes_prompts      its graph is that of prompts
    """

    decoding: Array
    cached: Array
    new_tokens: Array
    prompts: Array
    prompt_tokens: Array
    prompt_cached: Array
    tokens: Array
    copies: Array
    sharing: Array
    padded: Array
    dcp: Array
    cut: Array
    chips: Array
    expert_parts: Array
    groups: Mapping[str, Group]
    kernels: EngineKernels
    formats: StepFormats
    distinct_experts: float
    takes_prompts: bool

    @property
    def rows(self) -> Array:
        return self.decoding * self.new_tokens + self.own_prompt_rows

    @property
    def own_prompt_rows(self) -> Array:
        """Rows of prompts on this rank."""
        return self.prompts * self.prompt_tokens / self.sharing

    @property
    def outputs(self) -> Array:
        """Rows with logits."""
        return self.decoding * self.new_tokens + self.prompts

    def product(self, is_low: bool) -> dict[str, Any]:
        """Return the arguments of `weight_product_time` that the engine defines."""
        untuned = 1.0 if self.takes_prompts else self.kernels.few_rows_fraction
        quantization = self.formats.quantization if is_low else self.formats.plain
        return {"quantization": quantization, "casts": self.kernels.casts, "untuned": untuned}


def engine_collective_time(code: Any, num_bytes: Array, group: Group, machine: Machine, kernels: EngineKernels) -> Array:
    """Return the time of a collective by the library, or by the engine's custom kernels if they are faster; 0 for one member. [s]"""
    size, inside = group
    if np.max(size) <= 1:
        return np.zeros(np.broadcast_shapes(np.shape(num_bytes), np.shape(size)))
    time = collective_time(code, num_bytes, group_size=size, inside=inside, machine=machine)
    if kernels.fuses_all_reduce:
        time = np.where(code == _ALL_REDUCE, np.minimum(time, small_all_reduce_time(num_bytes, size, machine)), time)
    return np.where(size > 1, time + kernels.rank_skew_time, 0.0)
