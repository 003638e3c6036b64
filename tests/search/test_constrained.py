"""The contract of `perfmodel.search.eliminate_within`, and its agreement with brute force and with mixed-integer programming."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from perfmodel.foundation.errors import InputError
from perfmodel.search import Budget, ConstrainedMethod, eliminate, eliminate_within
from tests.search.problems import grid_problem, random_problem, total


def weight_of(weights, edge_weights, choice):
    return total(weights, edge_weights, choice)


def front(vertex_costs, edges, weights, edge_weights):
    """(weight, cost) of every choice that is possible."""
    choices = itertools.product(*(range(len(cost)) for cost in vertex_costs))
    points = [(weight_of(weights, edge_weights, choice), total(vertex_costs, edges, choice)) for choice in choices]
    return [point for point in points if math.isfinite(point[1])]


def random_weights(rng, vertex_costs, *, integers, share_of_edges):
    draw = (lambda shape: rng.integers(0, 8, shape).astype(float)) if integers else rng.random
    weights = [draw(len(cost)) for cost in vertex_costs]
    edge_weights = []
    for _ in range(3 if len(vertex_costs) > 1 and rng.random() < share_of_edges else 0):
        u, v = (int(end) for end in rng.choice(len(vertex_costs), 2, replace=False))
        edge_weights.append((u, v, draw((len(vertex_costs[u]), len(vertex_costs[v])))))
    return weights, edge_weights


def chain(seed, num_vertices, num_configurations, *, skip=0):
    rng = np.random.default_rng(seed)
    pairs = [(v, v + 1) for v in range(num_vertices - 1)] + [(v, v + skip) for v in range(num_vertices - skip) if skip]
    vertex_costs = [rng.random(num_configurations) for _ in range(num_vertices)]
    edges = [(u, v, rng.random((num_configurations, num_configurations))) for u, v in pairs]
    return vertex_costs, edges, [rng.random(num_configurations) for _ in range(num_vertices)]


def limit_between(vertex_costs, edges, weights, share):
    """`share` of the way from the least weight to that of the best choice without a limit."""
    free = eliminate(vertex_costs, edges).choice
    least = math.fsum(float(weight.min()) for weight in weights)
    return least + share * (weight_of(weights, (), free) - least)


# --- against every choice -----------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    num_vertices=st.integers(1, 6),
    num_edges=st.integers(0, 10),
    integers=st.booleans(),
    share=st.sampled_from([0.0, 0.2]),
    memory=st.sampled_from([1e9, 8.0 * 20]),
)
@pytest.mark.slow
def test_small_graphs_are_solved_as_by_brute_force(seed, num_vertices, num_edges, integers, share, memory):
    """The limit is exactly the weight of some choice, often the least; without memory for tables, bounds alone must do."""
    vertex_costs, edges = random_problem(
        seed, num_vertices=num_vertices, num_configurations=4, num_edges=num_edges, equal_sizes=False, integers=integers
    )
    rng = np.random.default_rng(seed)
    edges = [(u, v, np.where(rng.random(matrix.shape) < share, np.inf, matrix)) for u, v, matrix in edges]
    weights, edge_weights = random_weights(rng, vertex_costs, integers=integers, share_of_edges=0.4)
    points = front(vertex_costs, edges, weights, edge_weights)
    if not points:
        return
    limit = sorted(weight for weight, _ in points)[int(rng.integers(len(points)) * rng.integers(2))]
    best = min(cost for weight, cost in points if weight <= limit)
    solution = eliminate_within(vertex_costs, edges, weights, limit, edge_weights=edge_weights, memory_limit=memory)
    assert solution.cost == pytest.approx(best, rel=1e-10, abs=1e-10)
    assert solution.cost == total(vertex_costs, edges, solution.choice)
    assert solution.weight == weight_of(weights, edge_weights, solution.choice) <= limit
    assert solution.is_proved
    assert (solution.lower_bound, solution.gap) == (solution.cost, 0.0)
    # the price is a multiplier: no choice, within the limit or not, lies below the line through the bound
    assert solution.price >= 0
    lagrangian = min(cost + solution.price * (weight - limit) for weight, cost in points)
    assert lagrangian <= best + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_below_the_least_weight_is_one_sentence(seed):
    rng = np.random.default_rng(seed)
    vertex_costs, edges = random_problem(seed, num_vertices=5, num_configurations=4, num_edges=6, integers=True)
    weights, edge_weights = random_weights(rng, vertex_costs, integers=True, share_of_edges=1.0)
    least = min(weight for weight, _ in front(vertex_costs, edges, weights, edge_weights))
    with pytest.raises(InputError, match=f"^limit={least - 0.5:g}: no choice weighs less than {least:g}; ") as caught:
        eliminate_within(vertex_costs, edges, weights, least - 0.5, edge_weights=edge_weights)
    assert "\n" not in str(caught.value)


# --- against mixed-integer programming --------------------------------------------------------------------------------------------


def by_milp(vertex_costs, edges, weights, limit):
    """The local polytope with the vertices' variables integer, which makes those of the edges so."""
    first = np.cumsum([0, *map(len, vertex_costs), *(matrix.size for _, _, matrix in edges)])
    n = len(vertex_costs)
    rows = lil_array((n + 1 + sum(sum(matrix.shape) for _, _, matrix in edges), first[-1]))
    low = np.zeros(rows.shape[0])
    high = np.zeros(rows.shape[0])
    for v, weight in enumerate(weights):
        rows[v, first[v] : first[v + 1]] = 1
        low[v] = high[v] = 1
        rows[n, first[v] : first[v + 1]] = weight
    low[n], high[n] = -np.inf, limit
    row = n + 1
    for at, (u, v, matrix) in zip(first[n:], edges, strict=False):
        ids = at + np.arange(matrix.size).reshape(matrix.shape)
        for end, slices in ((u, ids), (v, ids.T)):
            for label, entries in enumerate(slices):
                rows[row, entries] = 1
                rows[row, first[end] + label] = -1
                row += 1
    solution = milp(
        np.concatenate([*vertex_costs, *(matrix.ravel() for _, _, matrix in edges)]),
        constraints=LinearConstraint(rows.tocsr(), low, high),
        integrality=np.arange(first[-1]) < first[n],
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert solution.status == 0
    return solution.fun


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_vertices", "num_configurations", "skip"), [(1, 100, 10, 0), (2, 60, 20, 0), (4, 14, 6, 2)])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_chains_are_solved_as_by_highs(seed, num_vertices, num_configurations, skip, share):
    vertex_costs, edges, weights = chain(seed, num_vertices, num_configurations, skip=skip)
    limit = limit_between(vertex_costs, edges, weights, share)
    solution = eliminate_within(vertex_costs, edges, weights, limit)
    assert solution.is_proved
    assert solution.method != ConstrainedMethod.UNCONSTRAINED
    assert solution.cost == pytest.approx(by_milp(vertex_costs, edges, weights, limit), rel=1e-6)


# --- against dynamic programming over integer weights -------------------------------------------------------------------------------


def by_weight_table(vertex_costs, matrices, weights, limit):
    """Least cost of a chain for every weight up to the limit: [configuration, weight]."""
    table = np.full((len(vertex_costs[0]), limit + 1), np.inf)
    for label, (cost, weight) in enumerate(zip(vertex_costs[0], weights[0], strict=True)):
        table[label, int(weight) :] = cost
    for cost, matrix, weight in zip(vertex_costs[1:], matrices, weights[1:], strict=True):
        longer = np.full((len(cost), limit + 1), np.inf)
        for label, label_weight in enumerate(weight.astype(int)):
            longer[label, label_weight:] = cost[label] + (table[:, : limit + 1 - label_weight] + matrix[:, label, None]).min(axis=0)
        table = longer
    return table[:, -1].min()


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.slow
def test_long_chains_are_solved_as_by_a_table_of_weights(share, is_repeated):
    rng = np.random.default_rng(7)
    kinds = [(rng.random(50), rng.random((50, 50)), rng.integers(0, 8, 50).astype(float)) for _ in range(4 if is_repeated else 120)]
    blocks = [kinds[i % len(kinds)] for i in range(120)]
    vertex_costs, matrices, weights = [b[0] for b in blocks], [b[1] for b in blocks][:-1], [b[2] for b in blocks]
    edges = [(v, v + 1, matrix) for v, matrix in enumerate(matrices)]
    limit = int(limit_between(vertex_costs, edges, weights, share))
    solution = eliminate_within(vertex_costs, edges, weights, limit)
    assert solution.is_proved
    assert solution.cost == pytest.approx(by_weight_table(vertex_costs, matrices, weights, limit), rel=1e-12)


# --- larger graphs ------------------------------------------------------------------------------------------------------------


def test_bounds_alone_keep_the_optimum_within_their_gap():
    """Tables of all configurations, and bounds alone."""
    vertex_costs, edges = grid_problem(3, 5, 5, 5)
    weights = [np.random.default_rng(v).random(5) for v in range(25)]
    limit = limit_between(vertex_costs, edges, weights, 0.5)
    unbounded = eliminate_within(vertex_costs, edges, weights, limit)
    bounded = eliminate_within(vertex_costs, edges, weights, limit, memory_limit=8.0 * 400)
    assert unbounded.is_proved
    assert bounded.lower_bound <= unbounded.cost <= bounded.cost
    assert bounded.gap < 0.05
    assert bounded.is_proved == (bounded.gap == 0.0)


def subset_sum(num_vertices):
    """Cost and weight add up to the same everywhere: every choice lies on one line, and the best comes ever closer to the limit."""
    rng = np.random.default_rng(5)
    weights = [rng.random(20) for _ in range(num_vertices)]
    edges = [(v, v + 1, np.zeros((20, 20))) for v in range(num_vertices - 1)]
    return [2.0 - weight for weight in weights], edges, weights


def test_a_gap_that_will_do_ends_the_search():
    vertex_costs, edges, weights = subset_sum(60)
    solution = eliminate_within(vertex_costs, edges, weights, 30.0, gap=1e-6)
    assert solution.gap <= 1e-6
    assert solution.lower_bound == pytest.approx(2.0 * 60 - 30.0)
    assert solution.weight <= 30.0


def test_out_of_work_it_reports_a_true_gap():
    vertex_costs, edges, weights = subset_sum(60)
    solution = eliminate_within(vertex_costs, edges, weights, 30.0, budget=Budget(6e7))
    assert not solution.is_proved
    assert solution.cut_off == "work limit"
    assert solution.lower_bound <= solution.cost
    assert solution.gap == (solution.cost - solution.lower_bound) / solution.cost


def test_shared_arrays_give_what_copies_give():
    rng = np.random.default_rng(2)
    cost, inside, between, weight = rng.random(30), rng.random((30, 30)), rng.random((30, 30)), rng.random(30)
    edges = [(v, v + 1, inside if v % 3 else between) for v in range(59)] + [(v, v + 2, inside) for v in range(0, 58, 2)]
    shared = eliminate_within([cost] * 60, edges, [weight] * 60, 20.0)
    copies = [(u, v, matrix.copy()) for u, v, matrix in edges]
    copied = eliminate_within([cost.copy() for _ in range(60)], copies, [weight.copy() for _ in range(60)], 20.0)
    assert shared.is_proved
    assert copied.is_proved
    assert shared.cost == pytest.approx(copied.cost, rel=1e-12)


def test_inputs_are_left_alone():
    vertex_costs, edges, weights = chain(5, 20, 6)
    before = [array.copy() for array in [*vertex_costs, *weights, *(matrix for _, _, matrix in edges)]]
    eliminate_within(vertex_costs, edges, weights, limit_between(vertex_costs, edges, weights, 0.5))
    assert all(map(np.array_equal, before, [*vertex_costs, *weights, *(matrix for _, _, matrix in edges)]))


# --- small cases --------------------------------------------------------------------------------------------------------------


def test_without_vertices():
    solution = eliminate_within([], [], [], 0.0)
    assert (solution.cost, solution.choice, solution.weight, solution.price, solution.is_proved) == (0.0, (), 0.0, 0.0, True)
    with pytest.raises(InputError, match="no choice weighs less than 0"):
        eliminate_within([], [], [], -1.0)


@pytest.mark.parametrize("limit", [3.0, math.inf])
def test_a_limit_that_does_not_bind_has_no_price(limit):
    solution = eliminate_within([[1.0, 2.0]], [], [[3.0, 0.0]], limit)
    assert (solution.choice, solution.price, solution.method, solution.num_searches) == ((0,), 0.0, ConstrainedMethod.UNCONSTRAINED, 1)


def test_a_limit_that_binds_has_the_price_of_the_chord():
    solution = eliminate_within([[1.0, 9.0]], [], [[4.0, 0.0]], 3.0)
    assert (solution.choice, solution.cost, solution.price) == ((1,), 9.0, 2.0)


def test_zero_weights_never_bind():
    vertex_costs, edges = random_problem(4, num_vertices=6, num_configurations=4, num_edges=8)
    weights = [np.zeros(len(cost)) for cost in vertex_costs]
    assert eliminate_within(vertex_costs, edges, weights, 0.0).cost == eliminate(vertex_costs, edges).cost


def test_of_equally_cheap_choices_one_that_fits_is_found():
    solution = eliminate_within([[1.0, 1.0]] * 3, [], [[5.0, 1.0]] * 3, 3.0)
    assert (solution.choice, solution.cost, solution.is_proved) == ((1, 1, 1), 3.0, True)


def test_parts_share_the_limit():
    solution = eliminate_within([[0.0, 3.0], [0.0, 5.0], [7.0]], [], [[4.0, 1.0], [4.0, 1.0], [2.0]], 7.0)
    assert (solution.choice, solution.cost, solution.weight) == ((1, 0, 0), 10.0, 7.0)


def test_weights_of_pairs_count_in_either_direction():
    back = [[0.0, 3.0], [1.0, 0.0]]  # back[c1, c0]
    solution = eliminate_within([[0.0, 9.0], [0.0, 2.0]], [], [[0.0, 0.0], [1.0, 0.0]], 0.5, edge_weights=[(1, 0, back)])
    assert (solution.choice, solution.cost, solution.weight) == ((1, 1), 11.0, 0.0)


def test_two_single_configurations():
    solution = eliminate_within([[1.0], [2.0], [0.0, 5.0]], [(0, 1, [[4.0]])], [[1.0], [1.0], [3.0, 1.0]], 3.0)
    assert (solution.choice, solution.cost, solution.is_proved) == ((0, 0, 1), 12.0, True)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"weights": [[1.0, np.nan], [1.0]]}, r"weights\[0\]=nan: a weight is a finite number of at least 0; "),
        ({"weights": [[1.0, 1.0], [-2.0]]}, r"weights\[1\]=-2.0: a weight is a finite number of at least 0; "),
        ({"weights": [[1.0, np.inf], [1.0]]}, r"weights\[0\]=inf: a weight is a finite number of at least 0; "),
        ({"weights": [["a", 1.0], [1.0]]}, r"weights\[0\]=\['a', 1.0\]: weights are real numbers "),
        ({"weights": [[1.0, 2.0]]}, r"weights=1 vectors: there are 2 vertices; "),
        ({"weights": [[1.0], [1.0]]}, r"weights\[0\]=1 entries: vertex 0 has 2 configurations; "),
        ({"weights": [[[1.0, 1.0]], [1.0]]}, r"weights\[0\]=2 dims: this is a vector; "),
        ({"edge_weights": [(0, 1, [[1.0], [-1.0]])]}, r"edge_weights\[0\]=-1.0: a weight is a finite number of at least 0; "),
        ({"edge_weights": [(0, 1, [[1.0]])]}, r"edge_weights\[0\]=matrix \(1, 1\): vertices 0 and 1 have 2 and 1 configurations; "),
        ({"edge_weights": [(0, 2, [[1.0]])]}, r"edge_weights\[0\]=2: there is no such vertex among 2; "),
        ({"edge_weights": [(0, 1)]}, r"edge_weights\[0\]=\(0, 1\): an edge is \(u, v, matrix\); "),
        ({"vertex_costs": [[1.0, np.nan], [1.0]]}, r"vertex_costs\[0\]=nan: a cost is a number; "),
        ({"limit": math.nan}, r"limit=nan: a limit is a number; "),
        ({"gap": -1.0}, r"gap=-1.0: must not be negative; "),
        ({"memory_limit": math.nan}, r"memory_limit=nan: must be positive; "),
    ],
)
def test_bad_input_is_one_sentence(changed, sentence):
    given = {"vertex_costs": [[1.0, 2.0], [1.0]], "edges": [], "weights": [[1.0, 0.0], [1.0]], "limit": 1.0}
    with pytest.raises(InputError, match="^" + sentence) as caught:
        eliminate_within(**(given | changed))
    assert "\n" not in str(caught.value)


def test_scipy_stays_out():
    code = "import sys, perfmodel.search as s; s.eliminate_within([[1, 2]], [], [[3, 0]], 1); sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
