"""Results of an exploration: points along axes, elasticities, and the steps from one system to another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from perfmodel.foundation.units import format_quantity
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.serving_prediction import ServingPrediction

SATURATED = 1.1
"""Least speedup by a further value of an axis; less is past saturation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field and its values, in SI units if they are quantities; kind: of quantity, empty for others."""

    name: str
    values: tuple[Any, ...]
    kind: str = ""

    def text(self, value: Any) -> str:
        """Return the value as tables show it."""
        if self.kind:
            return format_quantity(value, self.kind)
        return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(value, (int, float)) for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One system of an exploration.

    values      of the axes, in SI units
    time        of the metric; infinite where it was not predicted   [s]
    prediction  None where it was not predicted, for the given reason
    shares      of the time by bottleneck (compute, memory, network, other); empty if not requested
    """

    values: Mapping[str, Any]
    time: float = math.inf
    prediction: Prediction | ServingPrediction | None = None
    reason: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """All combinations of the values of the axes, the last axis varying fastest.

    metric   name of the time of each point
    notes    sentences about how the points were predicted
    """

    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    metric: str
    is_searched: bool
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[tuple[Point, ...]]:
        """Yield the points along the last axis, for each combination of the others."""
        length = len(self.axes[-1].values)
        for first in range(0, len(self.points), length):
            yield self.points[first : first + length]

    def gains(self) -> list[float]:
        """Return the speedup over the previous value of the last axis for each point; nan for the first."""
        return [gain for line in self.lines() for gain in (math.nan, *(_ratio(one.time, two.time) for one, two in pairwise(line)))]

    def saturation(self, line: Sequence[Point]) -> Point | None:
        """Return the first point of a line after which no further value makes the system `SATURATED` times faster; None without one."""
        last = max((index for index, (one, two) in enumerate(pairwise(line)) if _ratio(one.time, two.time) >= SATURATED), default=-1)
        return line[last + 1] if last + 2 < len(line) and math.isfinite(line[last + 1].time) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Relative change of the time for a small relative change of one hardware number.

    value       of the number, in SI units
    elasticity  d ln(time) / d ln(value), central difference over a factor of 1 + `STEP` both ways
    smaller, larger   time with the number smaller and larger by that factor, over the unchanged time
    """

    name: str
    kind: str
    value: float
    elasticity: float
    smaller: float
    larger: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """Elasticities of one plan's time to every hardware number, the largest first."""

    metric: str
    time: float
    prediction: Prediction | ServingPrediction
    elasticities: tuple[Elasticity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change on the way from one system to another.

    before, after   the changed value, as text
    time            after the change, with the plan searched again   [s]
    factor          time before over time after
    plan_factor     part of `factor` due to the new plan; 1 if the plan stayed, nan if the old plan no longer fits
    """

    change: str
    before: str
    after: str
    time: float
    factor: float
    plan_factor: float
    prediction: Prediction | ServingPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Steps from one system to another, one change at a time in a stated order; the factors multiply to the total."""

    start: str
    end: str
    metric: str
    time: float
    prediction: Prediction | ServingPrediction
    rungs: tuple[Rung, ...]

    @property
    def total(self) -> float:
        """Time of the first system over that of the last."""
        return self.time / self.rungs[-1].time


def _ratio(before: float, after: float) -> float:
    return before / after if math.isfinite(before) and math.isfinite(after) else math.nan
