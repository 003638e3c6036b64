"""Laws of the search kernel for any problem."""

import numpy as np
import pytest

from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.search import pase_tables
from perfmodel.search import eliminate
from tests.search.problems import random_problem, total

LIMITS = pytest.mark.parametrize("limits", [{}, {"memory_limit": 8.0 * 60}], ids=["tables", "branches"])


def problem(seed):
    return random_problem(seed, num_vertices=14, num_configurations=6, num_edges=26, integers=True)


def renumbered(given, seed):
    """The same problem with other numbers for vertices, other directions and another order of edges, and other orders of configurations."""
    vertex_costs, edges = given
    rng = np.random.default_rng(seed)
    number = rng.permutation(len(vertex_costs))
    orders = [rng.permutation(len(cost)) for cost in vertex_costs]
    costs = [None] * len(vertex_costs)
    for v, cost in enumerate(vertex_costs):
        costs[number[v]] = cost[orders[v]]
    turned = []
    for u, v, matrix in edges:
        matrix = matrix[np.ix_(orders[u], orders[v])]
        edge = (int(number[u]), int(number[v]), matrix)
        turned.append(edge if rng.integers(2) else (edge[1], edge[0], matrix.T))
    return costs, [turned[i] for i in rng.permutation(len(turned))]


@LIMITS
@pytest.mark.parametrize("seed", range(5))
def test_numbering_does_not_matter(seed, limits):
    given = problem(seed)
    assert eliminate(*renumbered(given, seed), **limits).cost == eliminate(*given, **limits).cost


def test_numbering_does_not_matter_to_a_network():
    tables = pase_tables(load_pase_graph("transformer"), 16)
    solution = eliminate(*renumbered((tables.vertex_costs, tables.edges), 0))
    assert solution.cost == 1004992614400
    assert solution.is_proved


@LIMITS
@pytest.mark.parametrize("seed", range(5))
def test_costs_moved_from_an_edge_to_its_ends_change_nothing(seed, limits):
    vertex_costs, edges = problem(seed)
    rng = np.random.default_rng(seed)
    costs, moved = [cost.copy() for cost in vertex_costs], []
    for u, v, matrix in edges:
        from_u, from_v = rng.integers(-300, 300, matrix.shape[0]), rng.integers(-300, 300, matrix.shape[1])
        costs[u] += from_u
        costs[v] += from_v
        moved.append((u, v, matrix - from_u[:, None] - from_v))
    assert eliminate(costs, moved, **limits).cost == eliminate(vertex_costs, edges, **limits).cost


@LIMITS
def test_costs_scale(limits):
    vertex_costs, edges = problem(3)
    scaled = eliminate([cost * 2.0**-40 for cost in vertex_costs], [(u, v, matrix * 2.0**-40) for u, v, matrix in edges], **limits)
    assert scaled.cost == eliminate(vertex_costs, edges, **limits).cost * 2.0**-40


@LIMITS
@pytest.mark.parametrize("seed", range(3))
def test_fewer_configurations_never_cost_less(seed, limits):
    vertex_costs, edges = problem(seed)
    fewer = eliminate([cost[:4] for cost in vertex_costs], [(u, v, matrix[:4, :4]) for u, v, matrix in edges], **limits)
    assert fewer.cost >= eliminate(vertex_costs, edges, **limits).cost


@LIMITS
@pytest.mark.parametrize("seed", range(3))
def test_no_single_change_makes_it_cheaper(seed, limits):
    given = problem(seed)
    solution = eliminate(*given, **limits)
    for v, cost in enumerate(given[0]):
        for label in range(len(cost)):
            assert total(*given, [*solution.choice[:v], label, *solution.choice[v + 1 :]]) >= solution.cost


@LIMITS
def test_two_problems_side_by_side_add_up(limits):
    first, second = problem(1), problem(2)
    shift = len(first[0])
    both = [*first[0], *second[0]], [*first[1], *((u + shift, v + shift, matrix) for u, v, matrix in second[1])]
    assert eliminate(*both, **limits).cost == eliminate(*first, **limits).cost + eliminate(*second, **limits).cost
