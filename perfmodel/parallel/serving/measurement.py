"""Measurements of serving steps, and torch's counts of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.results import CollectiveCount, interquartile_range
from perfmodel.workload.config import TransformerConfig

#: Outputs and inputs of the reference products, and their rows: they measure the current speed of the machine as decode (bound by memory)
#: and as prefill (bound by FLOP/s) meet it. Their weights are read from memory.
ANCHOR_WEIGHT, ANCHOR_ROWS = (2816, 1024), {"decode": 8, "prefill": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Shape of a step: `sequences` with `cached` tokens in the cache and `new` tokens each. One new token is decode, more are prefill."""

    sequences: int
    cached: int
    new: int

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("cached", 0), ("new", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)}: must be at least {least}; a step runs new tokens of some sequences")

    @property
    def rows(self) -> int:
        return self.sequences * self.new

    @property
    def is_decode(self) -> bool:
        return self.new == 1

    def __str__(self) -> str:
        return f"{self.sequences} x {self.new} after {self.cached}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Work of one rank in a step, counted by torch.

    flops             of products and attention, with all keys of a sequence for each query, masked or not
    parameter_bytes   of weights, counted at every read                               [byte]
    cache_bytes       of keys and values that attention reads, new ones included, and of recurrent states that are read   [byte]
    written_bytes     of keys and values of new tokens, and of recurrent states that are written                          [byte]
    collectives       by kind, over the ranks of tp
    held_bytes        of weights; held_cache_bytes: of blocks and slots of the cache            [byte]
    peak_memory       largest sum of live tensors                                     [byte]
    """

    flops: float
    parameter_bytes: float
    cache_bytes: float
    written_bytes: float
    collectives: tuple[CollectiveCount, ...]
    held_bytes: float
    held_cache_bytes: float
    peak_memory: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Measured steps of one shape. [s]

    times             of each step, on the slowest rank
    processor_times   CPU time of each step in the computing thread, which other processes do not disturb; of one rank on a CPU, else none
    """

    shape: StepShape
    times: tuple[float, ...]
    counts: StepCounts
    processor_times: tuple[float, ...] = ()

    @cached_property
    def time(self) -> float:
        return statistics.median(self.times)

    @cached_property
    def spread(self) -> float:
        """Interquartile range."""
        return interquartile_range(self.times)

    @cached_property
    def undisturbed(self) -> float:
        """Step time on a quiet machine: processor time if it was measured, else wall time."""
        return statistics.median(self.processor_times or self.times)

    @cached_property
    def undisturbed_spread(self) -> float:
        return interquartile_range(self.processor_times or self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """A measured step with its prediction. parts: of the predicted time, which is their sum [s]"""

    measured: MeasuredStep
    parts: Mapping[str, float]

    @property
    def predicted(self) -> float:
        return sum(self.parts.values())

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured.undisturbed - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMeasurement:
    """Measured steps of one model on `tp` ranks of this machine.

    dtype           of weights and cache
    logit_error     largest difference from the logits of the uncached forward pass, over the largest logit; nan if not checked
    busy_fraction   share of the machine's processors used by other processes; 0 if the system does not report it
    anchors         time of each reference product of `ANCHOR_ROWS` between the rounds; none where the steps are not predicted [s]
    """

    model: TransformerConfig
    tp: int
    dtype: str
    chip: str
    device: str
    software: Mapping[str, str]
    steps: tuple[MeasuredStep, ...]
    logit_error: float
    busy_fraction: float
    anchors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedComparison:
    """Measured steps with their predictions by the machine's calibration.

    steps   none for a run that is not predicted (tp > 1)
    drifts  measured over calibrated time of each reference product of `ANCHOR_ROWS`: slowdown of the machine since its calibration
    """

    measurement: ServingMeasurement
    steps: tuple[ComparedStep, ...]
    calibration: str
    drifts: Mapping[str, float] = field(default_factory=dict)
