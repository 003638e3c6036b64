"""The search within a limit on chains as long as a transformer. `make bench` shows the times; what is asserted is the proof."""

import numpy as np
import pytest

from perfmodel.search import eliminate, eliminate_within


def blocks(num_kinds, num_configurations):
    """Costs of operators, the weights they split, and pairs that are often free."""
    rng = np.random.default_rng(1)
    parts = np.array([1, 2, 4, 8])
    costs = [rng.choice(parts, num_configurations) * (1 + 0.1 * rng.random(num_configurations)) for _ in range(num_kinds)]
    weights = [100 * rng.random() / rng.choice(parts, num_configurations) for _ in range(num_kinds)]
    matrices = [0.3 * rng.choice([0, 0, 1, 2, 4], (num_configurations, num_configurations)) for _ in range(num_kinds)]
    return costs, weights, matrices


def chain(num_vertices, num_kinds, num_configurations, *, has_residuals=False):
    costs, weights, matrices = blocks(num_kinds, num_configurations)
    edges = [(v, v + 1, matrices[v % num_kinds]) for v in range(num_vertices - 1)]
    edges += [(v, v + 2, matrices[0]) for v in range(0, num_vertices - 2, 4)] if has_residuals else []
    return [costs[v % num_kinds] for v in range(num_vertices)], edges, [weights[v % num_kinds] for v in range(num_vertices)]


CASES = {
    "200 vertices, all different": (200, 200, 100, False),
    "200 vertices, 50 equal blocks": (200, 4, 100, False),
    "640 vertices, 80 equal blocks with residuals": (640, 8, 60, True),
}


@pytest.mark.parametrize(("num_vertices", "num_kinds", "num_configurations", "has_residuals"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_search(benchmark, num_vertices, num_kinds, num_configurations, has_residuals, share):
    vertex_costs, edges, weights = chain(num_vertices, num_kinds, num_configurations, has_residuals=has_residuals)
    free = eliminate(vertex_costs, edges).choice
    least = sum(float(weight.min()) for weight in weights)
    limit = least + share * (sum(float(weight[label]) for weight, label in zip(weights, free, strict=True)) - least)
    result = benchmark.pedantic(lambda: eliminate_within(vertex_costs, edges, weights, limit), rounds=3, iterations=1)
    benchmark.extra_info["labels"] = result.num_labels
    assert result.is_proved
    assert result.weight <= limit
