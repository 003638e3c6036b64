"""The jobs that speed is measured on."""

from __future__ import annotations

from perfmodel.cost.estimate import Estimator, make_estimator
from perfmodel.cost.machine import resolve_machine
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import default_calibration
from perfmodel.hardware.reader import calibrations_for, load_cluster
from perfmodel.parallel.layout import divisors
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.models import load_model

CLUSTER = "dgx-h100"


def gpt3_estimator(num_chips: int = 4096, global_batch: int = 1536) -> Estimator:
    """GPT-3 175B, sequences of 2048, on H100 nodes of eight."""
    job = TrainingJob(model=load_model("gpt3-175b"), global_batch=global_batch, seq_len=2048)
    cluster = load_cluster(CLUSTER).with_chips(num_chips)
    calibration = default_calibration(cluster.chip.name, calibrations_for(cluster.chip.name))
    return make_estimator(job, cluster, resolve_machine(cluster, calibration, dtype=job.policy.compute), load_profile("megatron"))


def three_d_plans(estimator: Estimator) -> list[Plan]:
    """Distinct tensor x pipeline x data plans, as a user would ask for them one by one."""
    job, chips = estimator.job, estimator.cluster.num_chips
    plans = []
    for tp in (1, 2, 4, 8):
        for pp in (2, 4, 8, 16, 32):
            data = chips // (tp * pp)
            if job.global_batch % data:
                continue
            for micro_batch in divisors(job.global_batch // data):
                for recompute in ("none", "selective", "full"):
                    for zero in (0, 1):
                        plans.append(
                            make_plan(
                                job, cluster=CLUSTER, num_chips=chips, tp=tp, pp=pp, micro_batch=micro_batch, recompute=recompute, zero=zero
                            )
                        )
    return plans
