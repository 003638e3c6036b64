"""PaSE's space of configurations and its tables, ready for the search kernel.

A configuration of a layer is the number of parts of each of its dims. C(v) holds all configurations that divide the dims, leave
shares of at least `smallest_share`, and use at most p devices; a dim without an admissible divisor is not split.

Source: Elango, PaSE, IPDPS 2021, section II.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import bad_field
from perfmodel.planner.pase.cost import Splits, edge_cost, flops_per_word, layer_cost
from perfmodel.planner.pase.layer import LayerKind, PaseGraph, likeness, shape_of
from perfmodel.search import Solution, eliminate
from perfmodel.workload.graph import Operator

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaseTables:
    """Configurations of each layer, and costs of layers and pairs. Equal layers share their arrays."""

    graph: PaseGraph
    num_devices: int
    configurations: tuple[Splits, ...]
    vertex_costs: tuple[Array, ...]
    edges: tuple[tuple[int, int, Array], ...]

    def strategy(self, choice: Sequence[int]) -> tuple[dict[str, int], ...]:
        """Return the parts of each dim of each layer, by the dim's name."""
        return tuple(
            dict(zip(names, map(int, splits[index]), strict=True))
            for names, splits, index in zip(self.graph.names, self.configurations, choice, strict=True)
        )

    def cost_of(self, strategy: Sequence[Sequence[int]]) -> float:
        """Return F of any strategy of the space: the parts of each dim, in the order of each layer's dims. [FLOP]"""
        choice = []
        for index, (splits, wanted) in enumerate(zip(self.configurations, strategy, strict=True)):
            rows = np.flatnonzero((splits == np.array(wanted)).all(axis=1))
            if len(rows) == 0:
                raise bad_field(f"strategy[{index}]", tuple(wanted), "is not among the layer's configurations", "use one of them")
            choice.append(int(rows[0]))
        return self.cost_of_choice(choice)

    def cost_of_choice(self, choice: Sequence[int]) -> float:
        """Return F of the configurations with these numbers. [FLOP]"""
        total = sum(float(cost[label]) for cost, label in zip(self.vertex_costs, choice, strict=True))
        return total + sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.edges)

    def data_parallel(self) -> list[int]:
        """Return the configuration of each layer that splits only the samples, into the largest possible number of parts."""
        chosen = []
        for layer, rows, samples in zip(self.graph.layers, self.configurations, self.graph.samples, strict=True):
            others = [index for index, name in enumerate(layer.dims) if name != samples]
            only = np.flatnonzero((rows[:, others] == 1).all(axis=1))
            best = np.argmax(rows[only, list(layer.dims).index(samples)]) if samples else 0
            chosen.append(int(only[best]))
        return chosen


#: Kinds whose splits must be contiguous.
_FLATTENS = (LayerKind.RAVEL, LayerKind.UNRAVEL)


def pase_configurations(layer: Operator, *, num_devices: int, smallest_share: int) -> Splits:
    """Return C(v): one row per configuration, in lexicographic order."""
    rows: Splits = np.ones((1, 0), dtype=np.int64)
    used: Splits = np.ones(1, dtype=np.int64)
    for size in shape_of(layer, "divided"):
        most = min(num_devices, size // smallest_share)
        parts = [part for part in range(1, most + 1) if size % part == 0] or [1]
        total = used[:, None] * np.array(parts)
        row, column = np.nonzero(total <= num_devices)
        rows = np.concatenate([rows[row], np.array(parts)[column, None]], axis=1)
        used = total[row, column]
    if layer.kind not in _FLATTENS:
        return rows
    # parts are contiguous after flattening: some dims split to single entries, then one in part, then none
    is_legal = np.ones(len(rows), dtype=bool)
    is_past_full = np.zeros(len(rows), dtype=bool)
    for parts_of_dim, size in zip(rows.T, layer.dims.values(), strict=True):
        is_legal &= ~is_past_full | (parts_of_dim == 1)
        is_past_full |= parts_of_dim < size
    return rows[is_legal]


def pase_tables(graph: PaseGraph, num_devices: int, *, word_flops: float = flops_per_word()) -> PaseTables:
    """Return every cost that a search needs. Equal layers and edges are tabulated once."""
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise bad_field("num_devices", num_devices, "must be a whole number of at least 1", "use 4, 8, 16, 32 or 64")
    kinds = [likeness(layer) for layer in graph.layers]
    spaces: dict[object, tuple[Splits, Array]] = {}
    for layer, kind in zip(graph.layers, kinds, strict=True):
        if kind not in spaces:
            splits = pase_configurations(layer, num_devices=num_devices, smallest_share=graph.smallest_share)
            spaces[kind] = splits, layer_cost(layer, splits, word_flops=word_flops)
    matrices: dict[object, Array] = {}
    edges = []
    for edge in graph.edges:
        u, v = edge.producer, edge.consumer
        key = (kinds[u], kinds[v], edge.runs)
        if key not in matrices:
            (produced, _), (consumed, _) = spaces[kinds[u]], spaces[kinds[v]]
            matrices[key] = edge_cost(edge.runs, graph.layers[u], produced, graph.layers[v], consumed, word_flops=word_flops)
        edges.append((u, v, matrices[key]))
    return PaseTables(
        graph=graph,
        num_devices=num_devices,
        configurations=tuple(spaces[kind][0] for kind in kinds),
        vertex_costs=tuple(spaces[kind][1] for kind in kinds),
        edges=tuple(edges),
    )


def pase_search(tables: PaseTables) -> Solution:
    """Return the strategy of least cost in PaSE's space, under PaSE's cost function."""
    return eliminate(tables.vertex_costs, tables.edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaseRun:
    """One search of PaSE's space: its result, and the CPU time of the tables and of the search. [s]

    data_parallel   configuration of each layer under pure data parallelism
    """

    tables: PaseTables
    solution: Solution
    data_parallel: Sequence[int]
    table_time: float
    search_time: float

    @property
    def strategy(self) -> tuple[dict[str, int], ...]:
        """Parts of each dim of each layer in the best strategy."""
        return self.tables.strategy(self.solution.choice)

    @property
    def data_parallel_cost(self) -> float:
        """Cost of pure data parallelism, on `data_parallel_devices`. [FLOP]"""
        return self.tables.cost_of_choice(self.data_parallel)

    @property
    def data_parallel_devices(self) -> int:
        """Devices that data parallelism can use: there may be fewer samples than devices."""
        return max(int(rows[index].prod()) for rows, index in zip(self.tables.configurations, self.data_parallel, strict=True))

    @property
    def gain(self) -> float:
        """Cost of data parallelism, on the devices that it can use, over the best cost; nan where nothing costs."""
        return self.data_parallel_cost / self.solution.cost if self.solution.cost else math.nan

    @property
    def times_data_parallel(self) -> float:
        """Cost of data parallelism on all devices over the best cost; nan where some layer cannot split its samples among them."""
        layers = zip(self.tables.configurations, self.data_parallel, self.tables.graph.samples, strict=True)
        return self.gain if all(rows[index].prod() == self.tables.num_devices for rows, index, name in layers if name) else math.nan


def run_pase(graph: PaseGraph, num_devices: int) -> PaseRun:
    """Compute tables and search, timed separately."""
    start = time.process_time()
    tables = pase_tables(graph, num_devices)
    middle = time.process_time()
    solution = pase_search(tables)
    search_time = time.process_time() - middle
    return PaseRun(
        tables=tables, solution=solution, data_parallel=tables.data_parallel(), table_time=middle - start, search_time=search_time
    )
