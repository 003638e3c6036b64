"""The search kernel against solvers of other make: toulbar2's cost function networks, and a linear program with integers (HiGHS).

toulbar2 is exact and written for such problems, but its costs here are integers; HiGHS solves the local polytope with binary variables.
"""

import numpy as np
import pytest

from perfmodel.search import eliminate
from tests.search.problems import grid_problem, random_problem


def solved_by_toulbar2(vertex_costs, edges):
    pytoulbar2 = pytest.importorskip("pytoulbar2")
    network = pytoulbar2.CFN(ubinit=1e9, resolution=0)
    for v, cost in enumerate(vertex_costs):
        network.AddVariable(f"x{v}", range(len(cost)))
        network.AddFunction([v], [int(value) for value in cost])
    for u, v, matrix in edges:
        network.AddFunction([u, v], [int(value) for value in matrix.ravel()])
    _, cost, _ = network.Solve()
    return cost


def solved_by_highs(vertex_costs, edges):
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    starts = np.cumsum([0, *(len(cost) for cost in vertex_costs), *(matrix.size for _, _, matrix in edges)])
    objective = np.concatenate([*vertex_costs, *(matrix.ravel() for _, _, matrix in edges)])
    rows, columns, values, right = [], [], [], []

    def constrain(positive, negative, total):
        rows.extend([len(right)] * (len(positive) + len(negative)))
        columns.extend([*positive, *negative])
        values.extend([1.0] * len(positive) + [-1.0] * len(negative))
        right.append(total)

    for v, cost in enumerate(vertex_costs):
        constrain(range(starts[v], starts[v] + len(cost)), [], 1.0)
    for index, (u, v, matrix) in enumerate(edges):
        entry = starts[len(vertex_costs) + index] + np.arange(matrix.size).reshape(matrix.shape)
        for label in range(matrix.shape[0]):
            constrain(entry[label], [starts[u] + label], 0.0)
        for label in range(matrix.shape[1]):
            constrain(entry[:, label], [starts[v] + label], 0.0)
    constraints = coo_array((values, (rows, columns)), shape=(len(right), len(objective))).tocsr()
    is_own = (np.arange(len(objective)) < starts[len(vertex_costs)]).astype(int)
    solved = milp(objective, constraints=LinearConstraint(constraints, right, right), integrality=is_own, bounds=Bounds(0, 1))
    assert solved.success
    return solved.fun


INTEGER_PROBLEMS = {
    "tree-like": dict(num_vertices=30, num_configurations=8, num_edges=32),
    "sparse": dict(num_vertices=30, num_configurations=6, num_edges=45),
    "dense": dict(num_vertices=14, num_configurations=6, num_edges=50),
    "many configurations": dict(num_vertices=12, num_configurations=30, num_edges=16),
}


@pytest.mark.parametrize("memory", [1e9, 8.0 * 400], ids=["tables", "branches"])
@pytest.mark.parametrize("name", INTEGER_PROBLEMS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_toulbar2_finds_the_same_cost(seed, name, memory):
    given = random_problem(seed, integers=True, **INTEGER_PROBLEMS[name])
    solution = eliminate(*given, memory_limit=memory)
    assert solution.is_proved
    assert solution.cost == solved_by_toulbar2(*given)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1e9, 8.0 * 300, 8.0 * 20], ids=["tables", "some tables", "branches"])
@pytest.mark.parametrize("largest", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_toulbar2_finds_the_same_cost_where_most_choices_tie(seed, largest, memory):
    """Costs of a few whole numbers: bounds tell configurations apart no longer."""
    vertex_costs, edges = random_problem(seed, num_vertices=22, num_configurations=5, num_edges=44)
    vertex_costs = [np.floor(cost * (largest + 1)) for cost in vertex_costs]
    edges = [(u, v, np.floor(matrix * (largest + 1))) for u, v, matrix in edges]
    solution = eliminate(vertex_costs, edges, memory_limit=memory)
    assert solution.is_proved
    assert solution.cost == solved_by_toulbar2(vertex_costs, edges)


@pytest.mark.parametrize("memory", [1e9, 8.0 * 100], ids=["tables", "branches"])
@pytest.mark.parametrize("seed", range(3))
def test_highs_finds_the_same_cost(seed, memory):
    given = grid_problem(seed, 4, 5, 5)
    solution = eliminate(*given, memory_limit=memory)
    assert solution.is_proved
    assert solution.cost == pytest.approx(solved_by_highs(*given), rel=1e-6)
