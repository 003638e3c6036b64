"""What is predicted of a plan: step time and its parts, utilisation, memory, traffic, and what each number rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.memory_room import Verdict
from perfmodel.parallel.plan import Plan

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """Collectives of one kind over one group, summed over a step, on the rank of the largest share.

    num_bytes   full-buffer bytes of all of them   [byte]
    time        alone on their links               [s]
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: float
    num_bytes: float
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan's step, predicted.

    parts           exposed seconds on the critical rank by part; they add up to step_time
    memory          bytes of the fullest chip by class, and their "total"
    memory_moment   when in the step that much lives
    memory_capacity, memory_usable   of a chip as its driver reports it, and what the runtime offers of that   [byte]
    verdict         whether the total fits into what is usable, with the headroom that was asked for
    mfu_palm        model FLOPs (6 N + 12 L H Q S a token, attention on the full square) over the peak
    mfu_causal      the same with attention counted once below the diagonal
    hfu             FLOPs executed, with recomputation, over the peak
    peak_flop_rate  of one chip, dense, in the compute dtype
    rests_on        part -> spec sheet, prior or calibrated, with the name of the calibration
    calibration     what the prediction rests on, as a plan file may name it; the plan names one only where somebody asked for it
    warnings        sentences about what this prediction stretches or leaves aside
    """

    plan: Plan
    step_time: float
    parts: Mapping[str, float]
    tokens_per_second_per_chip: float
    mfu_palm: float
    mfu_causal: float
    hfu: float
    peak_flop_rate: float
    peak_dtype: str
    memory: Mapping[str, float]
    memory_moment: str
    memory_capacity: float
    memory_usable: float
    verdict: Verdict
    rests_on: Mapping[str, str]
    calibration: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    @property
    def memory_spare(self) -> float:
        """Usable bytes that stay free, headroom included; negative where the plan does not fit."""
        return self.memory_usable - self.memory["total"]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_second_per_chip * self.plan.num_chips
