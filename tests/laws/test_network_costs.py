"""The tables of a per-operator search are the additive part of what the prediction of the whole plan says: for every choice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perfmodel.planner.per_operator.strategies import data_parallel
from perfmodel.workload.networks import load_network
from tests.marks import pairwise
from tests.planner.per_operator.cases import planner

NETWORKS = {
    "alexnet": {"batch": 32},
    "rnnlm": {"batch": 16, "seq_len": 6, "embedding": 32, "hidden": 32, "vocabulary": 96},
    "transformer": {"batch": 8, "layers": 1, "seq_len": 64, "vocabulary": 4096},
    "gpt2": {"batch": 4, "seq_len": 64, "layers": 2, "vocabulary": 1024},
    "llama-3-8b": {"batch": 4, "seq_len": 64, "layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "vocabulary": 1024},
    "dlrm": {"batch": 64, "rows": (64, 32), "bags": (2, 1), "features": 16},
}


@pytest.mark.parametrize("name, zero, profile", pairwise([*NETWORKS], [0, 1, 3], ["megatron", "torchtitan", "torch-gloo", "nanotron"]))
def test_a_choice_costs_in_the_tables_what_is_additive_of_its_prediction(name: str, zero: int, profile: str) -> None:
    """Work of kernels that could be one but do not lie alike is more than the tables say, as is what the host needs; so bounds hold."""
    network = load_network(name, **NETWORKS[name])  # type: ignore[arg-type]
    network_planner = planner(network, 16, zero=zero, profile=profile, most_dims=2)
    space, tables = network_planner.space, network_planner.tables
    alike = space.choice(network_planner.search(data_parallel(network)).best.plan.cuts)
    shares_parameters = any(len(r) > 1 and network.tensors[t].role == "parameter" for t, r in network.readers().items())
    rng = random.Random(7)
    for choice in (alike, *(tuple(rng.randrange(count) for count in space.num_configurations) for _ in range(4))):
        edges = [float(matrix[choice[u], choice[v]]) for u, v, matrix in tables.edges]
        if not np.isfinite(edges).all():
            continue  # readers of one parameter that hold it unlike
        assert space.choice(space.assignment(choice)) == choice
        predicted = network_planner.price(choice)
        columns = list(zip(tables.vertices, choice, strict=True))
        work = sum(v.forward[c] + v.backward[c] + v.collectives[c] for v, c in columns) + sum(edges)
        expected = sum(predicted.parts[part] for part in ("forward", "backward", "redistributions"))
        if choice is alike:
            assert work == pytest.approx(expected, rel=1e-9)
        elif not shares_parameters:
            assert 0.9 * expected < work < (1.0 + 1e-9) * expected
        updated = sum(v.optimizer[c] for v, c in columns)
        expected = predicted.parts["optimizer"] + predicted.parts["gradient_accumulation"]
        assert updated == pytest.approx(expected, rel=0.02, abs=3e-5)  # kernels of the whole have a floor, and are in cache or not
        least = (
            sum(float(v.cost(0.0, network_planner.setting)[c]) for v, c in columns)
            + sum(edges)
            + network_planner.setting.profile.timing.step_time_constant
        )
        assert max(least, network_planner.least_time) <= predicted.step_time * (1.0 + 1e-9)
        saved = sum(v.saved_bytes[c] for v, c in columns) + sum(float(m[choice[u], choice[v]]) for u, v, m in tables.edge_bytes)
        assert predicted.memory["activations"] <= saved * (1.0 + 1e-9)  # at the fullest moment some have gone already
