"""Kernels that are timed: what they count is what the cost model counts. No time is asserted."""

from __future__ import annotations

from math import prod

import pytest

from perfmodel.cost.resolve import resolve_estimator
from perfmodel.execute.measure.kernels import FEW_ROWS, Kernel, all_kernels, attention_calls
from perfmodel.execute.measure.scope import Scope
from perfmodel.execute.measure.state_kernels import state_kernels
from perfmodel.execute.per_operator.microbenchmarks import cell_kernels, convolution_kernels, pooling_kernels
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import SPEC_SHEET, KernelClass
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.samples import (
    AttentionSample,
    ConvolutionSample,
    DecodeSample,
    MatmulSample,
    StreamingSample,
    WeightSample,
)
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.graph import Operator, Tensor
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.kinds.cache import STATE_BYTES, UPDATE_KERNELS, state_shapes
from perfmodel.workload.kinds.convolution import convolution
from perfmodel.workload.kinds.lstm import lstm
from perfmodel.workload.kinds.pooling import pooling
from perfmodel.workload.models import load_model
from perfmodel.workload.work import Extent, Product, Stream
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
OF_STATES = {KernelClass.CAUSAL_CONV, *UPDATE_KERNELS.values(), KernelClass.STATE_SCAN, KernelClass.DELTA_SCAN}


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
    assert {s.kernel_class for s in samples if isinstance(s, StreamingSample)} == set(KernelClass) - OF_NETWORKS - OF_STATES
    shapes = [(s.m, s.n, s.k) for s in samples if isinstance(s, MatmulSample) and s.dtype is Dtype.FP32 and s.batch == 1]
    assert shapes == [(16, 32, 8), (16, 8, 32), (32, 8, 16)]


def test_kernels_of_states_count_what_serving_counts():
    """Two sequences of Nemotron 3 Nano's and Qwen3-Next's heads, of a quarter of their groups and of an eighth."""
    nemotron, qwen = (load_model(name) for name in ("nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b"))
    convolved, state = map(prod, state_shapes(nemotron, "mamba"))
    of_mamba, of_delta = 2 * state / 4, 2 * prod(state_shapes(qwen, "delta")[1]) / 8
    inputs = 2 * convolved / 3 / 4
    sizes = {}
    for positions in (1, 5):
        for kernel in state_kernels((2, positions, 2), Dtype.FP32, "cpu"):
            kernel.call()
            sample = kernel.sample(1.0)
            sizes[sample.kernel_class, positions] = sample.num_bytes, sample.num_elements
    assert {kernel for kernel, _ in sizes} == OF_STATES
    assert sizes == {
        (KernelClass.CAUSAL_CONV, 1): (8 * inputs, inputs),
        (KernelClass.CAUSAL_CONV, 5): (40 * inputs, 5 * inputs),
        (KernelClass.STATE_UPDATE, 1): (2 * STATE_BYTES * of_mamba, of_mamba),
        (KernelClass.DELTA_UPDATE, 1): (2 * STATE_BYTES * of_delta, of_delta),
        (KernelClass.STATE_SCAN, 5): (0.0, 5 * of_mamba),
        (KernelClass.DELTA_SCAN, 5): (0.0, 5 * of_delta),
    }


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
    assert_streams(operator, [*pooling_kernels((2, 4, 9, 3, 2), Dtype.FP32, "cpu")])


def test_an_lstm_cell_counts_what_the_operator_counts():
    assert_streams(lstm("lstm", "gates", "w", "h", batch=3, seq_len=5, hidden=8), [*cell_kernels((3, 8), Dtype.FP32, "cpu")])


def assert_streams(operator: Operator, kernels: list[Kernel]) -> None:
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
    program = estimator.programs.program(plan.rule_set, plan.attention, plan.recompute_operators)
    counted: dict[str, list[float]] = {}
    starts = [*program.rows.streaming.access_starts.tolist(), len(program.rows.streaming.accesses)]
    for row, name in enumerate(program.rows.streaming.names):
        amounts = program.rows.streaming.accesses[starts[row] : starts[row + 1]]
        counted.setdefault(name, []).append(float(program.rows.amounts.base[amounts].sum()) / (4 * width))  # amounts of one token
    assert sorted(counted["activation"]) == sorted(moved[KernelClass.GELU_TANH]) == [2.0, 3.0]
    assert sorted(counted["final_norm"]) == sorted(moved[KernelClass.LAYERNORM]) == [2.0, 3.0]
    assert 3.0 in counted["attention_add"]
    assert moved[KernelClass.ADD] == [3.0, 5.0, 1.0]
    assert moved[KernelClass.OPTIMIZER] == [7.0]
    assert job.policy.step_bytes_per_parameter(Optimizer.ADAMW) == 28
