"""Plans of serving as columns: one entry a plan, for what evaluates thousands of them at once."""

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
    """The degrees and limits of `ServingPlan`, columns of one length. Pools have no columns."""

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
        """Columns of plans of one engine."""
        columns: dict[str, Any] = {name: np.array([getattr(plan, name) for plan in plans], dtype=np.int64) for name in COLUMNS}
        return cls(engine=plans[0].engine if plans else "", **columns)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def chips_of_stage(self) -> Whole:
        """Over which its experts lie."""
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
        """Columns of some indices, or where a mask holds."""
        columns: dict[str, Any] = {name: getattr(self, name)[which] for name in COLUMNS}
        return ServingColumns(engine=self.engine, **columns)
