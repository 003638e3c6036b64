"""Elimination order of the vertices and its cost, computed before any table.

Eliminating a vertex joins all factors that contain it into one table over its *dependent set*, the neighbours that remain. It also makes
these neighbours of each other. The order decides the size of the tables. Three greedy rules are tried and the cheapest order is kept:
fewest neighbours (PaSE's GenerateSeq), smallest table, fewest new neighbours.

Source: Elango, PaSE, IPDPS 2021, figure 2; Koller & Friedman, Probabilistic Graphical Models, 2009, section 9.4.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Fixed cost of the join of one vertex, in table entries.
_ENTRIES_OF_A_STEP = 20_000.0
#: Largest number of pairs for the rule of fewest new neighbours, which looks at pairs of neighbours; beyond it the rule costs too much.
_MOST_PAIRS = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationOrder:
    """Steps of an elimination: each is a vertex and its dependent set, in the order of their own elimination."""

    rule: str
    steps: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def width(self) -> int:
        """Size of the largest dependent set: PaSE's M."""
        return max((len(rest) for _, rest in self.steps), default=0)

    def table_entries(self, sizes: Sequence[int]) -> float:
        """Return the entries of all tables: elimination holds at most these and one tile."""
        return math.fsum(math.prod(sizes[u] for u in rest) for _, rest in self.steps)

    def work(self, sizes: Sequence[int]) -> float:
        """Return the entries visited: each table times the configurations of the vertex that it eliminates."""
        return math.fsum(math.prod((sizes[u] for u in rest), start=sizes[v]) for v, rest in self.steps)

    def effort(self, sizes: Sequence[int]) -> float:
        """Return `work` with the fixed cost of a step, in entries."""
        return self.work(sizes) + _ENTRIES_OF_A_STEP * sum(1 for v, _ in self.steps if sizes[v] > 1)


def best_order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], *, is_quick: bool = False) -> EliminationOrder:
    """Return the cheapest of the greedy orders for vertices with `sizes` configurations; if `is_quick`, the order of smallest tables.

    A vertex with one configuration does not affect the tables of others.
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
    orders = [_greedy(rule, key, neighbours) for rule, key in rules]
    best = min(orders, key=lambda order: order.work(sizes))
    num_pairs = sum(len(around) ** 2 for around in neighbours)
    if best.width > 2 and num_pairs <= _MOST_PAIRS and best.work(sizes) > _ENTRIES_OF_A_STEP * len(sizes):
        best = min(best, _greedy("fewest new neighbours", fewest_new_pairs, neighbours), key=lambda order: order.work(sizes))
    return best


def line_up(num_vertices: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return an order that keeps neighbours close: the given numbers or a breadth-first order from an end, whichever is closer.

    Networks are long and thin, and sweeps carry costs along the order.
    Source: Cuthill & McKee, Reducing the bandwidth of sparse symmetric matrices, ACM National Conference 1969.
    """
    neighbours: list[list[int]] = [[] for _ in range(num_vertices)]
    for u, v in pairs:
        neighbours[u].append(v)
        neighbours[v].append(u)
    reached = [False] * num_vertices
    sequence: list[int] = []
    for start in range(num_vertices):
        if not reached[start]:
            end = start
            for _ in range(2):  # the last vertex of a walk is near an end, nearer the second time
                end = _breadth_first(end, neighbours, [False] * num_vertices)[-1]
            sequence += _breadth_first(end, neighbours, reached)
    position = {v: i for i, v in enumerate(sequence)}
    if sum(abs(position[u] - position[v]) for u, v in pairs) < sum(abs(u - v) for u, v in pairs):
        return sequence
    return list(range(num_vertices))


def _breadth_first(start: int, neighbours: Sequence[Sequence[int]], reached: list[bool]) -> list[int]:
    """Return the component of `start`, nearest first; at equal distance, vertices with fewest neighbours first."""
    reached[start] = True
    component = [start]
    for v in component:
        for u in sorted(neighbours[v], key=lambda neighbour: len(neighbours[neighbour])):
            if not reached[u]:
                reached[u] = True
                component.append(u)
    return component


def _greedy(rule: str, key: Callable[[int, set[int], list[set[int]]], float], neighbours: list[set[int]]) -> EliminationOrder:
    """Eliminate the vertex of least `key` first, ties by number; keys are updated when a neighbour is eliminated."""
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
    position = {v: i for i, (v, _) in enumerate(sequence)}
    return EliminationOrder(rule=rule, steps=tuple((v, tuple(sorted(around, key=position.__getitem__))) for v, around in sequence))
