"""Attention of a sequence that several ranks share: work of the slowest rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column
from perfmodel.frameworks.options import HEAD_TAIL
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.workload.causal import CausalWindow

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBehaviour:
    """How context-parallel ranks share the work of fused attention.

    mask                   None: every query sees every key
    shared_rate_fraction   rate of the kernel with shared queries over its rate without
    """

    mask: CausalWindow | None
    is_head_tail: bool
    shared_rate_fraction: float

    def fraction(self, num_keys: Column) -> Any:
        """Return the computed share of the full square of scores."""
        return 1.0 if self.mask is None else self.mask.over(num_keys).fraction


def attention_behaviours(mask: CausalWindow | None, profile: ExecutionProfile) -> AttentionBehaviour:
    return AttentionBehaviour(
        mask=mask,
        is_head_tail=profile.communication.context_chunks == HEAD_TAIL,
        shared_rate_fraction=profile.kernels.context_attention_rate_fraction,
    )


SHARED_BLOCK = 32768.0
"""Keys of a rank's block in the runs that measured the slow-down of attention with shared queries (torchtitan's, December 2024)."""


def attention_share(behaviours: AttentionBehaviour, num_chunks: Array, num_keys: Array) -> Array:
    """Return the scores that the slowest rank of fused attention computes, over the square of its queries and all keys. [-]

    num_chunks  ranks that share the queries of a sequence
    num_keys    of the sequence

    A lower kernel rate with shared queries is modelled as more scores at the full rate. The overhead (sending blocks, merging partial
    results) grows with the length of a block, and the scores with its square. Long blocks therefore amortise it.
    """
    seen = 1.0 if behaviours.mask is None else behaviours.mask.over(num_keys).seen_by_slowest(num_chunks, head_tail=behaviours.is_head_tail)
    overhead = (1.0 / behaviours.shared_rate_fraction - 1.0) * np.minimum(1.0, SHARED_BLOCK * num_chunks / num_keys)
    return np.asarray(np.where(num_chunks > 1.0, seen * (1.0 + overhead), seen))
