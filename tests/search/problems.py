"""Random problems for the search kernel, and the slow way to solve them."""

import itertools
import math

import numpy as np


def random_problem(seed, *, num_vertices, num_configurations, num_edges, equal_sizes=True, integers=False):
    """Vectors and matrices on a random graph; parallel edges and u > v occur. `whole`: every vertex has that many configurations."""
    rng = np.random.default_rng(seed)
    sizes = np.full(num_vertices, num_configurations) if equal_sizes else rng.integers(1, num_configurations + 1, num_vertices)
    draw = (lambda shape: rng.integers(-50, 1000, shape).astype(float)) if integers else rng.random
    vertex_costs = [draw(int(size)) for size in sizes]
    edges = []
    for _ in range(num_edges if num_vertices > 1 else 0):
        u, v = (int(end) for end in rng.choice(num_vertices, 2, replace=False))
        edges.append((u, v, draw((int(sizes[u]), int(sizes[v])))))
    return vertex_costs, edges


def grid_problem(seed, rows, columns, num_configurations):
    """A grid of vertices: no order of elimination has dependent sets smaller than its shorter side."""
    rng = np.random.default_rng(seed)
    vertex_costs = [rng.random(num_configurations) for _ in range(rows * columns)]
    pairs = [(r * columns + c, r * columns + c + 1) for r in range(rows) for c in range(columns - 1)]
    pairs += [(r * columns + c, (r + 1) * columns + c) for r in range(rows - 1) for c in range(columns)]
    return vertex_costs, [(u, v, rng.random((num_configurations, num_configurations))) for u, v in pairs]


def total(vertex_costs, edges, choice):
    vertex_terms = [cost[label] for cost, label in zip(vertex_costs, choice, strict=True)]
    return math.fsum([*vertex_terms, *(matrix[choice[u], choice[v]] for u, v, matrix in edges)])


def brute_force(vertex_costs, edges):
    """The least total of all choices."""
    return min(total(vertex_costs, edges, choice) for choice in itertools.product(*(range(len(cost)) for cost in vertex_costs)))
