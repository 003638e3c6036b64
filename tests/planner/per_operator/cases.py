"""Small networks on small clusters for tests of the per-operator search."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.per_operator.operators import StepSetting
from perfmodel.cost.resolve import choose_calibration, resolve_estimator
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.per_operator.search import NetworkPlanner, network_planner
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel


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


def estimator(
    network_at: Callable[[int], Graph], chips: int, *, global_batch: int, cluster: str = "pase-1080ti", profile: str = "megatron"
) -> Estimator:
    """In float32, with momentum."""
    machines = load_cluster(cluster).with_chips(chips)
    name = network_at(global_batch).name
    job = TrainingJob(
        model=NetworkModel(name=name), global_batch=global_batch, seq_len=1, precision=Precision.FP32, optimizer=Optimizer.MOMENTUM
    )
    return resolve_estimator(
        job, machines, calibration=choose_calibration(machines.chip), profile=load_profile(profile), network_at=network_at
    )


def planner(
    network: Graph,
    chips: int,
    *,
    cluster: str = "pase-1080ti",
    profile: str = "megatron",
    most_dims: int = 0,
    zero: int = 0,
    num_microbatches: int = 1,
) -> NetworkPlanner[Prediction]:
    of_network = estimator(lambda batch: network, chips, global_batch=network.batch * num_microbatches, cluster=cluster, profile=profile)
    return network_planner(of_network, cluster=cluster, num_microbatches=num_microbatches, zero=zero, most_dims=most_dims)
