"""Expected step time over the known frameworks, for a framework that is unknown."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assemble import step_columns
from perfmodel.cost.estimate import Estimator
from perfmodel.frameworks.ensemble import WeightedProfile
from perfmodel.parallel.plan import Plan
from perfmodel.uncertainty.sensitivity import at_profile

Array = NDArray[np.float64]


def expected_times(estimator: Estimator, plans: Sequence[Plan], ensemble: Sequence[WeightedProfile]) -> Array:
    """Return E t = sum_k w_k t(plan; profile k) of each plan. [s]"""
    batches: dict[Hashable, list[int]] = {}
    for index, plan in enumerate(plans):
        program = (  # plans of one program are its columns
            plan.sharding, plan.attention, plan.recompute, plan.recompute_operators, int(plan.zero), plan.layout.pp > 1, plan.schedule,
            plan.order, plan.ep, plan.etp, plan.dispatcher,
        )  # fmt: skip
        batches.setdefault(program, []).append(index)
    times = np.zeros(len(plans))
    for member in ensemble:
        member_estimator = at_profile(estimator, member.profile)
        for indices in batches.values():
            times[indices] += member.weight * np.asarray(step_columns(member_estimator, [plans[index] for index in indices]).step_time)
    return times
