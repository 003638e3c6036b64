"""Offload to host memory: transfers, and the bytes that a chip holds during them.

Transfers overlap with compute (pinned buffers, a separate stream): a layer's pass takes at least as long as its transfers. Conditions and
figures: Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), section 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.microbatch import MicrobatchCost
from perfmodel.cost.program import SAVED
from perfmodel.cost.stages import block_rows
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.layout import Recompute

IN_FLIGHT = 2.0
"""Layers whose saved activations are on the chip: the one that runs, and the one in transfer."""


@session_cache(maxsize=64)
def on_chip(profile: ExecutionProfile) -> ExecutionProfile:
    """Return the profile without offloading."""
    return profile.having(offloads_checkpoints=False, offloads_activations=False, offloads_optimizer=False, offloads_parameters=False)


def offloads_saved(profile: ExecutionProfile, recompute: Recompute) -> bool:
    """Return whether saved activations of layers are offloaded to host memory."""
    return profile.activations.offloads_activations or (profile.activations.offloads_checkpoints and recompute is Recompute.FULL)


def saved_classes(micro: MicrobatchCost) -> NDArray[np.float64]:
    """Return the bytes of saved tensors, [classes of `SAVED`, regions, rows]."""
    return micro.saved.reshape(-1, len(SAVED), micro.saved.shape[-1]).swapaxes(0, 1)


def kept_bytes(micro: MicrobatchCost, recompute: Recompute) -> NDArray[np.float64]:
    """Return [regions, rows] saved activation memory of one pass of each region; only blocks are recomputed. [byte]"""
    keep, dropped, boundary, entering, _ = saved_classes(micro)
    kept = (keep + boundary) + dropped
    if recompute is Recompute.NONE:
        return kept
    return np.where(block_rows(micro.program.regions), keep + boundary if recompute is Recompute.SELECTIVE else boundary + entering, kept)


def hosted_bytes(gradient: float, weight: float) -> float:
    """Return the bytes of a parameter transferred per step if the host runs the optimizer: gradient to the host, new weight back."""
    return gradient + weight
