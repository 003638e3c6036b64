"""Small networks on small clusters for tests of the per-operator search."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.per_operator.operators import StepSetting
from perfmodel.cost.resolve import choose_calibration
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.profile import load_profile
from perfmodel.planner.per_operator.search import NetworkPlanner, network_planner
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision


@lru_cache
def machine(name: str, chips: int, precision: Precision = Precision.FP32) -> Machine:
    cluster = load_cluster(name).with_chips(chips)
    return resolve_machine(cluster, choose_calibration(cluster.chip), dtype=PRECISION_POLICIES[precision].compute)


def setting(**changes: Any) -> StepSetting:
    given = {
        "policy": PRECISION_POLICIES[Precision.FP32],
        "optimizer": Optimizer.MOMENTUM,
        "profile": load_profile("megatron"),
    }
    return StepSetting(**{**given, **changes})


def planner(network: Graph, chips: int, *, cluster: str = "pase-1080ti", most_dims: int = 0, **changes: Any) -> NetworkPlanner:
    return network_planner(
        network,
        cluster=cluster,
        num_chips=chips,
        machine=machine(cluster, chips),
        setting=setting(**changes),
        most_dims=most_dims,
    )
