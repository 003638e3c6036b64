"""Offload to host memory: transfers there and back, and what a chip holds meanwhile.

Transfers run beside compute (pinned buffers, a stream of their own): a layer's pass takes no less than they do. Conditions and figures:
Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), section 4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from perfmodel.cost.microbatch import MicrobatchCost
from perfmodel.cost.program import SAVED
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.layout import Recompute

IN_FLIGHT = 2.0
"""Layers whose kept activations a chip holds: those at work, and those that are on their way."""


@lru_cache(maxsize=64)
def on_chip(profile: ExecutionProfile) -> ExecutionProfile:
    """The profile with everything in the chips' own memory."""
    return profile.having(offloads_checkpoints=False, offloads_activations=False, offloads_optimizer=False, offloads_parameters=False)


def carries_kept(profile: ExecutionProfile, recompute: Recompute) -> bool:
    """Whether what layers keep for backward waits in the host's memory."""
    return profile.activations.offloads_activations or (profile.activations.offloads_checkpoints and recompute is Recompute.FULL)


def carried_bytes(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> Any:
    """Bytes that a region sends to the host's memory in a forward pass and fetches in a backward pass; None where it sends nothing."""
    if not micro.program.regions[region].is_block or not carries_kept(profile, recompute):
        return None
    return kept_bytes(micro, recompute, region)


def kept_bytes(micro: MicrobatchCost, recompute: Recompute, region: int) -> Any:
    """Bytes that one pass of a region keeps for backward. [byte]"""
    rows = len(SAVED)
    keep, dropped, boundary, entering = (micro.saved[region * rows + i] for i in range(rows))
    match recompute:
        case Recompute.NONE:
            return (keep + boundary) + dropped
        case Recompute.SELECTIVE:
            return keep + boundary
        case Recompute.FULL:
            return boundary + entering


def hosted_bytes(gradient: float, weight: float) -> float:
    """Bytes of a parameter that travel once a step where the host runs the optimizer: its gradient there, the new weight back."""
    return gradient + weight
