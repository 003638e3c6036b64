"""Host times of a machine that does not overlap its host with compute (processes of a CPU), from tiny training programs of every form.

A step of a model with a few thousand weights consists of dispatch, bookkeeping and waiting. The calibrated kernels explain part of the
processor time of a rank's main thread. The rest is attributed to the events that the cost model counts: operators launched, operators on
distributed tensors, redistributions, parameter units gathered and reduced, bytes copied for them, passes through a pipeline stage, steps.
Waiting needs no processor time: collectives are assumed to be free, and bubbles are excluded.

    measured - predicted without host times = sum over events of count * time,  time >= 0, least squares of relative errors

The counts are derivatives of the prediction, so they equal the factors by which the cost model multiplies the times.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.calibrate.fit_machine import LAUNCH, fit_machine
from perfmodel.calibrate.fits import Array, fit_linear, rounded
from perfmodel.cost.estimate import make_estimator
from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile, load_profile
from perfmodel.hardware.calibration import SCALE_UP, Calibration, CollectiveModel, HostTimes
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import MachineMeasurement

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
"""Fitted host times: the launch of an operator, and those described in `HostTimes.host_times`."""

_FREE = 1e9
"""Bandwidth fraction of a link at which a transfer takes no time."""

_STEP = 1e-6
"""Step of the finite difference of the prediction by a host time, in which it is linear. [s]"""


def processor_times(plans: Sequence[Plan], cluster: Cluster, calibration: Calibration, profile: ExecutionProfile) -> Array:
    """Return the predicted processor time of a step in the busiest rank's main thread. [s]"""
    free = CollectiveModel(bandwidth_fraction=_FREE)
    calibration = replace(calibration, kernels=replace(calibration.kernels, collectives={SCALE_UP: dict.fromkeys(CollectiveKind, free)}))
    estimators = {}
    times = []
    for plan in plans:
        if plan.job not in estimators:
            machine = resolve_machine(cluster, calibration, dtype=plan.job.policy.compute)
            estimators[plan.job] = make_estimator(plan.job, cluster, machine, profile)
        prediction = estimators[plan.job].predict(plan)
        times.append(prediction.step_time - prediction.parts["pipeline_bubble"])
    return np.array(times)


def with_host_time(calibration: Calibration, event: str, time: float) -> Calibration:
    """Return the calibration with one host time replaced."""
    changed = {"launch_time": time} if event == LAUNCH else {"host_times": {**calibration.host.host_times, event: time}}
    return replace(calibration, host=replace(calibration.host, **changed))


def fit_host_times(
    runs: Sequence[tuple[Plan, float]], cluster: Cluster, calibration: Calibration, profile: ExecutionProfile
) -> Calibration:
    """Return the calibration with the host times that fit the runs best. A run is a plan and the processor time of its step [s]."""
    plans = [plan for plan, _ in runs]
    measured = np.array([time for _, time in runs])
    bare = replace(calibration, host=HostTimes())
    without = processor_times(plans, cluster, bare, profile)
    counts = np.stack(
        [(processor_times(plans, cluster, with_host_time(bare, event, _STEP), profile) - without) / _STEP for event in EVENTS], axis=1
    )
    counts = np.where(counts < 1e-6, 0.0, counts)
    times = {event: rounded(float(time)) for event, time in zip(EVENTS, fit_linear(counts, measured, without), strict=True)}
    host = HostTimes(launch_time=times.pop(LAUNCH), host_times={event: time for event, time in times.items() if time > 0})
    result = replace(bare, host=host)
    errors = np.abs(processor_times(plans, cluster, result, profile) / measured - 1.0)
    points = {**calibration.fit.points, "host": len(runs)}
    medians = {**calibration.fit.errors, "host": round(float(np.median(errors)), 4)}
    return replace(result, fit=replace(calibration.fit, points=points, errors=medians))


def fit_measurement(measured: MachineMeasurement) -> Calibration:
    """Return the calibration of a machine from its microbenchmarks: kernels and collectives first, then the remaining host times."""
    cluster = measured.cluster
    calibration = fit_machine(measured.samples, name=f"local-{cluster.chip.name}", chip=cluster.chip.name, software=measured.software)
    fit = replace(calibration.fit, busy_fraction=round(measured.busy_fraction, 3))
    calibration = replace(calibration, notes=measured.notes, fit=fit)
    if not measured.programs:
        return calibration
    return fit_host_times(measured.programs, cluster, calibration, load_profile(measured.profile))
