"""Results of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class SearchMethod(StrEnum):
    ELIMINATION = "elimination"
    BOUNDED_ELIMINATION = "bounded elimination"
    BRANCH_AND_BOUND = "branch and bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice of one configuration for every vertex.

    `cost` is the sum of its entries, rounded once. No choice costs less than `lower_bound` (up to rounding). `is_proved` is set where that
    equals `cost`: the choice is optimal. `width` is the largest dependent set of the whole graph and `table_entries` the entries of its
    elimination tables. `kept_entries` is the largest number of entries held, `num_branches` the number of parts of the branch and bound.
    `cut_off` is the reason for an end before a proof: `work limit`, or the user's `time limit`.
    """

    cost: float
    choice: tuple[int, ...]
    lower_bound: float
    is_proved: bool
    method: SearchMethod
    width: int
    table_entries: float
    kept_entries: float
    num_branches: int = 0
    cut_off: str = ""

    @property
    def gap(self) -> float:
        """Gap between the cost and its lower bound, as a share of the cost."""
        if self.is_proved or self.cost == self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / abs(self.cost) if self.cost else math.inf
