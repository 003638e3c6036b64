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

    bias      the median of predicted / measured - 1
    coverage  share of the measured values inside their 80 % interval
    """

    count: int
    median: float
    p90: float
    mean: float
    bias: float
    coverage: float


def error_statistics(errors: Sequence[float], covered: Sequence[bool] = ()) -> ErrorStatistics:
    """Return statistics of errors.

    errors    predicted / measured - 1, nan where one is missing
    covered   whether the measured value is in its interval, of runs with an interval
    """
    known = [error for error in errors if not math.isnan(error)]
    coverage = share_of(sum(covered), len(covered))
    if not known:
        return ErrorStatistics(count=0, median=math.nan, p90=math.nan, mean=math.nan, bias=math.nan, coverage=coverage)
    absolute = sorted(map(abs, known))
    return ErrorStatistics(
        count=len(known),
        median=median(absolute),
        p90=float(np.quantile(absolute, 0.9)),
        mean=sum(absolute) / len(absolute),
        bias=median(known),
        coverage=coverage,
    )


def share_of(count: int, total: int) -> float:
    return count / total if total else math.nan
