"""Lower bound of every choice by a linear relaxation: messages along edges until the bound converges.

Subtract `p_u(c_u)` from an edge's matrix and add it to the vector of u: the total of every choice stays the same. The relaxation does so,
vertex by vertex, until each vector and matrix is non-negative with a least entry of zero. The amount taken out, `constant`, is the bound.

    visit v:   d(c) = min over c_u of [ M(c_u, c) - p_u(c_u) - p_v(c) ]       for each edge (u, v) from an earlier vertex u
               p_v += d;  a_v += sum of d;  constant += min a_v;  a_v -= min a_v
               now every total with configuration c of v is at least  constant + a_v(c)
               a_v is then distributed over the edges to later vertices: p_v -= a_v / max(earlier, later)

Sweeps alternate in direction, and the bound never falls. They are exact on trees; elsewhere the bound may converge below the optimum.

Source: Kolmogorov, A new look at reweighted message passing, IEEE TPAMI 37(5), 2015 (SRMP); the same as TRW-S (2006) on pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.search.problem import Array, Labels, Problem

#: Share of its configurations that a vertex must lose before its matrices are copied; less does not pay.
_WORTH_CUTTING = 0.25


class Relaxation:
    """State of the sweeps over one problem, after the first.

    `constant` is a lower bound of every choice. After one more sweep, `bounds[v][c]` bounds choices with configuration `labels[v][c]`.
    """

    __slots__ = ("bounds", "constant", "direction", "edges", "from_low", "from_high", "labels", "problem", "to_high", "to_low", "vectors")

    def __init__(self, problem: Problem, labels: Sequence[Labels]) -> None:
        self.problem = problem
        self.labels: list[Labels] = list(labels)
        self.vectors: list[Array] = [cost.copy() for cost in problem.costs]
        self.from_low: list[Array] = [np.zeros(len(problem.costs[u])) for u, _, _ in problem.edges]
        self.from_high: list[Array] = [np.zeros(len(problem.costs[v])) for _, v, _ in problem.edges]
        self.to_high: list[list[int]] = [[] for _ in problem.costs]
        self.to_low: list[list[int]] = [[] for _ in problem.costs]
        for edge, (u, v, _) in enumerate(problem.edges):
            self.to_high[u].append(edge)
            self.to_low[v].append(edge)
        self.constant = 0.0
        self.bounds: list[Array] = [np.zeros(len(cost)) for cost in problem.costs]
        self.direction = 1
        self.sweep()  # bounds are valid only after every edge was visited once

    def sweep(self) -> list[int]:
        """Sweep once and return the suggested choice: each vertex is best given the earlier choices and the messages of the others."""
        choice = [0] * len(self.vectors)
        forward = self.direction > 0
        edges, costs, vectors = self.problem.edges, self.problem.costs, self.vectors
        ahead, behind = (self.to_high, self.to_low) if forward else (self.to_low, self.to_high)
        mine, theirs = (self.from_high, self.from_low) if forward else (self.from_low, self.from_high)  # of edges to earlier vertices
        far = 0 if forward else 1
        for v in range(len(vectors)) if forward else range(len(vectors) - 1, -1, -1):
            vector, promise = vectors[v], costs[v].copy()
            for edge in ahead[v]:
                promise += theirs[edge]
            for edge in behind[v]:
                ends = edges[edge]
                matrix = ends[2] if forward else ends[2].T
                gain = (matrix - theirs[edge][:, None]).min(axis=0)
                vector += gain
                vector -= mine[edge]
                mine[edge] = gain
                promise += matrix[choice[ends[far]]]
            choice[v] = int(promise.argmin())
            least = float(vector.min())
            vector -= least
            self.constant += least
            self.bounds[v] = vector + self.constant
            if ahead[v]:
                parts = max(len(ahead[v]), len(behind[v]))
                share = vector / parts
                for edge in ahead[v]:
                    theirs[edge] -= share
                vectors[v] = vector * (1.0 - len(ahead[v]) / parts)
        self.direction = -self.direction
        return choice

    @property
    def entries(self) -> int:
        """Numbers that this state holds, its matrices among them."""
        vectors = sum(map(len, [*self.vectors, *self.bounds, *self.labels, *self.from_low, *self.from_high]))
        return vectors + sum(matrix.size for _, _, matrix in self.problem.edges)

    def survivors(self, limit: float) -> list[Labels]:
        """Positions of the configurations that may be part of a choice of at most `limit`."""
        return [np.flatnonzero(bound <= limit) for bound in self.bounds]

    def cut(self, kept: list[Labels]) -> bool:
        """Drop configurations; a vertex that keeps nearly all keeps all. Return whether any was dropped."""
        unchanged = [len(new) > (1.0 - _WORTH_CUTTING) * len(old) and len(old) > 2 for new, old in zip(kept, self.labels, strict=True)]
        unchanged = [same or len(labels) == len(old) for same, labels, old in zip(unchanged, kept, self.labels, strict=True)]
        if all(unchanged):
            return False
        kept = [np.arange(len(before)) if same else labels for same, labels, before in zip(unchanged, kept, self.labels, strict=True)]
        self.problem = self.problem.restrict(kept)
        for v, labels in enumerate(kept):
            if not unchanged[v]:
                self.labels[v] = self.labels[v][labels]
                self.vectors[v] = self.vectors[v][labels]
                self.bounds[v] = self.bounds[v][labels]
                for edge in self.to_high[v]:
                    self.from_low[edge] = self.from_low[edge][labels]
                for edge in self.to_low[v]:
                    self.from_high[edge] = self.from_high[edge][labels]
        return True

    def fork(self) -> Relaxation:
        """Return an independent copy."""
        twin = object.__new__(Relaxation)
        twin.problem, twin.labels, twin.constant, twin.direction = self.problem, list(self.labels), self.constant, self.direction
        twin.to_high, twin.to_low, twin.bounds = self.to_high, self.to_low, list(self.bounds)
        twin.vectors = [vector.copy() for vector in self.vectors]
        twin.from_low = [taken.copy() for taken in self.from_low]
        twin.from_high = [taken.copy() for taken in self.from_high]
        return twin
