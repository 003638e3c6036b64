"""Joins: tiled or at once, in any order of axes, the same table."""

import numpy as np
import pytest

from perfmodel.search import best_order, tables
from perfmodel.search.problem import read_problem
from perfmodel.search.tables import min_sum, solve_by_tables
from tests.search.problems import brute_force, random_problem, total


@pytest.mark.parametrize("tile", [1, 7, 60, 1000, 1 << 16])
@pytest.mark.parametrize("shape", [(4, 5), (6, 5, 3), (3, 4, 5, 2), (9, 1, 4), (5, 7, 1, 3)])
def test_a_tiled_join_is_the_whole_join(tile, shape, monkeypatch):
    monkeypatch.setattr(tables, "_TILE", tile)
    rng = np.random.default_rng(0)
    axes = [(0,), tuple(range(len(shape))), (1, 0), (0, len(shape) - 1), tuple(reversed(range(len(shape))))]
    factors = [(rng.integers(0, 9, [shape[axis] for axis in factor_axes]).astype(float), factor_axes) for factor_axes in axes]
    letters = "abcd"
    joined = np.zeros(shape)
    for array, factor_axes in factors:
        ordered = "".join(letters[axis] for axis in factor_axes)
        joined = joined + np.einsum(f"{ordered},{letters[: len(shape)]}->{letters[: len(shape)]}", array, np.ones(shape))
    assert np.array_equal(min_sum(factors, shape), joined.min(axis=0))


def test_a_single_factor_is_minimised_alone(monkeypatch):
    monkeypatch.setattr(tables, "_TILE", 4)
    matrix = np.random.default_rng(1).random((6, 5))
    assert np.array_equal(min_sum([(matrix, (1, 0))], (5, 6)), matrix.min(axis=1))


@pytest.mark.parametrize("seed", range(10))
def test_elimination_alone_is_brute_force(seed, monkeypatch):
    monkeypatch.setattr(tables, "_TILE", 5)
    given = random_problem(seed, num_vertices=7, num_configurations=4, num_edges=12, equal_sizes=False, integers=True)
    problem = read_problem(*given)
    assert total(*given, solve_by_tables(problem, best_order(problem.sizes, problem.pairs))) == brute_force(*given)


@pytest.mark.parametrize("num_blocks", [2, 50])
def test_equal_blocks_are_joined_once(num_blocks, monkeypatch):
    """Equal chains of three vertices from one hub to another: one of them is contracted, whatever their number."""
    rng = np.random.default_rng(0)
    inner, outer, steps = rng.random(5), rng.random(40), [rng.random((40, 5)), rng.random((5, 5)), rng.random((5, 40))]
    vertex_costs, edges = [outer, outer], []
    for block in range(num_blocks):
        first = 2 + 2 * block
        vertex_costs += [inner, inner]
        edges += [(0, first, steps[0]), (first, first + 1, steps[1]), (first + 1, 1, steps[2])]
    problem = read_problem(vertex_costs, edges)
    count = []
    monkeypatch.setattr(tables, "min_sum", lambda *args: count.append(1) or min_sum(*args))
    choice = solve_by_tables(problem, best_order(problem.sizes, problem.pairs))
    assert len(count) <= 5  # of 2 * num_blocks + 1
    assert len(set(choice[2::2])) == 1
