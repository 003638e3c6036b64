"""Input of the search kernel, checked and in normal form: vectors, and one matrix per pair of vertices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.foundation.errors import bad_field

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Edge = tuple[int, int, Array]

#: Finite cost of a forbidden entry (+inf), which no possible choice reaches, as a multiple of the spread of all finite costs.
_FORBIDDEN_SPREADS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Choose one configuration of every vertex so that the sum of its vector and matrix entries is least.

    `edges` has u < v and each pair once; `given_edges` are the edges as passed by the caller. Forbidden entries of `costs` and `edges` are
    replaced by a large finite cost: a choice with a total of at least `forbidden_total` contains one.
    """

    costs: tuple[Array, ...]
    edges: tuple[Edge, ...]
    given_edges: tuple[Edge, ...]
    forbidden_total: float

    @property
    def sizes(self) -> list[int]:
        return [len(cost) for cost in self.costs]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(u, v) for u, v, _ in self.edges]

    def total(self, choice: Sequence[int]) -> float:
        """Return the cost of a choice: its entries added exactly, then rounded once."""
        return math.fsum(self.entries(choice))

    def given_total(self, choice: Sequence[int]) -> float:
        """Return the cost over the edges as passed by the caller: parallel edges are not rounded one by one."""
        costs = [float(cost[label]) for cost, label in zip(self.costs, choice, strict=True)]
        return math.fsum([*costs, *(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.given_edges)])

    def magnitude(self, choice: Sequence[int]) -> float:
        """Return the sum of the absolute entries, to which rounding errors are proportional."""
        return math.fsum(abs(entry) for entry in self.entries(choice))

    def entries(self, choice: Sequence[int]) -> list[float]:
        costs = [float(cost[label]) for cost, label in zip(self.costs, choice, strict=True)]
        return costs + [float(matrix[choice[u], choice[v]]) for u, v, matrix in self.edges]

    def renumbered(self, sequence: Sequence[int]) -> Problem:
        """Return the same problem with vertex sequence[i] as number i."""
        if list(sequence) == list(range(len(self.costs))):
            return self
        number = {v: i for i, v in enumerate(sequence)}
        turned: dict[int, Array] = {}  # equal objects stay equal objects
        edges = []
        for u, v, matrix in self.edges:
            if number[u] < number[v]:
                edges.append((number[u], number[v], matrix))
            else:
                edges.append((number[v], number[u], turned.setdefault(id(matrix), matrix.T)))
        costs = tuple(self.costs[v] for v in sequence)
        return Problem(costs=costs, edges=tuple(edges), given_edges=(), forbidden_total=self.forbidden_total)

    def restrict(self, kept: Sequence[Labels], cache: dict[tuple[int, bytes, bytes], Array] | None = None) -> Problem:
        """Return the problem with only the configurations `kept` of each vertex. Equal objects stay equal, so blocks stay recognisable."""
        cache = {} if cache is None else cache
        unchanged = [len(labels) == len(cost) for labels, cost in zip(kept, self.costs, strict=True)]
        names = [labels.tobytes() for labels in kept]

        def part(array: Array, u: int, v: int) -> Array:
            if unchanged[u] and unchanged[v]:
                return array
            key = (id(array), names[u], names[v] if v != u else b"")
            if key not in cache:
                cache[key] = array[kept[u]] if v == u else array[kept[u][:, None], kept[v]]
            return cache[key]

        return Problem(
            costs=tuple(part(cost, v, v) for v, cost in enumerate(self.costs)),
            edges=tuple((u, v, part(matrix, u, v)) for u, v, matrix in self.edges),
            given_edges=(),
            forbidden_total=self.forbidden_total,
        )


def read_problem(vertex_costs: Sequence[ArrayLike], edges: Sequence[tuple[int, int, ArrayLike]]) -> Problem:
    """Check the input of `eliminate` and return the problem; the error names the first array that breaks a rule."""
    reader = Reader()
    costs = [reader.vector(v, cost) for v, cost in enumerate(vertex_costs)]
    merged: dict[tuple[int, int], Array] = {}
    turned: dict[int, Array] = {}
    given: list[Edge] = []
    for index, edge in enumerate(edges):
        u, v, matrix = reader.edge(index, edge, costs)
        given.append((u, v, matrix))
        if u > v:
            u, v, matrix = v, u, turned.setdefault(id(matrix), matrix.T)
        merged[u, v] = merged[u, v] + matrix if (u, v) in merged else matrix
    return reader.finish(costs, merged, tuple(given))


class Reader:
    """Check of arrays, each object once; collects the spread of the finite costs. `vectors`, `matrices`: argument names for messages."""

    def __init__(self, vectors: str = "vertex_costs", matrices: str = "edges") -> None:
        self.vectors, self.matrices = vectors, matrices
        self.known: dict[int, tuple[object, Array]] = {}  # keeps its inputs alive, so that ids stay unique
        self.spread_of: dict[int, float] = {}
        self.has_forbidden: set[int] = set()

    def vector(self, v: int, given: ArrayLike) -> Array:
        cost = self.array(f"{self.vectors}[{v}]", given, dims=1)
        if len(cost) == 0:
            raise bad_field(
                f"vertex_costs[{v}]", "[]", "a vertex needs at least one configuration", "give one cost for each, or drop the vertex"
            )
        if not np.isfinite(cost).any():
            raise bad_field(
                f"vertex_costs[{v}]", "inf", "no choice is possible: every configuration is forbidden", "leave one that is finite"
            )
        return cost

    def edge(self, index: int, edge: tuple[int, int, ArrayLike], costs: Sequence[Array]) -> tuple[int, int, Array]:
        field = f"{self.matrices}[{index}]"
        try:
            u, v, given = edge
        except (TypeError, ValueError):
            raise bad_field(field, edge, "an edge is (u, v, matrix)", "give two vertices and a matrix") from None
        for end in (u, v):
            if isinstance(end, bool) or not isinstance(end, int | np.integer):
                raise bad_field(field, end, "the ends of an edge are vertex numbers", "give two integers")
            if not 0 <= end < len(costs):
                raise bad_field(field, end, f"there is no such vertex among {len(costs)}", f"use 0 to {len(costs) - 1}")
        u, v = int(u), int(v)
        if u == v:
            raise bad_field(field, f"({u}, {v})", "an edge joins two different vertices", "add its diagonal to the vertex's own costs")
        matrix = self.array(field, given, dims=2)
        if matrix.shape != (len(costs[u]), len(costs[v])):
            raise bad_field(
                field,
                f"matrix {matrix.shape}",
                f"vertices {u} and {v} have {len(costs[u])} and {len(costs[v])} configurations",
                "give matrix[cu, cv]",
            )
        return u, v, matrix

    def array(self, field: str, given: ArrayLike, *, dims: int) -> Array:
        if id(given) in self.known:
            array = self.known[id(given)][1]
        else:
            try:
                array = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError):
                raise bad_field(field, given, "costs are real numbers in a rectangular array", "give float64") from None
            self.known[id(given)] = (given, array)
        if array.ndim != dims:
            raise bad_field(field, f"{array.ndim} dims", f"this is a {'vector' if dims == 1 else 'matrix'}", f"give {dims}")
        if id(array) not in self.spread_of and array.size:
            low, high = float(array.min()), float(array.max())
            if math.isnan(low) or math.isnan(high):
                raise bad_field(field, "nan", "a cost is a number", "use inf for a forbidden entry")
            if low == -math.inf:
                raise bad_field(field, "-inf", "a cost has a lower bound", "use inf for a forbidden entry")
            if high == math.inf:
                self.has_forbidden.add(id(array))
                finite = array[np.isfinite(array)]
                low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
            self.spread_of[id(array)] = max(abs(low), abs(high), high - low)
        return array

    def finish(self, costs: list[Array], merged: dict[tuple[int, int], Array], given: tuple[Edge, ...]) -> Problem:
        if not self.has_forbidden:
            edges = tuple((u, v, matrix) for (u, v), matrix in merged.items())
            return Problem(costs=tuple(costs), edges=edges, given_edges=given, forbidden_total=math.inf)
        arrays = [*costs, *merged.values()]
        for array in arrays:
            if id(array) not in self.spread_of:  # the sum of two edges
                self.spread_of[id(array)] = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
        spread = math.fsum(self.spread_of[id(array)] for array in arrays)
        stand_in = _FORBIDDEN_SPREADS * spread + 1.0
        if not math.isfinite(stand_in * (len(costs) + len(merged))):
            raise bad_field("vertex_costs", spread, "finite costs must leave room to be added to forbidden ones", "use smaller units")
        replaced: dict[int, Array] = {}

        def finite(array: Array) -> Array:
            if id(array) not in replaced:
                replaced[id(array)] = np.where(np.isinf(array), stand_in, array) if np.isinf(array).any() else array
            return replaced[id(array)]

        return Problem(
            costs=tuple(finite(cost) for cost in costs),
            edges=tuple((u, v, finite(matrix)) for (u, v), matrix in merged.items()),
            given_edges=given,
            forbidden_total=stand_in - spread,
        )
