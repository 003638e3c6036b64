"""Results that ranks send to the parent. Does not import torch: the parent process unpickles them and would import it too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from perfmodel.parallel.per_operator.traffic import NetworkTraffic


@dataclass(slots=True)
class CollectiveTally:
    """Collectives by (kind, axis): number, full-buffer bytes, and time that they blocked this rank."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    num_bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, axis: str, num_bytes: float) -> None:
        key = (kind, axis)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.num_bytes[key] = self.num_bytes.get(key, 0.0) + num_bytes

    def add_time(self, axis: str, duration: float) -> None:
        self.times[axis] = self.times.get(axis, 0.0) + duration


@dataclass(slots=True)
class RankMeasurement:
    """Measurements of one rank."""

    step_times: list[float]
    parts: list[dict[str, float]]
    first_loss_share: float
    peak_memory: float
    tally: CollectiveTally


@dataclass(slots=True)
class RankCheck:
    """Results of the correctness check: errors of each loss ("step 0", ...), gradient and output by name; recorded and observed traffic.

    sent_elements   elements of activations and their gradients sent to neighbouring stages in a step
    """

    losses: list[float]
    loss_errors: dict[str, float]
    gradient_errors: dict[str, float]
    output_errors: dict[str, float]
    record: Counter[NetworkTraffic]
    padding: Counter[tuple[str, frozenset[str], str]]
    tally: CollectiveTally
    sent_elements: int = 0


@dataclass(slots=True)
class RankTimes:
    """Step times of one plan on one rank. `share`: the rank's part of the first loss."""

    times: list[float]
    share: float
    record: Counter[NetworkTraffic]
    padding: Counter[tuple[str, frozenset[str], str]]
    tally: CollectiveTally
    peak_memory: float
    sent_elements: int = 0
