"""The contract of `perfmodel.search.eliminate`, and its agreement with brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.search import Budget, SearchMethod, eliminate
from perfmodel.search.problem import read_problem
from perfmodel.search.solve import _Search
from tests.search.problems import brute_force, grid_problem, random_problem, total

MATRIX = np.array([[0.0, 5.0], [5.0, 0.0]])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), num_vertices=st.integers(1, 7), num_edges=st.integers(0, 14), integers=st.booleans())
def test_small_graphs_are_solved_as_by_brute_force(seed, num_vertices, num_edges, integers):
    vertex_costs, edges = random_problem(
        seed, num_vertices=num_vertices, num_configurations=4, num_edges=num_edges, equal_sizes=False, integers=integers
    )
    solution = eliminate(vertex_costs, edges)
    assert solution.cost == pytest.approx(brute_force(vertex_costs, edges), rel=1e-12, abs=1e-12)
    assert solution.cost == total(vertex_costs, edges, solution.choice)
    assert solution.is_proved
    assert solution.lower_bound == solution.cost
    assert solution.gap == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), num_vertices=st.integers(3, 7), num_edges=st.integers(3, 14))
@pytest.mark.slow
def test_bounds_and_branches_lose_no_optimum(seed, num_vertices, num_edges):
    """The same graphs with no memory for any table: sweeps, pruning and branch and bound must find what brute force finds."""
    vertex_costs, edges = random_problem(seed, num_vertices=num_vertices, num_configurations=4, num_edges=num_edges, integers=True)
    solution = eliminate(vertex_costs, edges, memory_limit=8.0 * 12)
    assert solution.cost == brute_force(vertex_costs, edges)
    assert solution.is_proved


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_branch_and_bound_agrees_with_elimination(seed):
    vertex_costs, edges = grid_problem(seed, 6, 9, 7)
    eliminated = eliminate(vertex_costs, edges)
    branched = eliminate(vertex_costs, edges, memory_limit=8.0 * 50)
    assert eliminated.method == SearchMethod.BOUNDED_ELIMINATION
    assert branched.method == SearchMethod.BRANCH_AND_BOUND
    assert branched.is_proved
    assert branched.num_branches > 0
    assert branched.cost == pytest.approx(eliminated.cost, rel=1e-13)
    assert branched.kept_entries <= 7 * 54  # what a forest of all vertices holds


def test_out_of_work_it_reports_a_true_gap():
    vertex_costs, edges = random_problem(3, num_vertices=60, num_configurations=12, num_edges=240)
    solution = eliminate(vertex_costs, edges, memory_limit=1e5, budget=Budget(1e8))
    assert not solution.is_proved
    assert solution.cut_off == "work limit"
    assert solution.lower_bound < solution.cost
    assert 0 < solution.gap < 1
    assert solution.cost == total(vertex_costs, edges, solution.choice)


def test_parallel_edges_add_up_in_either_direction():
    back = np.array([[0.0, 3.0], [1.0, 0.0]])  # back[c1, c0]
    solution = eliminate([np.zeros(2), np.zeros(2)], [(0, 1, MATRIX), (1, 0, back), (0, 1, -2 * MATRIX)])
    assert solution.choice == (0, 1)
    assert solution.cost == 5 + 1 - 10


def test_an_edge_may_point_back():
    matrix = np.array([[9.0, 1.0, 9.0], [9.0, 9.0, 0.0]])
    assert eliminate([np.zeros(3), np.zeros(2)], [(1, 0, matrix)]).choice == (2, 1)


def test_components_and_single_vertices():
    solution = eliminate([[2.0, 1.0], [0.0, 4.0], [1.0, 0.5], [7.0]], [(0, 1, MATRIX)])
    assert solution.choice == (0, 0, 1, 0)
    assert solution.cost == 2.0 + 0.0 + 0.5 + 7.0


def test_nothing_costs_nothing():
    solution = eliminate([], [])
    assert (solution.cost, solution.choice, solution.is_proved) == (0.0, (), True)


def test_lists_and_integers_are_welcome():
    assert eliminate([[3, 1], [1, 1]], [(0, 1, [[0, 2], [9, 9]])]).cost == 4.0


def test_the_cost_is_rounded_once():
    """0.1 added ten times in sequence is not 1; the exact sum of ten float64 tenths rounds to 1."""
    assert eliminate([[0.1]] * 10, []).cost == 1.0 == math.fsum([0.1] * 10)


def test_inputs_are_left_alone():
    vertex_costs, edges = grid_problem(5, 7, 7, 6)
    before = [cost.copy() for cost in vertex_costs], [matrix.copy() for _, _, matrix in edges]
    eliminate(vertex_costs, edges, memory_limit=8.0 * 500)
    assert all(np.array_equal(*pair) for pair in zip(before[0], vertex_costs, strict=True))
    assert all(np.array_equal(old, matrix) for old, (_, _, matrix) in zip(before[1], edges, strict=True))


def test_shared_arrays_give_what_copies_give():
    rng = np.random.default_rng(2)
    cost, inside, between = rng.random(30), rng.random((30, 30)), rng.random((30, 30))
    edges = [(v, v + 1, inside if v % 3 else between) for v in range(59)] + [(v, v + 2, inside) for v in range(0, 58, 2)]
    shared = eliminate([cost] * 60, edges)
    copied = eliminate([cost.copy() for _ in range(60)], [(u, v, matrix.copy()) for u, v, matrix in edges])
    assert shared.cost == copied.cost


def test_the_same_call_gives_the_same_choice():
    vertex_costs, edges = grid_problem(8, 6, 6, 6)
    assert len({eliminate(vertex_costs, edges, memory_limit=8.0 * 300).choice for _ in range(3)}) == 1


@pytest.mark.slow
def test_ties_do_not_hold_it_up():
    """Every configuration twice: each choice has 2^30 equals, and no bound can tell them apart."""
    vertex_costs, edges = random_problem(6, num_vertices=30, num_configurations=5, num_edges=80, integers=True)
    twice = [np.repeat(cost, 2) for cost in vertex_costs], [(u, v, matrix.repeat(2, axis=0).repeat(2, axis=1)) for u, v, matrix in edges]
    solution = eliminate(*twice, memory_limit=8.0 * 1000)
    assert solution.is_proved
    assert solution.cost == eliminate(vertex_costs, edges).cost


@pytest.mark.parametrize("shift", [-1e15, 1e15])
def test_a_large_constant_moves_the_cost_only(shift):
    vertex_costs, edges = random_problem(11, num_vertices=25, num_configurations=6, num_edges=50, integers=True)
    shifted = [vertex_costs[0] + shift, *vertex_costs[1:]]
    assert eliminate(shifted, edges).cost == eliminate(vertex_costs, edges).cost + shift


# --- forbidden entries --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), share=st.floats(0.05, 0.6), memory=st.sampled_from([8.0 * 12, 1e9]))
def test_forbidden_entries_are_never_chosen(seed, share, memory):
    vertex_costs, edges = random_problem(seed, num_vertices=6, num_configurations=4, num_edges=8, integers=True)
    rng = np.random.default_rng(seed + 1)
    edges = [(u, v, np.where(rng.random(matrix.shape) < share, np.inf, matrix)) for u, v, matrix in edges]
    best = brute_force(vertex_costs, edges)
    if math.isinf(best):
        with pytest.raises(InputError, match="no choice is possible"):
            eliminate(vertex_costs, edges, memory_limit=memory)
    else:
        assert eliminate(vertex_costs, edges, memory_limit=memory).cost == best


def test_a_vertex_of_forbidden_configurations():
    with pytest.raises(InputError, match=r"vertex_costs\[1\]=inf: no choice is possible"):
        eliminate([[1.0], [np.inf, np.inf]], [])


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vertex_costs", "edges", "sentence"),
    [
        ([[1.0, np.nan]], [], r"vertex_costs\[0\]=nan: a cost is a number; use inf for a forbidden entry"),
        ([[1.0, -np.inf]], [], r"vertex_costs\[0\]=-inf: a cost has a lower bound; "),
        ([[1.0], []], [], r"vertex_costs\[1\]=\[\]: a vertex needs at least one configuration; "),
        ([[[1.0]]], [], r"vertex_costs\[0\]=2 dims: this is a vector; give 1"),
        ([3.0], [], r"vertex_costs\[0\]=0 dims: this is a vector; give 1"),
        ([["a"]], [], r"vertex_costs\[0\]=\['a'\]: costs are real numbers in a rectangular array; give float64"),
        ([[0.0], [0.0]], [(0, 2, [[1.0]])], r"edges\[0\]=2: there is no such vertex among 2; use 0 to 1"),
        ([[0.0], [0.0]], [(-1, 0, [[1.0]])], r"edges\[0\]=-1: there is no such vertex among 2; use 0 to 1"),
        ([[0.0], [0.0]], [(0, 0, [[1.0]])], r"edges\[0\]=\(0, 0\): an edge joins two different vertices; "),
        ([[0.0], [0.0]], [(0, 1.5, [[1.0]])], r"edges\[0\]=1.5: the ends of an edge are vertex numbers; give two integers"),
        ([[0.0], [0.0]], [(0, 1)], r"edges\[0\]=\(0, 1\): an edge is \(u, v, matrix\); give two vertices and a matrix"),
        ([[0.0], [0.0]], [(0, 1, [[1.0, 2.0]])], r"edges\[0\]=matrix \(1, 2\): vertices 0 and 1 have 1 and 1 configurations; "),
        ([[0.0], [0.0]], [(0, 1, [1.0])], r"edges\[0\]=1 dims: this is a matrix; give 2"),
        ([[0.0], [0.0]], [(0, 1, [[np.nan]])], r"edges\[0\]=nan: a cost is a number; "),
    ],
)
def test_bad_input_is_one_sentence(vertex_costs, edges, sentence):
    with pytest.raises(InputError, match="^" + sentence) as caught:
        eliminate(vertex_costs, edges)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limits", [{"memory_limit": 0}, {"memory_limit": float("nan")}])
def test_limits_are_positive(limits):
    with pytest.raises(InputError, match="must be positive"):
        eliminate([[1.0]], [], **limits)


def test_forests_have_no_cycle():
    vertex_costs, edges = grid_problem(1, 5, 5, 2)
    problem = read_problem(vertex_costs, edges)
    search = _Search(problem, memory_limit=1e9, budget=Budget())
    for _ in range(20):
        inside = search.random_forest()
        kept = [(u, v) for u, v in problem.pairs if inside[u] and inside[v]]
        root = list(range(25))
        for u, v in kept:
            while root[u] != u:
                u = root[u]
            while root[v] != v:
                v = root[v]
            assert u != v
            root[u] = v
