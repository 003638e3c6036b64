"""The tables of a per-operator search and the prediction of a whole plan are one cost: every choice, every part."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.per_operator.operators import StepSetting
from perfmodel.cost.per_operator.predict import predict_network
from perfmodel.cost.resolve import choose_calibration
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.profile import load_profile
from perfmodel.planner.per_operator.search import network_planner
from perfmodel.planner.per_operator.strategies import data_parallel
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision
from perfmodel.workload.networks import load_network

NETWORKS = {
    "alexnet": {"batch": 32},
    "rnnlm": {"batch": 16, "seq_len": 6, "embedding": 32, "hidden": 32, "vocabulary": 96},
    "transformer": {"batch": 8, "layers": 1, "seq_len": 64, "vocabulary": 4096},
    "gpt2": {"batch": 4, "seq_len": 64, "layers": 2, "vocabulary": 1024},
    "llama-3-8b": {"batch": 4, "seq_len": 64, "layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "vocabulary": 1024},
    "dlrm": {"batch": 64, "rows": (64, 32), "bags": (2, 1), "features": 16},
}


def _setting(**changes: object) -> StepSetting:
    return StepSetting(policy=PRECISION_POLICIES[Precision.FP32], optimizer=Optimizer.MOMENTUM, profile=load_profile("megatron"), **changes)  # type: ignore[arg-type]


def _machine(name: str, chips: int):  # type: ignore[no-untyped-def]
    cluster = load_cluster(name).with_chips(chips)
    return resolve_machine(cluster, choose_calibration(cluster.chip), dtype=_setting().policy.compute)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_choice_costs_in_the_tables_what_its_plan_is_predicted_to_cost(name: str, zero: int) -> None:
    """Work of kernels that could be one but do not lie alike is more than the tables say; all else is equal."""
    network = load_network(name, **NETWORKS[name])  # type: ignore[arg-type]
    machine, setting = _machine("pase-1080ti", 16), _setting(zero=zero)
    planner = network_planner(network, cluster="pase-1080ti", num_chips=16, machine=machine, setting=setting, most_dims=2)
    space, tables = planner.space, planner.tables
    alike = list(space.choice(planner.search(data_parallel(network)).best.plan))
    rng = random.Random(7)
    for choice in (alike, *([rng.randrange(count) for count in space.num_configurations] for _ in range(4))):
        edges = [float(matrix[choice[u], choice[v]]) for u, v, matrix in tables.edges]
        if not np.isfinite(edges).all():
            continue  # readers of one parameter that hold it unlike
        plan = space.plan(choice, cluster="pase-1080ti")
        assert space.choice(plan) == tuple(choice)
        predicted = predict_network(network, plan, setting, machine)
        columns = list(zip(tables.vertices, choice, strict=True))
        work = sum(v.forward[c] + v.backward[c] for v, c in columns) + sum(edges)
        expected = sum(predicted.parts[part] for part in ("forward", "backward", "redistributions"))
        if choice is alike:
            assert work == pytest.approx(expected, rel=1e-9)
        elif not any(len(r) > 1 and network.tensors[t].role == "parameter" for t, r in network.readers().items()):
            assert 0.9 * expected < work < (1.0 + 1e-9) * expected
        additive = {
            "operator_collectives": sum(v.own[c] for v, c in columns),
            "optimizer": sum(v.optimizer[c] for v, c in columns),
        }
        for part, value in additive.items():
            assert value == pytest.approx(predicted.parts[part], rel=1e-9), part
        saved = sum(v.saved_bytes[c] for v, c in columns) + sum(float(m[choice[u], choice[v]]) for u, v, m in tables.edge_bytes)
        assert saved == pytest.approx(predicted.memory["saved_activations"], rel=1e-9)
        assert sum(v.state_bytes[c] for v, c in columns) == pytest.approx(predicted.memory["parameters_and_state"], rel=1e-9)
