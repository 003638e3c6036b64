"""Variance of the step time from unknown options of a framework: each option is moved by one standard deviation up and down.

The step time is not linear over that range: a host 50% slower can become the bottleneck of a step that is compute-bound now.
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
    """Yield the change of log(step time) with each option one standard deviation higher and lower, within its bounds  [2, runs].

    log_change   change of log(step time) for changed profile fields
    """
    for behaviour in behaviours:
        if framework_named(profile.name) != GENERIC and not profile.option(behaviour.name):
            continue  # the framework's code lacks this behaviour
        constant = behaviour.constant(profile)
        changes = [log_change(behaviour.moved(profile, constant.value(spreads))) for spreads in (1.0, -1.0)]
        yield behaviour, np.array(changes, dtype=np.float64)


def open_variance(
    profile: ExecutionProfile, behaviours: Sequence[Behaviour], log_change: Callable[[Mapping[str, float]], Any]
) -> tuple[Array, Array]:
    """Return the variance of log(step time) from all options, towards faster and towards slower steps  [runs]."""
    below, above = np.zeros(()), np.zeros(())
    for _, changes in behaviour_changes(profile, behaviours, log_change):
        below = below + np.maximum(-changes, 0.0).max(axis=0) ** 2
        above = above + np.maximum(changes, 0.0).max(axis=0) ** 2
    return below, above
