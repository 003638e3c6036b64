"""The profile that a fit starts from: what is believed of a framework before its runs say anything."""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.cost.resolve import CPU_PROFILE
from perfmodel.fitting.fit import OwnRun
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile, load_profile
from perfmodel.validation.run_machine import cluster_of_run


def base_of(runs: Sequence[OwnRun], asked: ExecutionProfile | None) -> ExecutionProfile:
    """The one that is asked for; else the profile of the framework that the runs name, if it is known; else nobody's in particular."""
    if asked is not None:
        return asked
    named = {run.profile for run in runs if not run.planned.framework.borrows}
    if len(named) == 1:
        return load_profile(named.pop())
    if all(cluster_of_run(run.planned.hardware).chip.unit_kind == "core" for run in runs):
        return load_profile(CPU_PROFILE)
    return load_profile(GENERIC)
