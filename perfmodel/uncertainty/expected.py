"""The time that a step is expected to take, over what is not known of the framework that runs it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assemble import step_columns
from perfmodel.cost.estimate import Estimator
from perfmodel.frameworks.ensemble import Likely
from perfmodel.parallel.plan import Plan
from perfmodel.uncertainty.sensitivity import at_profile

Array = NDArray[np.float64]


def expected_times(estimator: Estimator, plans: Sequence[Plan], likely: Sequence[Likely]) -> Array:
    """E t = sum_k w_k t(plan; profile k)   [s] of each plan."""
    batches: dict[Hashable, list[int]] = {}
    for place, plan in enumerate(plans):
        batches.setdefault(_shared(plan), []).append(place)
    times = np.zeros(len(plans))
    for each in likely:
        other = at_profile(estimator, each.profile)
        for places in batches.values():
            times[places] += each.weight * np.asarray(step_columns(other, [plans[place] for place in places]).step_time)
    return times


def _shared(plan: Plan) -> Hashable:
    """Key of plans that are columns of one program."""
    return (
        plan.rules, plan.attention, plan.recompute, plan.recompute_operators, int(plan.zero), plan.layout.pp > 1, plan.schedule,
        plan.order, plan.ep, plan.etp, plan.dispatcher,
    )  # fmt: skip
