"""Starting profile of a fit: the source of its priors."""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.cost.resolve import CPU_PROFILE
from perfmodel.fitting.fit import UserRun
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile, load_profile
from perfmodel.validation.run_machine import cluster_of_run


def base_of(runs: Sequence[UserRun], requested: ExecutionProfile | None) -> ExecutionProfile:
    """Return the requested profile, else that of the one known framework that the runs name, else the profile of CPUs or `generic`."""
    if requested is not None:
        return requested
    named = {run.profile for run in runs if not run.planned.framework.borrows}
    if len(named) == 1:
        return load_profile(named.pop())
    if all(cluster_of_run(run.planned.hardware).chip.units.unit_kind == "core" for run in runs):
        return load_profile(CPU_PROFILE)
    return load_profile(GENERIC)
