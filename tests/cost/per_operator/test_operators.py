"""Cost of a network's operator where the calibration has a rate of its own for its kind."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import convolution_time, matmul_time, streaming_time
from perfmodel.cost.per_operator.operators import StepSetting, compile_operators, operator_cost
from perfmodel.cost.per_operator.parameters import parameter_times
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import (
    Calibration,
    ConvolutionModel,
    HostTimes,
    KernelClass,
    KernelModels,
    MatmulModel,
    StreamingModel,
)
from perfmodel.parallel.algebra.derive import Amount, ParameterLayout
from perfmodel.parallel.grid import free_grid
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision
from perfmodel.workload.kinds.convolution import convolution
from perfmodel.workload.kinds.pooling import pooling
from perfmodel.workload.work import Product
from tests.cost.machines import make_machine

PARTS = {
    "name": "cpu",
    "chips": ("test-chip",),
    "software": "",
    "source": "",
    "date": "",
    "peaks": {"flop_rate.fp32": 1e11, "memory_bandwidth": 1e10},
    "host": HostTimes(launch_time=1e-5),
}
MATMUL = {Dtype.FP32: MatmulModel(peak_fraction=1.0, sharpness=1.0)}
STREAMING = {
    KernelClass.DEFAULT: StreamingModel(bandwidth_fraction=1.0),
    KernelClass.ADD: StreamingModel(bandwidth_fraction=0.5, element_time=1e-11),
    KernelClass.OPTIMIZER: StreamingModel(bandwidth_fraction=2.0, element_time=3e-10, floor_time=1e-4),
    KernelClass.MAX_POOLING: StreamingModel(bandwidth_fraction=1.0, element_time=2e-9),
}
CONVOLUTION = {Dtype.FP32: ConvolutionModel(peak_fraction=2.0, memory_fraction=0.5, floor_time=1e-6)}
KERNELS = KernelModels(matmul=MATMUL, streaming=STREAMING)
CPU = make_machine(calibration=Calibration(**PARTS, kernels=replace(KERNELS, convolution=CONVOLUTION)), dtype=Dtype.FP32)
PLAIN = make_machine(calibration=Calibration(**PARTS, kernels=KERNELS), dtype=Dtype.FP32)


def setting(optimizer=Optimizer.SGD):
    return StepSetting(policy=PRECISION_POLICIES[Precision.FP32], optimizer=optimizer, profile=load_profile("torch-gloo"))


def same_convolution(window):
    return convolution(
        "conv", Tensor(name="x", shape=(8, 16, 20, 20)), "w", "y", filters=32, window=(window, window), padding=(window // 2,) * 2
    )


def cost(operator, machine, parts=None):
    """Return the times of both passes of an operator; `parts` gives the number of shards of each dim."""
    sizes = {dim: np.array([float((parts or {}).get(dim, 1))]) for dim in operator.dims}
    tensors = {operand.tensor: Tensor(name=operand.tensor, shape=(1,) * len(operand.dims)) for operand in operator.operands}
    graph = Graph(name="one", operators=(operator,), tensors=tensors)
    rows = compile_operators(graph, [(operator, {dim: (dim,) for dim in operator.dims}, operator.saved)], setting())
    costs = operator_cost(rows, free_grid(sizes, [sizes] * len(machine.tier_sizes), 1), machine)
    return costs.forward[0], costs.backward[0]


@pytest.mark.parametrize(("parts", "batch", "filters"), [({}, 8, 32), ({"b": 2}, 4, 32), ({"n": 4}, 8, 8)])
def test_a_convolution_reads_its_input_once_and_not_once_a_window(parts, batch, filters):
    m, k, weight = batch * 400, 16 * 9, filters * 16 * 9
    num_bytes = 4.0 * (batch * 16 * 400 + weight + m * filters)
    expected = 1e-6 + 2.0 * m * filters * k / 2e11 + num_bytes / 5e9 + 1e-5
    forward, backward = cost(same_convolution(3), CPU, parts)
    assert forward == pytest.approx(expected)
    assert backward == pytest.approx(2.0 * expected)


def test_a_window_of_one_entry_is_a_plain_product():
    product = {"batch": 1.0, "m": 3200.0, "n": 32.0, "k": 16.0, "itemsize": 4.0}
    assert cost(same_convolution(1), CPU)[0] == pytest.approx(matmul_time(**product, machine=CPU) + 1e-5)


def test_without_a_rate_of_their_own_convolutions_are_matrix_multiplies():
    product = {"batch": 1.0, "m": 3200.0, "n": 32.0, "k": 144.0, "itemsize": 4.0}
    expected = matmul_time(**product, machine=PLAIN)
    assert cost(same_convolution(3), PLAIN)[0] == pytest.approx(expected + 1e-5)
    assert convolution_time(**product, num_bytes=1e6, machine=PLAIN) == expected


def test_what_repeats_is_launched_each_time():
    x, h = Operand(tensor="x", dims=("m", "k")), Operand(tensor="y", dims=("m", "n"))
    work = (Product(m=((64, "m"),), n=((32, "n"),), k=((16, "k"),), repeats=5),)
    steps = Operator(name="steps", kind="steps", dims={"m": 64, "n": 32, "k": 16}, inputs=(x,), output=h, forward=work)
    once = matmul_time(batch=1.0, m=16.0, n=32.0, k=16.0, itemsize=4.0, machine=PLAIN) + 1e-5
    assert cost(steps, PLAIN, {"m": 4})[0] == pytest.approx(5.0 * once)


def test_neighbours_on_the_outermost_tier_set_the_pace_of_sends():
    """Four shards of the height, two to a node: what goes between nodes takes as long as two ranks on two nodes take."""
    operator = same_convolution(3)
    (sent, *_) = operator.traffic
    sizes = {dim: np.array([4.0 if dim == "h" else 1.0]) for dim in operator.dims}
    tensors = {operand.tensor: Tensor(name=operand.tensor, shape=(1,) * len(operand.dims)) for operand in operator.operands}
    graph = Graph(name="one", operators=(replace(operator, traffic=(sent,)),), tensors=tensors)
    rows = compile_operators(graph, [(graph.operators[0], {dim: (dim,) for dim in operator.dims}, ())], setting())
    inner = sizes | {"h": np.array([2.0])}
    time = operator_cost(rows, free_grid(sizes, [inner, sizes], 1), CPU).collectives[0]
    num_bytes = 4.0 * prod(size / (4 if dim == "h" else 1) for size, dim in sent.extent)
    pair = collective_time(
        CollectiveKind.SEND_RECV, num_bytes, group_size=np.array([2.0]), inside=[np.ones(1), np.full(1, 2.0)], machine=CPU
    )
    assert time == pytest.approx(sent.repeats * pair[0])


def test_pooling_takes_time_for_every_entry_of_every_window():
    operator = pooling("pool", Tensor(name="x", shape=(2, 4, 9, 9)), "y", window=(3, 3), stride=(2, 2))
    written = 2 * 4 * 4 * 4
    num_bytes = 4.0 * (2 * 4 * 81 + 3 * written)
    assert cost(operator, CPU)[0] == pytest.approx(num_bytes / 1e10 + 9 * written * 2e-9 + 1e-5)


def held(step, *, num_elements=1e6, ways=1):
    """Return the times of one parameter whose gradient is partial on `ways` ranks, all on one node."""
    sizes = {"samples": np.array([float(ways)])}
    layout = ParameterLayout(
        name="w",
        num_rows=int(num_elements),
        num_columns=1,
        row_axes=frozenset(),
        column_axes=frozenset(),
        gradient_axes=frozenset(("samples",)),
        sum_axes=frozenset(),
        regions=(),
        elements=Amount(base=num_elements),
    )
    grid = free_grid(sizes, [sizes] * len(CPU.tier_sizes), 1)
    return parameter_times([layout], [1.0], step, CPU, grid)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(Optimizer.SGD, 12e6 / 5e9 + 1e6 * 1e-11), (Optimizer.ADAMW, 28e6 / 2e10 + 1e6 * 3e-10)],
)
def test_an_optimizer_takes_time_for_bytes_and_elements(optimizer, expected):
    """A million parameters, without a kernel's floor: sgd is a pass that adds (w, g, w), AdamW as its kernel was measured."""
    time = held(setting(optimizer)).optimizer[0]
    assert time == pytest.approx(expected, rel=1e-3)
    kernel = KernelClass.OPTIMIZER if optimizer is Optimizer.ADAMW else KernelClass.ADD
    num_bytes = 28e6 if optimizer is Optimizer.ADAMW else 12e6
    alone = streaming_time(num_bytes=num_bytes, num_elements=1e6, kernel_class=kernel, machine=CPU)
    assert time <= float(alone)


@pytest.mark.parametrize(("zero", "per_step"), [(1, 1), (2, 4), (3, 4)])
def test_gradients_of_which_a_shard_stays_are_scattered_as_often_as_the_framework_does(zero, per_step):
    """torch's each microbatch, and weights that lie as shards are gathered each pass; Megatron's once a step."""

    def collective(kind, num_bytes):
        return collective_time(kind, num_bytes, group_size=np.array([4.0]), inside=[np.array([4.0])] * len(CPU.tier_sizes), machine=CPU)[0]

    scatter, gather = collective(CollectiveKind.REDUCE_SCATTER, 4e6), collective(CollectiveKind.ALL_GATHER, 4e6)
    step = replace(setting(), zero=zero, num_microbatches=4)
    repeated, once = held(step, ways=4), held(replace(step, profile=load_profile("megatron")), ways=4)
    stores_shards = step.gathers
    assert 4 * repeated.reductions[0] == pytest.approx(per_step * scatter)
    assert 4 * once.reductions[0] == pytest.approx(scatter)
    assert repeated.gathers[0] == pytest.approx({1: 0.0, 2: float(stores_shards), 3: 2.0}[zero] * gather)
    assert 4 * repeated.published[0] == pytest.approx(0.0 if stores_shards else gather)


def test_memory_of_parameters_has_the_profile_s_copies():
    """bf16 weights and gradients, AdamW: gradients of Megatron are float32; torch's FSDP stores float32 weights alone."""
    mixed = replace(setting(Optimizer.ADAMW), policy=PRECISION_POLICIES[Precision.BF16_MIXED])
    megatron, torch = (replace(mixed, profile=load_profile(name)) for name in ("megatron", "torch-fsdp2"))
    assert held(megatron).held_bytes[0] == pytest.approx(1e6 * (2 + 4 + 12))
    assert held(replace(megatron, zero=1), ways=4).held_bytes[0] == pytest.approx(1e6 * (2 + 4 + 12 / 4))
    assert held(replace(torch, zero=3), ways=4).held_bytes[0] == pytest.approx(1e6 * (4 + 4 + 8) / 4)
