"""Microbenchmarks: what they count is what the cost model counts, and a calibration comes out of them. No time is asserted."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from perfmodel.calibrate.fit_host import fit_measurement
from perfmodel.cost.compute import streaming_time
from perfmodel.cost.resolve import resolve_estimator
from perfmodel.execute.measure.machine import alone, check_ranks, combine, match_gpu
from perfmodel.execute.measure.microbenchmarks import FEW_ROWS, Kernel, all_kernels, attention_calls, group_sizes, in_turn
from perfmodel.execute.measure.scope import Scope, make_scope
from perfmodel.execute.per_operator.microbenchmarks import cell_kernels, convolution_kernels, pooling_kernels
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import SPEC_SHEET, KernelClass
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.reader import list_chips, load_calibration
from perfmodel.hardware.samples import (
    AttentionSample,
    CollectiveSample,
    ContentionSample,
    ConvolutionSample,
    DecodeSample,
    MatmulSample,
    StreamingSample,
    WeightSample,
)
from perfmodel.hardware.writer import save_calibration
from perfmodel.parallel.plan import make_plan
from perfmodel.parallel.profile import load_profile
from perfmodel.workload.graph import Extent, Operator, Product, Stream, Tensor
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.kinds.convolution import convolution
from perfmodel.workload.kinds.lstm import lstm
from perfmodel.workload.kinds.pooling import pooling
from tests.execute.jobs import tiny

TINY = Scope(
    budget=0.0,
    matmuls=((16, 32, 8),),
    batched_matmuls=((2, 4, 4, 8),),
    half_matmuls=((16, 16, 16),),
    elements=(2048,),
    attentions=((1, 4, 2, 16, 8),),
    decodes=((2, 4, 2, 16, 8),),
    weights=((16, 8),),
    message_bytes=(256,),
    logit_bytes=40.0,
    dtype=Dtype.FP32,
    half_dtype=Dtype.BF16,
)

OF_NETWORKS = {KernelClass.MAX_POOLING, KernelClass.AVERAGE_POOLING, KernelClass.LSTM_CELL}


def test_every_kernel_runs_and_makes_a_sample():
    samples = []
    for kernel in all_kernels(TINY, "cpu"):
        kernel.call()
        samples.append(kernel.sample(1.0))
    forward, backward, sample = attention_calls(TINY.attentions[0], Dtype.FP32, "cpu")
    forward(), backward()
    assert sample(1.0, 2.0) == AttentionSample(
        batch=1, heads=4, kv_heads=2, query_length=16, key_length=16, head_dim=8, causal_fraction=0.5, dtype=Dtype.FP32, time=1.0,
        backward_time=2.0,
    )  # fmt: skip
    decode = DecodeSample(batch=2, heads=4, kv_heads=2, key_length=16, head_dim=8, dtype=Dtype.FP32, time=1.0)
    assert [s for s in samples if isinstance(s, DecodeSample)] == [decode]
    assert [(s.rows, s.outputs, s.inputs) for s in samples if isinstance(s, WeightSample)] == [(rows, 16, 8) for rows in FEW_ROWS]
    assert {s.kernel_class for s in samples if isinstance(s, StreamingSample)} == set(KernelClass) - OF_NETWORKS
    shapes = [(s.m, s.n, s.k) for s in samples if isinstance(s, MatmulSample) and s.dtype is Dtype.FP32 and s.batch == 1]
    assert shapes == [(16, 32, 8), (16, 8, 32), (32, 8, 16)]


def total(extent: Extent) -> int:
    return prod(size for size, _ in extent)


def test_convolutions_count_what_the_operator_counts():
    """Forward, gradient of the weight, gradient of the input: m, n, k and bytes of the kind's own products."""
    operator = convolution("conv", Tensor(name="x", shape=(2, 4, 9, 9)), "w", "y", filters=6, window=(3, 3), stride=(2, 2), padding=(1, 1))
    expected = []
    for work in (*operator.forward, *operator.backward):
        assert isinstance(work, Product)
        expected.append((total(work.m), total(work.n), total(work.k), 4.0 * sum(map(total, work.tensors))))
    samples = []
    for kernel in convolution_kernels((2, 4, 6, 9, 3, 2), Dtype.FP32, "cpu"):
        kernel.call()
        samples.append(kernel.sample(1.0))
    assert [(s.m, s.n, s.k, s.num_bytes) for s in samples if isinstance(s, ConvolutionSample)] == expected
    assert len(list(convolution_kernels((2, 3, 6, 9, 3, 2), Dtype.FP32, "cpu"))) == 2  # an image is data: it gets no gradient


@pytest.mark.parametrize("mode", ["max", "average"])
def test_pooling_counts_what_the_operator_counts(mode):
    operator = pooling("pool", Tensor(name="x", shape=(2, 4, 9, 9)), "y", window=(3, 3), stride=(2, 2), mode=mode)
    check_streams(operator, [*pooling_kernels((2, 4, 9, 3, 2), Dtype.FP32, "cpu")])


def test_an_lstm_cell_counts_what_the_operator_counts():
    check_streams(lstm("lstm", "gates", "w", "h", batch=3, seq_len=5, hidden=8), [*cell_kernels((3, 8), Dtype.FP32, "cpu")])


def check_streams(operator: Operator, kernels: list[Kernel]) -> None:
    """The kind's passes over memory, of one time step, are among the samples."""
    samples = []
    for kernel in kernels:
        kernel.call()
        samples.append(kernel.sample(1.0))
    for works, is_backward in ((operator.forward, False), (operator.backward, True)):
        (work,) = [work for work in works if isinstance(work, Stream)]
        assert (
            StreamingSample(
                kernel_class=KernelClass(work.kernel),
                num_bytes=4.0 * sum(total(access.extent) for access in work.accesses),
                num_elements=float(total(work.elements)),
                time=1.0,
                is_backward=is_backward,
            )
            in samples
        )


def test_bytes_and_elements_are_those_of_the_cost_model():
    """A program of one layer, priced by streaming kernels that take 1 s a byte: the samples of its operators add up to the same."""
    rows, width = 4, 512
    samples = [kernel.sample(1.0) for kernel in all_kernels(TINY, "cpu")]
    moved: dict[KernelClass, list[float]] = {}
    for sample in samples:
        if isinstance(sample, StreamingSample):
            moved.setdefault(sample.kernel_class, []).append(sample.num_bytes / (4 * rows * width))
    model = tiny("gpt2", hidden_size=width, head_dim=width // 8, intermediate_size=width, num_hidden_layers=1, vocab_size=64)
    job = TrainingJob(model=model, global_batch=1, seq_len=rows, precision=Precision.FP32)
    estimator = resolve_estimator(job, local_cluster(num_chips=1), calibration=SPEC_SHEET, profile=load_profile("torch-gloo"))
    plan = make_plan(job, cluster="localhost", num_chips=1, profile="torch-gloo")
    program = estimator.program(plan.rule_set, plan.attention, plan.recompute_operators)
    counted: dict[str, list[float]] = {}
    starts = [*program.rows.streaming.access_starts.tolist(), len(program.rows.streaming.accesses)]
    for row, name in enumerate(program.rows.streaming.names):
        amounts = program.rows.streaming.accesses[starts[row] : starts[row + 1]]
        counted.setdefault(name, []).append(float(program.amounts.base[amounts].sum()) / (4 * rows * width))
    assert sorted(counted["activation"]) == sorted(moved[KernelClass.GELU_TANH]) == [2.0, 3.0]
    assert sorted(counted["final_norm"]) == sorted(moved[KernelClass.LAYERNORM]) == [2.0, 3.0]
    assert 3.0 in counted["attention_add"]
    assert moved[KernelClass.ADD] == [3.0, 5.0, 1.0]
    assert moved[KernelClass.OPTIMIZER] == [7.0]
    assert job.policy.step_bytes_per_parameter(Optimizer.ADAMW) == 28


@pytest.mark.parametrize(
    "world, sizes", [(1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6)), (8, (2, 4, 8))]
)  # fmt: skip
def test_group_sizes_are_powers_of_two_and_the_world(world: int, sizes: tuple[int, ...]):
    assert group_sizes(world) == sizes


def test_copies_take_turns():
    made: list[list[int]] = []

    def make():
        mine: list[int] = []
        made.append(mine)
        return lambda: mine.append(1)

    call = in_turn(make, 8 * 2**20)
    for _ in range(8):
        call()
    assert [len(calls) for calls in made] == [2, 2, 2, 2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("brief", [True, False])
def test_scopes_span_the_sizes_that_plans_use(device: str, brief: bool):
    scope = make_scope(device, brief=brief, logit_bytes=40.0)
    assert max(scope.elements) >= 2**20
    assert max(scope.message_bytes) >= 8 * 2**20
    assert scope.matmuls
    assert scope.attentions


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
    assert set(calibration.matmul) == {Dtype.FP32, Dtype.BF16}
    assert set(calibration.streaming) == set(KernelClass)
    assert set(calibration.collectives["scale_up"]) == set(CollectiveKind)
    assert {"matmul", "streaming", "attention", "cores"} <= set(calibration.contention)
    assert calibration.launch_time > 0
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    job = TrainingJob(model=tiny("gpt2"), global_batch=8, seq_len=32, precision=Precision.FP32)
    estimator = resolve_estimator(job, local_cluster(num_chips=2), calibration=calibration, profile=load_profile("torch-gloo"))
    prediction = estimator.predict(make_plan(job, cluster="localhost", num_chips=2, dp_replicate=2, profile="torch-gloo"))
    assert prediction.rests_on["forward"] == f"calibrated: {calibration.name}"
    whole = replace(calibration, host_times={}, launch_time=0.0)
    bare = resolve_estimator(job, local_cluster(num_chips=2), calibration=whole, profile=load_profile("torch-gloo"))
    assert prediction.step_time > bare.predict(prediction.plan).step_time
    machine = estimator.machine
    assert streaming_time(num_bytes=2**20, num_elements=2**18, kernel_class=KernelClass.GELU_TANH, machine=machine) > 0
