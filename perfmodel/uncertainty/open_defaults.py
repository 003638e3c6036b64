"""Variance of the step time from unknown options of a framework: each option is moved by one standard deviation up and down.

Over so much a step is no straight line: a host that is slower by half holds up a step that does not wait for it now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.frameworks.profile import GENERIC, ExecutionProfile
from perfmodel.parallel.framework_ref import framework_named
from perfmodel.uncertainty.priors import Behaviour

Array = NDArray[np.float64]


def behaviour_changes(
    profile: ExecutionProfile, behaviours: Sequence[Behaviour], log_change: Callable[[Mapping[str, float]], Any]
) -> Iterator[tuple[Behaviour, Array]]:
    """Change of log(step time) with each option one standard deviation higher and lower, within its bounds  [2, runs].

    log_change   of fields of the profile that are moved
    """
    for behaviour in behaviours:
        if framework_named(profile.name) != GENERIC and not profile.option(behaviour.name):
            continue  # its code has none of that
        constant = behaviour.constant(profile)
        values = [min(max(constant.value(spreads), constant.lower), constant.upper) for spreads in (1.0, -1.0)]
        yield behaviour, np.array([log_change(behaviour.moved(profile, value)) for value in values], dtype=np.float64)


def open_variance(
    profile: ExecutionProfile, behaviours: Sequence[Behaviour], log_change: Callable[[Mapping[str, float]], Any]
) -> tuple[Array, Array]:
    """Variance of log(step time) from all of them, towards faster and towards slower steps  [runs]."""
    below, above = np.zeros(()), np.zeros(())
    for _, changes in behaviour_changes(profile, behaviours, log_change):
        below = below + np.maximum(-changes, 0.0).max(axis=0) ** 2
        above = above + np.maximum(changes, 0.0).max(axis=0) ** 2
    return below, above
