"""The search kernel and PaSE's tables. `make bench` shows the times; what is asserted is the answer."""

import pytest

from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.search import pase_tables
from perfmodel.search import eliminate
from tests.benchmarks.search_report import ROWS


@pytest.mark.parametrize(("graph", "num_devices", "is_copied", "optimum"), [(*row[:3], row[-1]) for row in ROWS])
def test_search(benchmark, graph, num_devices, is_copied, optimum):
    tables = pase_tables(load_pase_graph(graph), num_devices)
    edges = [(u, v, matrix.copy() if is_copied else matrix) for u, v, matrix in tables.edges]
    solution = benchmark.pedantic(lambda: eliminate(tables.vertex_costs, edges), rounds=3, iterations=1)
    assert solution.cost == optimum
    assert solution.is_proved


@pytest.mark.parametrize("graph", ["transformer", "inception3", "densenet121"])
def test_tables(benchmark, graph):
    layers = load_pase_graph(graph)
    tables = benchmark.pedantic(lambda: pase_tables(layers, 64), rounds=3, iterations=1)
    assert len(tables.vertex_costs) == len(layers.layers)
