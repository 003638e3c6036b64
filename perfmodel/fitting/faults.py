"""Runs that cannot be what they say: times in another unit, plans of other runs, two frameworks in one file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.fitting.fit import OwnRun
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.units import format_step

Array = NDArray[np.float64]

_NEAR = 2.5
"""Factor between a measured time and the predicted one times that of a unit, within which the unit is taken for the cause."""

_FAR = 8.0
"""Factor from which a run is not one of its plan, whatever the framework: the slowest known is a third as fast as the fastest."""

#: measured / predicted -> what was done to the time
_UNITS = (
    (1e3, "in milliseconds", "name the column step_time_ms, or write 4200 ms"),
    (1e-3, "in units of 1,000 seconds, or of 1,000 steps", "write seconds"),
    (1e6, "in microseconds", "write seconds, or 4200000 us"),
    (60.0, "of 60 steps, or in units of a sixtieth of a second", "write seconds of one step"),
    (1 / 60.0, "in minutes", "write seconds"),
    (1 / 3600.0, "in hours", "write seconds"),
)


def check_one_framework(runs: Sequence[OwnRun]) -> None:
    """A profile is of one framework."""
    named: dict[str, str] = {}
    for run in runs:
        if not run.planned.framework.borrows:
            named.setdefault(run.profile, run.id)
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise InputError(f"framework: {first} is of {one}, {second} of {other}; a profile is of one framework: fit each by itself")


def check_times(runs: Sequence[OwnRun], log_errors: Array) -> None:
    """Refuse times that are off by a factor that no framework explains. log_errors: log(predicted / measured)."""
    for run, error in zip(runs, log_errors, strict=True):
        if abs(error) < math.log(_FAR):
            continue
        predicted = format_step(run.measured * math.exp(error))
        said = f"{run.id}: step_time={run.measured:.6g} s: is {_times(error)} the predicted {predicted}"
        for factor, meaning, remedy in (*_UNITS, *_of_chips(run)):
            if abs(-error - math.log(factor)) < math.log(_NEAR) and _is_nearest(-error, factor, run):
                raise InputError(f"{said}; it looks like a time {meaning} ({remedy}), unless its plan is another run's")
        raise InputError(f"{said}, more than frameworks differ; correct its plan, if that is another run's (model, batch, sequence, chips)")


def _of_chips(run: OwnRun) -> tuple[tuple[float, str, str], ...]:
    """Faults of rates: tokens of all chips taken for those of one, and the reverse."""
    chips = float(run.planned.plan.num_chips)
    if chips < _FAR:
        return ()
    return (
        (chips, "from tokens a second of one chip taken for those of all", "name the column tokens_per_s_per_chip"),
        (1 / chips, "from tokens a second of all chips taken for those of one", "name the column tokens_per_s"),
    )


def _is_nearest(log_ratio: float, factor: float, run: OwnRun) -> bool:
    factors = [each[0] for each in (*_UNITS, *_of_chips(run))]
    return abs(log_ratio - math.log(factor)) <= min(abs(log_ratio - math.log(each)) for each in factors) + 1e-12


def _times(error: float) -> str:
    ratio = math.exp(-error)
    return f"{ratio:,.0f} times" if ratio >= 1 else f"1/{1 / ratio:,.0f} of"
