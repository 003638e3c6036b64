"""Orders of elimination: what they cost is known beforehand, and is what then happens."""

import itertools
import math

import numpy as np
import pytest

from perfmodel.search import best_order
from perfmodel.search.order import line_up
from perfmodel.search.problem import read_problem
from perfmodel.search.tables import _Memory
from tests.search.problems import grid_problem, random_problem


def grid_pairs(rows, columns):
    return [(u, v) for u, v, _ in grid_problem(0, rows, columns, 2)[1]]


def test_a_chain_and_a_tree_have_width_one():
    chain = [(v, v + 1) for v in range(9)]
    tree = [((v - 1) // 2, v) for v in range(1, 15)]
    assert best_order([5] * 10, chain).width == 1
    assert best_order([5] * 15, tree).width == 1
    assert best_order([5] * 10, chain).work([5] * 10) == 9 * 25 + 5


@pytest.mark.parametrize("side", [2, 3, 4])
def test_a_grid_is_as_wide_as_its_shorter_side(side):
    assert best_order([3] * (side * 9), grid_pairs(side, 9)).width == side


def test_a_clique_is_as_wide_as_it_is_large():
    order = best_order([2, 3, 4, 5], list(itertools.combinations(range(4), 2)))
    assert order.width == 3
    assert order.work([2, 3, 4, 5]) >= 120


def test_a_vertex_with_one_configuration_parts_its_neighbours():
    sizes = [4, 1, 4]
    order = best_order(sizes, [(0, 1), (1, 2)])
    assert order.width == 0


def test_every_vertex_is_eliminated_once_and_dependent_sets_are_later():
    order = best_order([3] * 35, grid_pairs(5, 7))
    position = {v: i for i, (v, _) in enumerate(order.steps)}
    assert sorted(position) == list(range(35))
    assert all(position[u] > position[v] for v, rest in order.steps for u in rest)


def test_the_stated_entries_are_those_of_the_tables(monkeypatch):
    problem = read_problem(*random_problem(4, num_vertices=20, num_configurations=5, num_edges=40, equal_sizes=False))
    order = best_order(problem.sizes, problem.pairs)
    tables = []
    join = _Memory.join
    monkeypatch.setattr(_Memory, "join", lambda self, *args: tables.append(join(self, *args)) or tables[-1])
    from perfmodel.search.tables import solve_by_tables

    solve_by_tables(problem, order)
    alone = sum(1 for _, rest in order.steps if not rest)  # their table is one number and is not made
    assert sum(table.size for table in tables) + alone == order.table_entries(problem.sizes)


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_of_any_numbers_is_lined_up(seed):
    numbers = np.random.default_rng(seed).permutation(50)
    line = line_up(50, [(int(numbers[i]), int(numbers[i + 1])) for i in range(49)])
    assert line in (numbers.tolist(), numbers.tolist()[::-1])


def test_what_is_lined_up_stays():
    assert line_up(6, [(0, 1), (1, 2), (3, 4)]) == [0, 1, 2, 3, 4, 5]


def test_work_counts_each_join():
    order = best_order([7, 11], [(0, 1)])
    assert order.work([7, 11]) == 77 + math.prod([7] if order.steps[1][0] == 0 else [11])
