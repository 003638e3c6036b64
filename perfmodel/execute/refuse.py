"""Reasons why a plan cannot run on this machine. Pure Python: the demo calls it while it chooses plans."""

from __future__ import annotations

from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.plan import Plan


def executable_reason(plan: Plan, world_devices: int) -> str:
    """Return why this plan cannot run with `world_devices` devices; empty if it can."""
    if plan.num_chips > world_devices:
        return (
            f"chips={plan.num_chips}: this machine has room for {world_devices} ranks; "
            "use --shrink for the same form of plan with fewer ranks and layers"
        )
    return not_executable_reason(plan)
