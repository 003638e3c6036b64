"""Bounds never exceed what they bound, and cutting never loses what it must keep."""

import itertools

import numpy as np
import pytest

from perfmodel.search.bounds import Relaxation
from perfmodel.search.problem import read_problem
from tests.search.problems import brute_force, grid_problem, random_problem, total


def relaxation_of(given):
    problem = read_problem(*given)
    return Relaxation(problem, [np.arange(size) for size in problem.sizes])


def least_with_each(given):
    """For each configuration of each vertex, the least total of the choices that have it."""
    vertex_costs, edges = given
    least = [np.full(len(cost), np.inf) for cost in vertex_costs]
    for choice in itertools.product(*(range(len(cost)) for cost in vertex_costs)):
        cost = total(vertex_costs, edges, choice)
        for v, label in enumerate(choice):
            least[v][label] = min(least[v][label], cost)
    return least


@pytest.mark.parametrize("seed", range(12))
def test_each_bound_is_a_bound(seed):
    given = random_problem(seed, num_vertices=6, num_configurations=4, num_edges=10, integers=seed % 2 == 0, equal_sizes=False)
    relaxation, least = relaxation_of(given), least_with_each(given)
    for _ in range(8):
        relaxation.sweep()
        assert relaxation.constant <= min(map(min, least)) + 1e-9
        for bounds, true in zip(relaxation.bounds, least, strict=True):
            assert (bounds <= true + 1e-9).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_cutting_keeps_the_best_choices_and_the_bounds(seed):
    given = random_problem(seed, num_vertices=6, num_configurations=5, num_edges=9, integers=True)
    relaxation, best, least = relaxation_of(given), brute_force(*given), least_with_each(given)
    for _ in range(6):
        relaxation.sweep()
        relaxation.sweep()
        relaxation.cut(relaxation.survivors(best + 1e-6))
        for labels, bounds, true in zip(relaxation.labels, relaxation.bounds, least, strict=True):
            assert set(np.flatnonzero(true == best)) <= set(labels)
            assert (bounds[true[labels] == best] <= best + 1e-9).all()  # others may rise: choices with them were cut
    assert relaxation.constant <= best + 1e-9


def test_the_bound_never_falls():
    relaxation = relaxation_of(grid_problem(3, 5, 6, 6))
    before = relaxation.constant
    for _ in range(20):
        relaxation.sweep()
        assert relaxation.constant >= before - 1e-9
        before = relaxation.constant


def test_a_chain_is_exact_after_two_sweeps():
    rng = np.random.default_rng(1)
    given = [rng.random(5) for _ in range(7)], [(v, v + 1, rng.random((5, 5))) for v in range(6)]
    relaxation = relaxation_of(given)
    choice = relaxation.sweep()
    assert relaxation.constant == pytest.approx(brute_force(*given), rel=1e-12)
    assert total(*given, choice) == pytest.approx(relaxation.constant, rel=1e-12)


def test_a_fork_goes_its_own_way():
    relaxation = relaxation_of(grid_problem(4, 4, 4, 4))
    relaxation.sweep()
    before = [vector.copy() for vector in relaxation.vectors], relaxation.constant
    twin = relaxation.fork()
    twin.cut([np.arange(1) for _ in twin.labels])
    twin.sweep()
    assert relaxation.constant == before[1]
    assert all(np.array_equal(*pair) for pair in zip(relaxation.vectors, before[0], strict=True))
    assert [len(labels) for labels in relaxation.labels] == [4] * 16
