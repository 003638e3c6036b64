"""Host times are recovered from step times that they explain."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.calibrate.fit_host import EVENTS, LAUNCH, fit_host_times, processor_times, with_host_time
from perfmodel.cost.machine import contention_factor, resolve_machine
from perfmodel.execute.measure.overhead_programs import overhead_plans
from perfmodel.execute.runner import executable_reason
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import SPEC_SHEET, Calibration, CollectiveModel, HostTimes, Provenance
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.local import local_cluster

PROFILE = load_profile("torch-gloo")
TRUE_TIMES = {
    LAUNCH: 1e-5,
    "step": 1e-3,
    "dtensor_op": 1e-4,
    "redistribution": 5e-5,
    "redistribution_mebibyte": 8e-4,
    "gather_unit": 4e-4,
    "gather_mebibyte": 3e-4,
    "reduce_unit": 6e-4,
    "reduce_mebibyte": 9e-4,
    "gradient_mebibyte": 2e-4,
    "pipeline_send": 5e-4,
}


def machine(num_ranks: int = 2) -> tuple[Cluster, Calibration]:
    cluster = local_cluster(num_chips=num_ranks)
    models = {kind: CollectiveModel(base_time=2e-4, bandwidth_fraction=0.5) for kind in CollectiveKind}
    calibration = replace(
        SPEC_SHEET,
        name="known",
        chips=(cluster.chip.name,),
        provenance=Provenance.CALIBRATED,
        kernels=replace(SPEC_SHEET.kernels, collectives={"scale_up": models}),
        peaks={"flop_rate.fp32": 1e11, "memory_bandwidth": 2e10},
    )
    return cluster, calibration


def with_true_times(calibration: Calibration) -> Calibration:
    for event, time in TRUE_TIMES.items():
        calibration = with_host_time(calibration, event, time)
    return calibration


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("brief", [True, False])
def test_overhead_plans_can_be_run(num_ranks: int, brief: bool):
    plans = overhead_plans(num_ranks, cluster="localhost", profile="torch-gloo", brief=brief)
    assert plans
    assert {executable_reason(plan, num_ranks) for plan in plans} == {""}
    assert len({plan.hash() for plan in plans}) == len(plans)


@pytest.mark.slow
def test_host_times_that_explain_the_runs_are_found():
    cluster, calibration = machine()
    plans = overhead_plans(2, cluster="localhost", profile="torch-gloo", brief=False)
    times = processor_times(plans, cluster, with_true_times(calibration), PROFILE)
    fitted = fit_host_times(list(zip(plans, times, strict=True)), cluster, calibration, PROFILE)
    again = processor_times(plans, cluster, fitted, PROFILE)
    assert again == pytest.approx(times, rel=1e-3)
    assert fitted.host.launch_time == pytest.approx(TRUE_TIMES[LAUNCH], rel=0.01)
    for event in ("pipeline_send", "gather_unit", "gather_mebibyte", "reduce_unit", "reduce_mebibyte"):
        assert fitted.host.host_times[event] == pytest.approx(TRUE_TIMES[event], rel=0.05), event
    assert fitted.fit.points["host"] == len(plans)


@pytest.mark.slow
def test_noise_of_ten_percent_moves_the_prediction_of_another_batch_by_little_more():
    cluster, calibration = machine()
    plans = overhead_plans(2, cluster="localhost", profile="torch-gloo", brief=False)
    truth = with_true_times(calibration)
    noise = np.exp(0.1 * np.random.default_rng(3).standard_normal(len(plans)))
    times = processor_times(plans, cluster, truth, PROFILE) * noise
    fitted = fit_host_times(list(zip(plans, times, strict=True)), cluster, calibration, PROFILE)
    job = replace(plans[0].job, global_batch=16)
    others = [replace(plan, job=job) for plan in plans if plan.job == plans[0].job]
    expected = processor_times(others, cluster, truth, PROFILE)
    assert processor_times(others, cluster, fitted, PROFILE) == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_runs_quicker_than_their_kernels_leave_no_host_time():
    cluster, calibration = machine()
    plans = overhead_plans(2, cluster="localhost", profile="torch-gloo", brief=True)
    bare = processor_times(plans, cluster, replace(calibration, host=HostTimes()), PROFILE)
    runs = list(zip(plans, bare / 2, strict=True))
    fitted = fit_host_times(runs, cluster, calibration, PROFILE)
    assert fitted.host.launch_time == 0
    assert not fitted.host.host_times


@pytest.mark.slow
def test_every_event_is_counted_by_some_form():
    cluster, calibration = machine()
    plans = overhead_plans(2, cluster="localhost", profile="torch-gloo", brief=False)
    without = processor_times(plans, cluster, calibration, PROFILE)
    for event in EVENTS:
        assert (processor_times(plans, cluster, with_host_time(calibration, event, 1e-3), PROFILE) > without).any(), event


def test_processes_that_share_memory_slow_one_another_down_and_more_than_cores_take_turns():
    contention = {"cores": 2.0, "matmul": 1.1}
    assert contention_factor({}, "matmul", 64) == 1
    assert contention_factor(contention, "matmul", 1) == 1
    assert contention_factor(contention, "matmul", 2) == pytest.approx(1.1)
    assert contention_factor(contention, "matmul", 4) == pytest.approx(2.2)
    assert contention_factor(contention, "host", 2) == 1


def test_contention_slows_every_kind_of_kernel():
    cluster, calibration = machine()
    quiet = resolve_machine(cluster, calibration, dtype=Dtype.FP32)
    contention = {"cores": 2.0, "matmul": 1.1, "streaming": 1.2, "attention": 1.3}
    busy = resolve_machine(cluster, replace(calibration, contention=contention), dtype=Dtype.FP32)
    assert busy.matmul.flop_rate == pytest.approx(quiet.matmul.flop_rate / 1.1)
    assert busy.streaming.table == pytest.approx(quiet.streaming.table * 1.2)
    assert busy.attention["flash"].flop_rate == pytest.approx(quiet.attention["flash"].flop_rate / 1.3)
