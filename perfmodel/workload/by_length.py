"""Quantities of a sequence as functions of its length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from perfmodel.foundation.columns import Column
from perfmodel.workload.causal import CausalWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLength:
    """A quantity of a sequence as a function of its length.

    base * seq_len ** power, times the computed share of the scores under `mask`, for the number of keys `keys` = (base, power)
    """

    base: float = 0.0
    power: int = 0
    mask: CausalWindow | None = None
    keys: tuple[float, int] = (1.0, 0)

    def at(self, seq_len: Column, *, causal: bool = True) -> Any:
        """Return the quantity at a sequence length; without `causal`, all scores count that windows make visible."""
        value = self.base * seq_len**self.power
        if self.mask is None:
            return value
        base, power = self.keys
        mask = self.mask.over(base * seq_len**power)
        return value * (mask.fraction if causal else mask.visible)

    def times(self, factor: float) -> ByLength:
        return replace(self, base=self.base * factor)
