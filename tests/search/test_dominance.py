"""Configurations that dominance drops are not needed."""

import itertools

import numpy as np
import pytest

from perfmodel.search.dominance import undominated
from perfmodel.search.problem import read_problem
from tests.search.problems import brute_force, random_problem, total


def coarse_problem(seed):
    """Few different costs, so that configurations are often equal or replaceable."""
    vertex_costs, edges = random_problem(seed, num_vertices=5, num_configurations=5, num_edges=6)
    return [np.floor(4 * cost) for cost in vertex_costs], [(u, v, np.floor(1.4 * matrix)) for u, v, matrix in edges]


@pytest.mark.parametrize("seed", range(20))
def test_a_best_choice_is_left(seed):
    given = coarse_problem(seed)
    kept = undominated(read_problem(*given))
    assert min(total(*given, choice) for choice in itertools.product(*kept)) == brute_force(*given)


def test_much_is_dropped_where_costs_are_coarse():
    assert sum(len(kept) for seed in range(20) for kept in undominated(read_problem(*coarse_problem(seed)))) < 0.7 * 20 * 25


def test_of_equal_configurations_the_first_is_left():
    vertex_costs, edges = random_problem(1, num_vertices=6, num_configurations=4, num_edges=9)
    twice = [np.repeat(cost, 3) for cost in vertex_costs], [(u, v, matrix.repeat(3, axis=0).repeat(3, axis=1)) for u, v, matrix in edges]
    assert all(set(kept) <= {0, 3, 6, 9} for kept in undominated(read_problem(*twice)))


def test_a_vertex_alone_keeps_its_cheapest():
    assert [kept.tolist() for kept in undominated(read_problem([[3.0, 1.0, 2.0, 1.0]], []))] == [[1]]


def test_what_is_better_for_some_neighbour_stays():
    matrix = np.array([[0.0, 9.0], [9.0, 0.0]])
    assert [len(kept) for kept in undominated(read_problem([np.zeros(2), np.zeros(2)], [(0, 1, matrix)]))] == [2, 2]
