"""Elimination of configurations that another one of the same vertex replaces at no cost, whatever the neighbours choose.

b replaces a at vertex v if   cost(b) - cost(a) + sum over edges of max over c_u of [ M(b, c_u) - M(a, c_u) ]  <=  0

Bounds (`bounds.py`) drop worse configurations but not equal ones, of which symmetric strategies have many. This module drops those.

Source: Goldstein, Efficient rotamer elimination, Biophysical Journal 66, 1994 (dead-end elimination).
"""

from __future__ import annotations

import numpy as np

from perfmodel.search.problem import Array, Labels, Problem

#: Largest number of entries of a comparison of all pairs of configurations; vertices that need more are skipped.
_MOST_ENTRIES = 1 << 19


def undominated(problem: Problem) -> list[Labels]:
    """Return the configurations of each vertex that no other replaces; of equal ones the first. Some optimal choice uses only these."""
    kept: list[Labels] = [np.arange(size) for size in problem.sizes]
    around: list[list[tuple[int, Array]]] = [[] for _ in problem.costs]
    for u, v, matrix in problem.edges:
        around[u].append((v, matrix))
        around[v].append((u, matrix.T))
    for v, cost in enumerate(problem.costs):
        size = len(cost)
        if size < 2 or size * size * max([len(kept[u]) for u, _ in around[v]], default=1) > _MOST_ENTRIES:
            continue
        excess = cost[None, :] - cost[:, None]  # [a, b]: upper bound of the extra cost of b instead of a
        for u, matrix in around[v]:
            rows = matrix[:, kept[u]]
            excess = excess + (rows[None, :, :] - rows[:, None, :]).max(axis=2)
        replaces = (excess < 0) | ((excess == 0) & (excess.T > 0)) | ((excess == 0) & (excess.T == 0) & np.tri(size, k=-1, dtype=bool))
        left = np.flatnonzero(~replaces.any(axis=1))
        kept[v] = left if len(left) else kept[v]  # rounding might make replacement circular
    return kept
