"""Checks for implausible runs: times in another unit, plans of other runs, two frameworks in one file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.fitting.fit import UserRun
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.units import format_step

Array = NDArray[np.float64]

_NEAR = 2.5
"""Tolerance factor between the measured time and the predicted one in another unit, within which that unit is the cause."""

_FAR = 8.0
"""Factor from which a run does not match its plan, for any framework: the slowest known one has a third of the speed of the fastest."""

#: measured / predicted -> (description of the unit, remedy)
_UNITS = (
    (1e3, "in milliseconds", "name the column step_time_ms, or write 4200 ms"),
    (1e-3, "in units of 1,000 seconds, or of 1,000 steps", "write seconds"),
    (1e6, "in microseconds", "write seconds, or 4200000 us"),
    (60.0, "of 60 steps, or in units of a sixtieth of a second", "write seconds of one step"),
    (1 / 60.0, "in minutes", "write seconds"),
    (1 / 3600.0, "in hours", "write seconds"),
)


def check_one_framework(runs: Sequence[UserRun]) -> None:
    """Raise InputError for runs of two frameworks: a profile describes one."""
    named: dict[str, str] = {}
    for run in runs:
        if not run.planned.framework.borrows:
            named.setdefault(run.profile, run.id)
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise InputError(f"framework: {first} is of {one}, {second} of {other}; a profile is of one framework: fit each by itself")


def check_times(runs: Sequence[UserRun], log_errors: Array) -> None:
    """Raise InputError for times that are off by a factor that no framework explains. log_errors: log(predicted / measured)."""
    for run, error in zip(runs, log_errors, strict=True):
        if abs(error) < math.log(_FAR):
            continue
        predicted, ratio = format_step(run.measured * math.exp(error)), math.exp(-error)
        times = f"{ratio:,.0f} times" if ratio >= 1 else f"1/{1 / ratio:,.0f} of"
        message = f"{run.id}: step_time={run.measured:.6g} s: is {times} the predicted {predicted}"
        chips = float(run.planned.plan.num_chips)
        rates = (  # tokens of all chips read as those of one, and the reverse
            (chips, "from tokens a second of one chip taken for those of all", "name the column tokens_per_s_per_chip"),
            (1 / chips, "from tokens a second of all chips taken for those of one", "name the column tokens_per_s"),
        )
        causes = (*_UNITS, *(rates if chips >= _FAR else ()))
        factor, meaning, remedy = min(causes, key=lambda cause: abs(error + math.log(cause[0])))
        if abs(error + math.log(factor)) < math.log(_NEAR):
            raise InputError(f"{message}; it looks like a time {meaning} ({remedy}), unless its plan is another run's")
        raise InputError(
            f"{message}, more than frameworks differ; correct its plan, if that is another run's (model, batch, sequence, chips)"
        )
