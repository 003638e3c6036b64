"""Offload to host memory: transfers, and the bytes that a chip holds during them.

Transfers overlap with compute (pinned buffers, a separate stream): a layer's pass takes at least as long as its transfers. Conditions and
figures: Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), section 4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from perfmodel.cost.microbatch import MicrobatchCost
from perfmodel.cost.program import SAVED
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.layout import Recompute

IN_FLIGHT = 2.0
"""Layers whose saved activations are on the chip: the one that runs, and the one in transfer."""


@lru_cache(maxsize=64)
def on_chip(profile: ExecutionProfile) -> ExecutionProfile:
    """Return the profile without offloading."""
    return profile.having(offloads_checkpoints=False, offloads_activations=False, offloads_optimizer=False, offloads_parameters=False)


def offloads_saved(profile: ExecutionProfile, recompute: Recompute) -> bool:
    """Return whether saved activations of layers are offloaded to host memory."""
    return profile.activations.offloads_activations or (profile.activations.offloads_checkpoints and recompute is Recompute.FULL)


def carried_bytes(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> Any:
    """Return the bytes that a region offloads in a forward pass and fetches in a backward pass; None if it offloads nothing."""
    if not micro.program.regions[region].is_block or not offloads_saved(profile, recompute):
        return None
    return kept_bytes(micro, recompute, region)


def kept_bytes(micro: MicrobatchCost, recompute: Recompute, region: int) -> Any:
    """Return the saved activation memory of one pass of a region. [byte]"""
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
    """Return the bytes of a parameter transferred per step if the host runs the optimizer: gradient to the host, new weight back."""
    return gradient + weight
