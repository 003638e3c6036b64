"""Plans of networks whose operators have shardings of their own, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfmodel.parallel.algebra.sharding import Held, Sharding
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.plan import Plan, assigned_plan
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel


def network_plan(
    network: Graph,
    axes: Sequence[MeshAxis],
    shardings: Mapping[str, Sharding],
    held: Mapping[str, Held] | None = None,
    *,
    stages: tuple[str, ...] = (),
    num_microbatches: int = 1,
    zero: int = 0,
    optimizer: str = Optimizer.SGD,
) -> Plan:
    """On this machine, in float32."""
    batch = max(1, network.batch)
    job = TrainingJob(
        model=NetworkModel(name=network.name),
        global_batch=batch * num_microbatches,
        seq_len=1,
        precision=Precision.FP32,
        optimizer=Optimizer(optimizer),
    )
    assignment = Assignment(axes=tuple(axes), shardings=shardings, held=held or {}, stages=stages)
    return assigned_plan(job, cluster="localhost", assignment=assignment, micro_batch=batch, zero=zero, profile="torch-gloo")


def changed(plan: Plan, *, zero: int | None = None, num_microbatches: int = 0, optimizer: str = "", **cuts: Any) -> Plan:
    """With other shardings, held layouts or stages (`cuts`), or trained otherwise; a stage's chips and its micro-batch stay."""
    job = replace(
        plan.job,
        global_batch=plan.micro_batch * (num_microbatches or plan.num_microbatches),
        optimizer=Optimizer(optimizer or plan.job.optimizer),
    )
    return assigned_plan(
        job,
        cluster=plan.cluster,
        assignment=replace(plan.cuts, **cuts),
        micro_batch=plan.micro_batch,
        zero=int(plan.zero) if zero is None else zero,
        profile=plan.profile,
        calibration=plan.calibration,
    )
