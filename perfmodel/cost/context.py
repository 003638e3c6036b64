"""Attention of a sequence that ranks share: what the slowest of them does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.parallel.profile import HEAD_TAIL, ExecutionProfile
from perfmodel.workload.causal import CausalMask

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHabits:
    """How ranks that share the queries of a sequence share the work of fused attention.

    mask                   None: every query sees every key
    shared_rate_fraction   rate of its kernel there over that where they do not
    """

    mask: CausalMask | None
    is_head_tail: bool
    shared_rate_fraction: float

    @property
    def fraction(self) -> float:
        """Share of the whole square that is computed."""
        return 1.0 if self.mask is None else self.mask.fraction


def attention_habits(mask: CausalMask | None, profile: ExecutionProfile) -> AttentionHabits:
    return AttentionHabits(
        mask=mask,
        is_head_tail=profile.context_chunks == HEAD_TAIL,
        shared_rate_fraction=profile.context_attention_rate_fraction,
    )


def attention_share(habits: AttentionHabits, num_chunks: Array) -> Array:
    """Scores that the slowest rank of fused attention computes, over the square of its queries and all keys. [-]

    num_chunks  ranks that share the queries of a sequence

    A kernel that reaches less of its rate where queries are shared is one that computes more of them at its own.
    """
    seen = 1.0 if habits.mask is None else habits.mask.seen_by_slowest(num_chunks, head_tail=habits.is_head_tail)
    return np.asarray(np.where(num_chunks > 1.0, seen / habits.shared_rate_fraction, seen))
