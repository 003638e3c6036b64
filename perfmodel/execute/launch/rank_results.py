"""Results that ranks send to the parent, which combines them. Does not import torch: the parent unpickles them and would import it too."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perfmodel.foundation.errors import RunError
from perfmodel.parallel.per_operator.traffic import NetworkTraffic

#: Largest relative error of a correct fp32 program, with a margin: measured errors are below 1e-5.
TOLERANCE = 1e-4
#: A gradient smaller than this share of the largest one is compared relative to that share.
ROUND_OFF_FLOOR = 1e-2


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
class IssuedTraffic:
    """Collectives of one step: counted by torch's dispatcher, and recorded by the interpreter of a graph.

    record          recorded collectives, each with `repeats` 1
    padding         elements issued in addition to the record
    sent_elements   elements of activations and their gradients sent to neighbouring stages
    """

    tally: CollectiveTally = field(default_factory=CollectiveTally)
    record: Counter[NetworkTraffic] = field(default_factory=Counter)
    padding: Counter[tuple[str, frozenset[str], str]] = field(default_factory=Counter)
    sent_elements: int = 0


@dataclass(slots=True)
class RankMeasurement:
    """Measurements of one plan on one rank. `parts`: phases of each step, if the program has them."""

    step_times: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    first_loss_share: float = float("nan")
    peak_memory: float = 0.0
    issued: IssuedTraffic = field(default_factory=IssuedTraffic)


@dataclass(slots=True)
class RankCheck:
    """Results of the correctness check: errors of each loss ("step 0", ...), gradient and output by name; traffic of the first step."""

    losses: list[float]
    loss_errors: dict[str, float]
    gradient_errors: dict[str, float]
    output_errors: dict[str, float]
    issued: IssuedTraffic


def slowest_times(ranks: Sequence[RankMeasurement]) -> tuple[float, ...]:
    """Return the time of each step on the slowest rank. [s]"""
    return tuple(max(times) for times in zip(*(rank.step_times for rank in ranks), strict=True))


def communication_times(ranks: Sequence[RankMeasurement]) -> dict[str, float]:
    """Return the mean time for which collectives over each axis block a rank, by `communication.<axis>`. [s]"""
    tallies = [rank.issued.tally.times for rank in ranks]
    axes = dict.fromkeys(axis for times in tallies for axis in times)
    return {f"communication.{axis}": statistics.fmean(times.get(axis, 0.0) for times in tallies) for axis in axes}


def worst_error(errors: Iterable[Mapping[str, float]], tolerance: float, sentence: Callable[[str, float, int], str]) -> float:
    """Return the largest error on any rank; nan if nothing was checked. Raise RunError if it exceeds the tolerance.

    errors     errors of each rank, by name
    sentence   error message for the worst name, its error, and the number of further names beyond the tolerance
    """
    together: dict[str, float] = {}
    for by_name in errors:
        for name, error in by_name.items():
            # nan counts as infinite
            together[name] = max(together.get(name, 0.0), float("inf") if error != error else error)
    if not together:
        return float("nan")
    wrong = {name: error for name, error in together.items() if error > tolerance}
    if wrong:
        name = max(wrong, key=lambda key: wrong[key])
        raise RunError(sentence(name, wrong[name], len(wrong) - 1))
    return max(together.values())
