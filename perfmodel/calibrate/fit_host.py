"""Host times of a machine whose host nothing hides (the processes of a CPU), from tiny training programs of every form.

A step of a model of a few thousand weights is hardly anything but dispatch, bookkeeping and waiting. What the calibrated kernels and
collectives do not explain of it is shared out among the events that the cost model counts: operators launched, operators on distributed
tensors, redistributions, parameter units gathered and reduced, bytes copied for them, passes through a pipeline stage, steps.

    measured - predicted without host times = sum over events of count * time,  time >= 0, least squares of relative errors

The counts are the derivatives of the prediction, so they are what the cost model will multiply the times with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.calibrate.fits import Array, rounded
from perfmodel.cost.estimate import make_estimator
from perfmodel.cost.machine import resolve_machine
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Precision, TrainingJob

LAUNCH = "launch"
EVENTS = (
    LAUNCH,
    "step",
    "dtensor_op",
    "redistribution",
    "redistribution_mebibyte",
    "gather_unit",
    "gather_mebibyte",
    "reduce_unit",
    "reduce_mebibyte",
    "gradient_mebibyte",
    "pipeline_send",
)
"""Host times that are fitted: the launch of an operator, and those that `Calibration.host_times` explains."""

_STEP = 1e-6
"""[s] Change of a host time from which the prediction's derivative is taken; the prediction is linear in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """A plan that ran, and the median of its step times [s]."""

    plan: Plan
    time: float


def tiny_model(*, layers: int, hidden: int, vocabulary: int, length: int) -> TransformerConfig:
    """A GPT-2 of that size."""
    return TransformerConfig(
        name=f"overhead-{layers}x{hidden}", architecture="gpt2", num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=8,
        num_key_value_heads=8, head_dim=hidden // 8, intermediate_size=4 * hidden, vocab_size=vocabulary, max_position_embeddings=length,
        gated_mlp=False, activation="gelu_tanh", norm="layernorm", position="learned", qkv_bias=True, attention_output_bias=True,
        mlp_bias=True, norm_bias=True, tie_word_embeddings=True,
    )  # fmt: skip


def overhead_plans(num_ranks: int, *, cluster: str, profile: str, brief: bool) -> tuple[Plan, ...]:
    """Tiny programs of every form on that many ranks (a power of two up to 8), each small and, for the bytes, somewhat larger."""
    n = num_ranks
    small = TrainingJob(
        model=tiny_model(layers=8, hidden=64, vocabulary=512, length=16), global_batch=2 * n, seq_len=16, precision=Precision.FP32
    )
    shallow = TrainingJob(
        model=tiny_model(layers=8 * n // 8 or 1, hidden=64, vocabulary=512, length=16),
        global_batch=2 * n,
        seq_len=16,
        precision=Precision.FP32,
    )
    wide = TrainingJob(
        model=tiny_model(layers=max(2, n), hidden=256, vocabulary=1024, length=64), global_batch=4 * n, seq_len=64, precision=Precision.FP32
    )

    def plan(job: TrainingJob, **knobs: int | str | bool) -> Plan:
        return make_plan(job, cluster=cluster, num_chips=n, profile=profile, **({"micro_batch": 1} | knobs))  # type: ignore[arg-type]

    plans = [plan(small, dp_replicate=n, micro_batch=2), plan(shallow, dp_replicate=n, micro_batch=2)]
    plans += [plan(wide, dp_replicate=n, micro_batch=4), plan(small, dp_replicate=n)]
    if n == 1:
        return tuple(plans)
    for job in (small, wide):
        batch = job.global_batch
        plans += [
            plan(job, dp_shard=n, zero=2, micro_batch=batch // n),
            plan(job, dp_shard=n, zero=3, micro_batch=batch // n),
            plan(job, tp=n, sequence_parallel=False, micro_batch=batch),
            plan(job, tp=n, sequence_parallel=True, micro_batch=batch),
            plan(job, pp=n, schedule="1f1b", micro_batch=batch // n),
        ]
        if not brief:
            plans += [
                plan(job, dp_shard=n, zero=1, micro_batch=batch // n),
                plan(job, cp=n, micro_batch=batch),
                plan(job, pp=n, schedule="gpipe", micro_batch=1),
            ]
    plans.append(plan(small, pp=n, schedule="1f1b"))
    return tuple(plans)


def predict_times(plans: Sequence[Plan], cluster: Cluster, calibration: Calibration, profile: ExecutionProfile) -> Array:
    """Predicted step times. [s]"""
    estimators = {}
    times = []
    for plan in plans:
        if plan.job not in estimators:
            machine = resolve_machine(cluster, calibration, dtype=plan.job.policy.compute)
            estimators[plan.job] = make_estimator(plan.job, cluster, machine, profile)
        times.append(estimators[plan.job].predict(plan).step_time)
    return np.array(times)


def with_host_time(calibration: Calibration, event: str, time: float) -> Calibration:
    if event == LAUNCH:
        return replace(calibration, launch_time=time)
    return replace(calibration, host_times={**calibration.host_times, event: time})


def fit_host_times(runs: Sequence[HostRun], cluster: Cluster, calibration: Calibration, profile: ExecutionProfile) -> Calibration:
    """The calibration with the host times that explain the runs best."""
    from scipy.optimize import nnls

    plans = [run.plan for run in runs]
    measured = np.array([run.time for run in runs])
    bare = replace(calibration, launch_time=0.0, host_times={})
    without = predict_times(plans, cluster, bare, profile)
    counts = np.stack(
        [(predict_times(plans, cluster, with_host_time(bare, event, _STEP), profile) - without) / _STEP for event in EVENTS], axis=1
    )
    counts = np.where(counts < 1e-6, 0.0, counts)
    scaled = counts / measured[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    found, _ = nnls(scaled / norms, (measured - without) / measured)
    times = {event: rounded(float(time)) for event, time in zip(EVENTS, found / norms, strict=True)}
    result = replace(bare, launch_time=times.pop(LAUNCH), host_times={event: time for event, time in times.items() if time > 0})
    errors = np.abs(predict_times(plans, cluster, result, profile) / measured - 1.0)
    return replace(
        result,
        points={**calibration.points, "host": len(runs)},
        errors={**calibration.errors, "host": round(float(np.median(errors)), 4)},
    )
