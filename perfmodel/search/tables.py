"""Exact min-sum elimination on dense tables: a tensor contraction in the (min, +) semiring.

R(D) = min over c of [ sum of all factors that contain vertex v, at c and D ]

A vertex without later neighbours gives a number, one with a single later neighbour a vector, one between two others a (min, +) product of
matrices: leaves, chains and trees need no special case. Equal blocks of a graph join the same arrays in the same positions, so their table
is computed once and reused. A join runs tile by tile and holds only the tables, whose size is `EliminationOrder.table_entries`.

Source: Elango, PaSE, IPDPS 2021, equation 4; Dechter, Bucket elimination, Artificial Intelligence 113, 1999.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from perfmodel.search.order import EliminationOrder
from perfmodel.search.problem import Array, Problem

#: Entries of a tile: two float64 buffers of this size fit in the second-level cache.
_TILE = 1 << 16

#: An array and the vertex of each of its axes.
Factor = tuple[Array, tuple[int, ...]]


def solve_by_tables(problem: Problem, order: EliminationOrder) -> list[int]:
    """Return a choice of least cost."""
    buckets, _ = make_tables(problem, order)
    choice = [0] * len(problem.costs)
    for v, _ in reversed(order.steps):
        if len(problem.costs[v]) > 1:
            total = sum(array[tuple(slice(None) if u == v else choice[u] for u in axes)] for array, axes in buckets[v])
            choice[v] = int(np.argmin(total))
    return choice


def make_tables(problem: Problem, order: EliminationOrder) -> tuple[list[list[Factor]], dict[int, Array]]:
    """Return the factors that contain each vertex at its elimination, and the table over its dependent set, if it has one.

    Vertices with one configuration are in no dependent set; their matrices are part of the vectors of the others.
    """
    position = {v: i for i, (v, _) in enumerate(order.steps)}
    memory = _Memory()
    buckets: list[list[Factor]] = [[] for _ in problem.costs]
    tables: dict[int, Array] = {}
    for array, axes in memory.without_single_configurations(problem):
        buckets[min(axes, key=position.__getitem__)].append((array, axes))
    for v, rest in order.steps:
        if rest:
            tables[v] = memory.join(buckets[v], (v, *rest), problem)
            buckets[rest[0]].append((tables[v], rest))
    return buckets, tables


class _Memory:
    """Cache of arrays by the arrays and the operation that they were made from. It keeps its inputs alive, so that ids stay unique."""

    def __init__(self) -> None:
        self.cache: dict[tuple[object, ...], tuple[Array, object]] = {}

    def without_single_configurations(self, problem: Problem) -> list[Factor]:
        """Return the problem's arrays; a matrix with one row or column is added to the vector of its other end."""
        sizes = problem.sizes
        rows: list[list[Factor]] = [[] for _ in sizes]
        factors: list[Factor] = []
        for u, v, matrix in problem.edges:
            if sizes[u] > 1 and sizes[v] > 1:
                factors.append((matrix, (u, v)))
            elif sizes[v] > 1:
                rows[v].append((matrix, (u, v)))
            elif sizes[u] > 1:
                rows[u].append((matrix, (u, v)))
        for v, cost in enumerate(problem.costs):
            key = ("vector", id(cost), *((id(matrix), axes.index(v)) for matrix, axes in rows[v]))
            if key not in self.cache:
                vector = sum((matrix.ravel() for matrix, _ in rows[v]), start=cost)
                self.cache[key] = (vector, (cost, rows[v]))
            factors.append((self.cache[key][0], (v,)))
        return factors

    def join(self, factors: Sequence[Factor], scope: tuple[int, ...], problem: Problem) -> Array:
        """Return the table over scope[1:], minimised over scope[0]."""
        axis_of = {u: i for i, u in enumerate(scope)}
        placed = [(array, tuple(axis_of[u] for u in axes)) for array, axes in factors]
        key = ("join", len(scope), *sorted((axes, id(array)) for array, axes in placed))
        if key not in self.cache:
            self.cache[key] = (min_sum(placed, [len(problem.costs[u]) for u in scope]), factors)
        return self.cache[key][0]


def min_sum(factors: Sequence[tuple[Array, tuple[int, ...]]], shape: Sequence[int]) -> Array:
    """Add up arrays over some axes of `shape` each, and minimise over axis 0."""
    views = []
    for array, axes in factors:
        # all axes of the table in order; those that the array lacks have size 1
        in_order = array.transpose(sorted(range(len(axes)), key=axes.__getitem__))
        views.append(np.expand_dims(in_order, [axis for axis in range(len(shape)) if axis not in axes]))
    views.sort(key=lambda view: view.size)
    if math.prod(shape) <= _TILE:
        total = views[0]
        for view in views[1:]:
            total = total + view
        return np.broadcast_to(total, shape).min(axis=0)
    views = [np.ascontiguousarray(view) for view in views]
    table = np.empty(shape[1:])
    for tile in _tiles(shape[1:]):
        parts = [
            view[(slice(None), *(cut if size > 1 else slice(None) for cut, size in zip(tile, view.shape[1:], strict=True)))]
            for view in views
        ]
        best = table[tile]
        buffer = np.empty(best.shape)
        for label in range(shape[0]):
            total = parts[0][label]
            for part in parts[1:-1]:
                total = total + part[label]
            target = best if label == 0 else buffer
            if len(parts) > 1:
                np.add(total, parts[-1][label], out=target)
            else:
                target[...] = total
            if label > 0:
                np.minimum(best, buffer, out=best)
    return table


def _tiles(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield blocks of at most `_TILE` entries (whole rows of the last axes where they fit) that cover the table."""
    steps = list(shape)
    for axis in range(len(shape)):
        inner = math.prod(shape[axis + 1 :])
        steps[axis] = min(shape[axis], max(1, _TILE // inner))
        if steps[axis] > 1 or inner <= _TILE:
            break
    cuts = [[slice(start, min(start + step, size)) for start in range(0, size, step)] for size, step in zip(shape, steps, strict=True)]
    return itertools.product(*cuts)
