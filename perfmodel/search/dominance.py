"""Configurations that another one of the same vertex replaces at no cost, whatever the neighbours choose.

b replaces a at vertex v if   cost(b) - cost(a) + sum over edges of max over c_u of [ M(b, c_u) - M(a, c_u) ]  <=  0

Bounds (`bounds.py`) drop what is worse; they cannot tell equals apart, and symmetric strategies have many. This does.

Source: Goldstein, Efficient rotamer elimination, Biophysical Journal 66, 1994 (dead-end elimination).
"""

from __future__ import annotations

import numpy as np

from perfmodel.search.problem import Array, Labels, Problem

#: Entries that a comparison of all pairs of configurations may take at once; a vertex that would need more is left as it is.
_MOST_ENTRIES = 1 << 19


def undominated(problem: Problem) -> list[Labels]:
    """The configurations of each vertex that no other replaces, of equals the first. Some choice of least cost has no others."""
    kept: list[Labels] = [np.arange(size) for size in problem.sizes]
    around: list[list[tuple[int, Array]]] = [[] for _ in problem.costs]
    for u, v, matrix in problem.edges:
        around[u].append((v, matrix))
        around[v].append((u, matrix.T))
    for v, cost in enumerate(problem.costs):
        size = len(cost)
        if size < 2 or size * size * max([len(kept[u]) for u, _ in around[v]], default=1) > _MOST_ENTRIES:
            continue
        excess = cost[None, :] - cost[:, None]  # [a, b]: what choosing b instead of a costs at most
        for u, matrix in around[v]:
            rows = matrix[:, kept[u]]
            excess = excess + (rows[None, :, :] - rows[:, None, :]).max(axis=2)
        replaces = (excess < 0) | ((excess == 0) & (excess.T > 0)) | ((excess == 0) & (excess.T == 0) & np.tri(size, k=-1, dtype=bool))
        left = np.flatnonzero(~replaces.any(axis=1))
        kept[v] = left if len(left) else kept[v]  # rounding might close a circle
    return kept
