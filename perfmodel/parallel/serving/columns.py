"""Serving plans as columns with one entry per plan, to evaluate thousands of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.parallel.serving.plan import ServingPlan

Whole = NDArray[np.int64]

COLUMNS = ("tp", "pp", "attention_dp", "ep", "dcp", "pcp", "replicas", "max_batch", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingColumns:
    """Degrees and limits of `ServingPlan` as columns of equal length. Pools have no columns."""

    engine: str
    tp: Whole
    pp: Whole
    attention_dp: Whole
    ep: Whole
    dcp: Whole
    pcp: Whole
    replicas: Whole
    max_batch: Whole
    max_tokens: Whole

    @classmethod
    def of(cls, plans: Sequence[ServingPlan]) -> ServingColumns:
        """Return the columns of plans of one engine."""
        columns: dict[str, Any] = {name: np.array([getattr(plan, name) for plan in plans], dtype=np.int64) for name in COLUMNS}
        return cls(engine=plans[0].engine if plans else "", **columns)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def chips_of_stage(self) -> Whole:
        """Chips of one pipeline stage, over which its experts are sharded."""
        return self.tp * self.pcp * self.attention_dp

    @property
    def chips_per_replica(self) -> Whole:
        return self.chips_of_stage * self.pp

    @property
    def num_chips(self) -> Whole:
        return self.chips_per_replica * self.replicas

    def plan(self, at: int) -> ServingPlan:
        sizes: dict[str, Any] = {name: int(getattr(self, name)[at]) for name in COLUMNS}
        return ServingPlan(engine=self.engine, **sizes)

    def take(self, which: NDArray[Any]) -> ServingColumns:
        """Return the columns at some indices, or where a mask is true."""
        columns: dict[str, Any] = {name: getattr(self, name)[which] for name in COLUMNS}
        return ServingColumns(engine=self.engine, **columns)
