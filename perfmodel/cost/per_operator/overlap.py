"""Exposed time of parameter collectives as a maximum of two lines, which a sum over operators bounds and a search can minimise.

With R the reductions, G the gathers, F and B forward and backward work (all of one micro-batch), s the slow-down of compute by concurrent
communication, e the share of reductions that is always exposed, and l that of scattered ones that wait for the end of backward:

    reductions   max( (1 - (1 - s)(1 - e)) R,  R - (1 - s)(1 - l) B )       if gradients overlap the backward pass, else R
    gathers      max( s G,  G - (1 - s)(F + B) )                            if parameters are prefetched, else G

A maximum of two is at least any mixture of them: for every share x in 0..1

    step >= W + (1 - x) * first + x * second

The right side is a sum over operators. Its minimum over all plans is a bound for every x; the largest of these bounds is the best.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perfmodel.cost.per_operator.operators import StepSetting
from perfmodel.foundation.columns import Column


def exposed_time(*, reductions: Column, gathers: Column, forward: Column, backward: Column, setting: StepSetting) -> Any:
    """Return the exposed time of parameter collectives in a complete plan: for each kind the larger of its two sides. [s]"""
    sides = _sides(reductions=reductions, gathers=gathers, forward=forward, backward=backward, setting=setting)
    return sum(np.maximum(first, second) for first, second in sides)


def mixed_exposure(*, reductions: Column, gathers: Column, forward: Column, backward: Column, share: float, setting: StepSetting) -> Any:
    """Return (1 - share) * (the least exposed time) + share * (the time that exceeds concurrent compute). [s]

    Additive over operators, and at most the exposed time of a complete plan; with the better of share 0 and 1 for each kind it is equal.
    """
    sides = _sides(reductions=reductions, gathers=gathers, forward=forward, backward=backward, setting=setting)
    return sum((1.0 - share) * first + share * second for first, second in sides)


def _sides(*, reductions: Column, gathers: Column, forward: Column, backward: Column, setting: StepSetting) -> list[tuple[Any, Any]]:
    """Return the two sides of each kind of collective."""
    profile = setting.profile
    hidden = 1.0 - profile.timing.compute_slowdown_under_communication
    sides = [(reductions, reductions)]
    if setting.zero in profile.communication.overlaps_gradients:
        late = profile.late_share(setting.zero)
        least = profile.exposed_share(setting.zero)
        sides = [((1.0 - hidden * (1.0 - least)) * reductions, reductions - hidden * (1.0 - late) * backward)]
    if setting.gathers:
        hides = profile.communication.prefetches_parameters
        sides.append(((1.0 - hidden) * gathers, gathers - hidden * (forward + backward)) if hides else (gathers, gathers))
    return sides
