"""The tables of a per-operator search and the prediction of a whole plan are one cost: every choice, every part."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.per_operator.operators import MeshPrices, StepSetting
from perfmodel.cost.per_operator.predict import predict_network
from perfmodel.cost.resolve import choose_calibration
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.per_operator.plan import mesh_axes
from perfmodel.parallel.profile import load_profile
from perfmodel.planner.per_operator.space import network_space
from perfmodel.planner.per_operator.tables import network_tables
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
    network = load_network(name, **NETWORKS[name])  # type: ignore[arg-type]
    machine, setting = _machine("pase-1080ti", 16), _setting(zero=zero)
    axes = mesh_axes(16, machine.tier_sizes)
    space = network_space(network, axes, most_dims=2)
    tables = network_tables(space, setting, MeshPrices(axes=axes, machine=machine))
    rng = random.Random(7)
    for _ in range(4):
        choice = [rng.randrange(count) for count in space.num_configurations]
        edges = [float(matrix[choice[u], choice[v]]) for u, v, matrix in tables.edges]
        if not np.isfinite(edges).all():
            continue  # readers of one parameter that hold it unlike
        plan = space.plan(choice, cluster="pase-1080ti")
        assert space.choice(plan) == tuple(choice)
        predicted = predict_network(network, plan, setting, machine)
        columns = list(zip(tables.vertices, choice, strict=True))
        additive = {
            "forward": sum(v.forward[c] for v, c in columns),
            "backward": sum(v.backward[c] for v, c in columns),
            "operator_collectives": sum(v.own[c] for v, c in columns),
            "optimizer": sum(v.optimizer[c] for v, c in columns),
        }
        for part, value in additive.items():
            assert value == pytest.approx(predicted.parts[part], rel=1e-9), part
        saved = sum(v.saved_bytes[c] for v, c in columns) + sum(float(m[choice[u], choice[v]]) for u, v, m in tables.edge_bytes)
        assert saved == pytest.approx(predicted.memory["saved_activations"], rel=1e-9)
        assert sum(v.state_bytes[c] for v, c in columns) == pytest.approx(predicted.memory["parameters_and_state"], rel=1e-9)
        if not any(len(r) > 1 and network.tensors[t].role == "parameter" for t, r in network.readers().items()):
            assert sum(edges) == pytest.approx(predicted.parts["redistributions"], rel=1e-9)
