"""Prediction interval of a step time; `uncertainty/` computes it."""

from __future__ import annotations

from dataclasses import dataclass

COVERAGE = 0.8
"""Nominal coverage: share of measured times inside the interval."""

TAIL = (1.0 - COVERAGE) / 2.0
"""Share of measured times on either side of the interval."""

NORMAL = 1.2816
"""That quantile of the standard normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """Prediction interval of a step time, as factors of the prediction.

    rests_on   basis of the interval, in words
    num_runs   measured runs of that basis
    trust      grade of the distance between the prediction and the measured runs (`uncertainty/grade.py`)
    """

    low: float
    high: float
    rests_on: str
    num_runs: int
    trust: str = ""
