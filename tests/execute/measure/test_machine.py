"""Samples of one machine from the measurements of its ranks, and the calibration fitted to them. No time is asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.calibrate.fit_host import fit_measurement
from perfmodel.cost.compute import streaming_time
from perfmodel.cost.resolve import resolve_estimator
from perfmodel.execute.measure.machine import alone, check_ranks, combine, match_gpu
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import HostTimes, KernelClass
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.reader import list_chips, load_calibration
from perfmodel.hardware.samples import (
    CollectiveSample,
    ContentionSample,
    MatmulSample,
    StreamingSample,
)
from perfmodel.hardware.writer import save_calibration
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.job import Precision, TrainingJob
from tests.execute.jobs import tiny


def test_ranks_are_joined_by_their_mean_and_collectives_by_the_slowest():
    def matmul(time: float) -> MatmulSample:
        return MatmulSample(m=1, n=2, k=3, batch=1, dtype=Dtype.FP32, time=time)

    def reduce(time: float) -> CollectiveSample:
        return CollectiveSample(kind=CollectiveKind.ALL_REDUCE, num_bytes=4.0, group_size=2, time=time)

    assert combine([[matmul(1.0)], [matmul(3.0)]], slowest=False) == [matmul(2.0)]
    assert combine([[reduce(1.0), reduce(2.0)], [reduce(3.0), reduce(1.0)], []], slowest=True) == [reduce(3.0), reduce(2.0)]


def test_a_kernel_alone_is_quicker_by_the_contention_that_the_machine_adds_again():
    sample = StreamingSample(kernel_class=KernelClass.ADD, num_bytes=12.0, num_elements=1.0, time=1.2)
    contention = [ContentionSample(name="streaming", factor=1.2), ContentionSample(name="matmul", factor=9.0)]
    assert alone(sample, contention).time == pytest.approx(1.0)
    other = CollectiveSample(kind=CollectiveKind.ALL_REDUCE, num_bytes=4.0, group_size=2, time=1.0)
    assert alone(other, contention) == other


@pytest.mark.parametrize(
    "device, chip",
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
    ],
)
def test_the_driver_s_name_finds_the_chip(device: str, chip: str):
    assert match_gpu(device, list_chips()) == chip


def test_an_unknown_gpu_is_refused():
    with pytest.raises(InputError, match="no known chip"):
        match_gpu("Imaginary X9000", list_chips())


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(InputError, match="cores"):
        check_ranks(4096, "cpu")
    with pytest.raises(InputError, match="ranks=0"):
        check_ranks(0, "cpu")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_brief_calibration_holds_every_part_and_predicts(brief_machine, tmp_path: Path):
    path, (machine, seen) = tmp_path / "here.yaml", brief_machine
    calibration = fit_measurement(machine)
    save_calibration(calibration, path)
    assert load_calibration(path) == calibration
    assert set(calibration.kernels.matmul) == {Dtype.FP32, Dtype.BF16}
    assert set(calibration.kernels.streaming) == set(KernelClass)
    assert set(calibration.kernels.collectives["scale_up"]) == set(CollectiveKind)
    assert {"matmul", "streaming", "attention", "cores"} <= set(calibration.contention)
    assert calibration.host.launch_time > 0
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    job = TrainingJob(model=tiny("gpt2"), global_batch=8, seq_len=32, precision=Precision.FP32)
    estimator = resolve_estimator(job, local_cluster(num_chips=2), calibration=calibration, profile=load_profile("torch-gloo"))
    prediction = estimator.predict(make_plan(job, cluster="localhost", num_chips=2, dp_replicate=2, profile="torch-gloo"))
    assert prediction.rests_on["forward"] == f"calibrated: {calibration.name}"
    without_host = replace(calibration, host=HostTimes())
    bare = resolve_estimator(job, local_cluster(num_chips=2), calibration=without_host, profile=load_profile("torch-gloo"))
    assert prediction.step_time > bare.predict(prediction.plan).step_time
    machine = estimator.machine
    assert streaming_time(num_bytes=2**20, num_elements=2**18, kernel_class=KernelClass.GELU_TANH, machine=machine) > 0
