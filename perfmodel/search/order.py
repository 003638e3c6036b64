"""In which order to eliminate vertices, and what it will cost: known before any table is made.

Eliminating a vertex joins everything that mentions it into one table over its *dependent set*, the vertices that are its neighbours by
then, and makes them neighbours of each other. The order decides how large those tables get. Three greedy rules are tried and the
cheapest is kept: fewest neighbours (PaSE's GenerateSeq), smallest table, fewest new neighbours.

Source: Elango, PaSE, IPDPS 2021, figure 2; Koller & Friedman, Probabilistic Graphical Models, 2009, section 9.4.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: A join of one vertex costs as much as this many table entries, whatever its size.
_ENTRIES_OF_A_STEP = 20_000.0
#: The rule of fewest new neighbours looks at pairs of neighbours; beyond this many pairs in the graph it is not worth its time.
_MOST_PAIRS = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationOrder:
    """`steps[i]` is a vertex and its dependent set, in the order in which those are eliminated themselves."""

    rule: str
    steps: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def width(self) -> int:
        """The largest dependent set: PaSE's M."""
        return max((len(rest) for _, rest in self.steps), default=0)

    def table_entries(self, sizes: Sequence[int]) -> float:
        """Entries of all tables together, which is what elimination holds at most besides one tile."""
        return math.fsum(math.prod(sizes[u] for u in rest) for _, rest in self.steps)

    def work(self, sizes: Sequence[int]) -> float:
        """Entries looked at: each table times the configurations of the vertex that it eliminates."""
        return math.fsum(math.prod((sizes[u] for u in rest), start=sizes[v]) for v, rest in self.steps)

    def effort(self, sizes: Sequence[int]) -> float:
        """`work` with the fixed cost of a step, in entries."""
        return self.work(sizes) + _ENTRIES_OF_A_STEP * sum(1 for v, _ in self.steps if sizes[v] > 1)


def best_order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], *, is_quick: bool = False) -> EliminationOrder:
    """The cheapest of the greedy orders for vertices with `sizes` configurations; quickly, the order of smallest tables alone.

    A vertex with one configuration has no say in the others' tables.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for u, v in pairs:
        if sizes[u] > 1 and sizes[v] > 1:
            neighbours[u].add(v)
            neighbours[v].add(u)
    logs = [math.log(size) for size in sizes]

    def fewest_neighbours(_: int, around: set[int], __: list[set[int]]) -> float:
        return float(len(around))

    def smallest_table(_: int, around: set[int], __: list[set[int]]) -> float:
        return math.fsum(logs[u] for u in around)

    def fewest_new_pairs(_: int, around: set[int], graph: list[set[int]]) -> float:
        listed = sorted(around)
        return math.fsum(logs[u] * logs[w] for i, u in enumerate(listed) for w in listed[i + 1 :] if w not in graph[u])

    rules: list[tuple[str, Callable[[int, set[int], list[set[int]]], float]]] = [
        ("fewest neighbours", fewest_neighbours),
        ("smallest table", smallest_table),
    ]
    if is_quick:
        return _greedy("smallest table", smallest_table, neighbours)
    found = [_greedy(rule, key, neighbours) for rule, key in rules]
    best = min(found, key=lambda order: order.work(sizes))
    num_pairs = sum(len(around) ** 2 for around in neighbours)
    if best.width > 2 and num_pairs <= _MOST_PAIRS and best.work(sizes) > _ENTRIES_OF_A_STEP * len(sizes):
        best = min(best, _greedy("fewest new neighbours", fewest_new_pairs, neighbours), key=lambda order: order.work(sizes))
    return best


def line_up(num_vertices: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The vertices in an order that keeps neighbours close: as they are numbered, or breadth first from an end, whichever is closer.

    Networks are long and thin, and sweeps carry costs along the order.

    Source: Cuthill & McKee, Reducing the bandwidth of sparse symmetric matrices, ACM National Conference 1969.
    """
    neighbours: list[list[int]] = [[] for _ in range(num_vertices)]
    for u, v in pairs:
        neighbours[u].append(v)
        neighbours[v].append(u)
    reached = [False] * num_vertices
    found: list[int] = []
    for start in range(num_vertices):
        if not reached[start]:
            end = start
            for _ in range(2):  # the last vertex of a walk is an end, the more so the second time
                end = _breadth_first(end, neighbours, [False] * num_vertices)[-1]
            found += _breadth_first(end, neighbours, reached)
    place = {v: i for i, v in enumerate(found)}
    if sum(abs(place[u] - place[v]) for u, v in pairs) < sum(abs(u - v) for u, v in pairs):
        return found
    return list(range(num_vertices))


def _breadth_first(start: int, neighbours: Sequence[Sequence[int]], reached: list[bool]) -> list[int]:
    """The component of `start`, nearest first, of those the ones with fewest neighbours."""
    reached[start] = True
    found = [start]
    for v in found:
        for u in sorted(neighbours[v], key=lambda each: len(neighbours[each])):
            if not reached[u]:
                reached[u] = True
                found.append(u)
    return found


def _greedy(rule: str, key: Callable[[int, set[int], list[set[int]]], float], neighbours: list[set[int]]) -> EliminationOrder:
    """Always the vertex of least `key`, the first of them on a tie; keys are brought up to date where a neighbour was eliminated."""
    graph = [set(around) for around in neighbours]
    keys = [key(v, around, graph) for v, around in enumerate(graph)]
    heap = [(value, v) for v, value in enumerate(keys)]
    heapq.heapify(heap)
    done = [False] * len(graph)
    sequence: list[tuple[int, set[int]]] = []
    while heap:
        value, v = heapq.heappop(heap)
        if done[v] or value != keys[v]:
            continue
        done[v] = True
        around = graph[v]
        sequence.append((v, around))
        for u in around:
            graph[u] |= around
            graph[u] -= {u, v}
        for u in around:
            fresh = key(u, graph[u], graph)
            if fresh != keys[u]:
                keys[u] = fresh
                heapq.heappush(heap, (fresh, u))
    place = {v: i for i, (v, _) in enumerate(sequence)}
    return EliminationOrder(rule=rule, steps=tuple((v, tuple(sorted(around, key=place.__getitem__))) for v, around in sequence))
