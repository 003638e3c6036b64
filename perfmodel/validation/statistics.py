"""Statistics of relative errors, for training and for serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatistics:
    """Statistics of |predicted / measured - 1|; nan without errors.

    largest        the largest error
    bias           the median of predicted / measured - 1
    num_intervals  measured values with an 80 % interval; coverage: share of them that is inside it
    """

    count: int
    median: float
    p90: float
    mean: float
    largest: float
    bias: float
    coverage: float
    num_intervals: int


def error_statistics(errors: Sequence[float], covered: Sequence[bool] = ()) -> ErrorStatistics:
    """Return statistics of errors.

    errors    predicted / measured - 1, nan where one is missing
    covered   whether the measured value is in its interval, of runs with an interval
    """
    known = [error for error in errors if not math.isnan(error)]
    absolute = sorted(map(abs, known))
    return ErrorStatistics(
        count=len(known),
        median=median(absolute) if known else math.nan,
        p90=float(np.quantile(absolute, 0.9)) if known else math.nan,
        mean=share_of(sum(absolute), len(absolute)),
        largest=max(absolute, default=math.nan),
        bias=median(known) if known else math.nan,
        coverage=share_of(sum(covered), len(covered)),
        num_intervals=len(covered),
    )


def share_of(count: float, total: int) -> float:
    return count / total if total else math.nan
