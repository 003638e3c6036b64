"""The interval around a predicted step time. How it is made: `uncertainty/`."""

from __future__ import annotations

from dataclasses import dataclass

COVERAGE = 0.8
"""Share of measured times that an interval is to hold."""

TAIL = (1.0 - COVERAGE) / 2.0
"""On either side of it."""

NORMAL = 1.2816
"""Standard deviations to that quantile of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """An interval for a step time as factors of the prediction, and what it rests on in words.

    trust   how far the prediction is from what predictions were held against (`uncertainty/grade.py`)
    """

    low: float
    high: float
    rests_on: str
    num_runs: int
    trust: str = ""
