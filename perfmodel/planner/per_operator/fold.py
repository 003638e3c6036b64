"""Folding of repeated layers: vertices that must choose alike become one.

A network of 80 equal layers has 80 times the vertices of one layer. If all layers choose alike, the i-th operators of all layers become
one vertex with the sum of their costs. A tensor from one layer to the next becomes an edge from that vertex to the layer's own input.
Nothing is approximated: the folded cost of a choice is the network's cost of the plan that repeats it. Plans in which layers differ are
excluded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.planner.per_operator.space import NetworkSpace

Array = NDArray[np.float64]
Edge = tuple[int, int, Array]

_NUMBERED = re.compile(r"^(.*?)(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedEdges:
    """Edges after folding. between: (u, v, matrix) of folded vertices; within: (folded vertex, vector) of pairs inside one vertex."""

    between: list[Edge]
    within: list[tuple[int, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Map between vertices and folded ones. of[v]: the folded vertex of v; first[f]: the first vertex of f."""

    of: tuple[int, ...]
    first: tuple[int, ...]

    def unfold(self, choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(choice[folded] for folded in self.of)

    def edges(self, edges: Sequence[Edge]) -> FoldedEdges:
        """Return the matrices between folded vertices, and the vectors of pairs within one of them."""
        within: list[tuple[int, Array]] = []
        matrices: dict[tuple[int, int], dict[int, tuple[float, Array]]] = {}
        for u, v, matrix in edges:
            a, b = self.of[u], self.of[v]
            if a == b:
                within.append((a, np.ascontiguousarray(matrix.diagonal())))
            else:
                _count(matrices.setdefault((a, b), {}), matrix)
        return FoldedEdges(between=[(a, b, _sum(counted)) for (a, b), counted in matrices.items()], within=within)

    def costs(self, costs: Sequence[Array], within: Sequence[tuple[int, Array]] = ()) -> list[Array]:
        """Return a vector per folded vertex: the sum over its vertices and the pairs within it."""
        counted: list[dict[int, tuple[float, Array]]] = [{} for _ in self.first]
        for v, cost in enumerate(costs):
            _count(counted[self.of[v]], cost)
        for folded, diagonal in within:
            _count(counted[folded], diagonal)
        return [_sum(vectors) for vectors in counted]

    def problem(self, costs: Sequence[Array], edges: Sequence[Edge]) -> tuple[list[Array], list[Edge]]:
        """Return the vectors and matrices of the folded problem."""
        folded = self.edges(edges)
        return self.costs(costs, folded.within), folded.between


def _count(counted: dict[int, tuple[float, Array]], array: Array) -> None:
    times, kept = counted.get(id(array), (0.0, array))
    counted[id(array)] = (times + 1.0, kept)


def _sum(counted: dict[int, tuple[float, Array]]) -> Array:
    (times, total), *others = counted.values()
    result = total if times == 1.0 else times * total
    for times, array in others:
        result = result + times * array
    return result


def unfolded(num_vertices: int) -> Fold:
    """Return the fold in which every vertex stays separate."""
    return Fold(of=tuple(range(num_vertices)), first=tuple(range(num_vertices)))


def fold_layers(space: NetworkSpace) -> Fold:
    """Fold operators whose names differ only in the layer's number, and held tensors that such operators read first.

    They must have the same configurations. Layers are identified by `Operator.layer`: a name that ends in a number.
    """
    network = space.network
    keys: list[object] = []
    for operator, rows in zip(network.operators, space.operators, strict=True):
        family = _NUMBERED.match(operator.layer)
        if family is None:
            keys.append(("own", operator.name))
        else:
            keys.append((family[1], operator.name.removeprefix(operator.layer), id(rows)))
    readers = network.readers()
    for tensor, rows in zip(space.held, space.layouts, strict=True):
        index, position = readers[tensor][0]
        key = keys[index]
        keys.append(("held", key, position, id(rows)))
    numbers: dict[object, int] = {}
    first: list[int] = []
    of = []
    for vertex, key in enumerate(keys):
        if key not in numbers:
            numbers[key] = len(numbers)
            first.append(vertex)
        of.append(numbers[key])
    return Fold(of=tuple(of), first=tuple(first))
