"""Laws of the operator times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import compute
from perfmodel.cost.compute import attention_time, matmul_time, streaming_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import (
    KERNEL_CODE,
    AttentionModel,
    Calibration,
    KernelClass,
    KernelModels,
    MatmulModel,
    StreamingModel,
)
from perfmodel.hardware.reader import load_calibration
from tests.cost.machines import CALIBRATED, make_chip, make_machine, shipped_machine

CPU = Calibration(
    name="cpu",
    chips=("test-chip",),
    software="",
    source="",
    date="",
    kernels=KernelModels(
        matmul={Dtype.FP32: MatmulModel(peak_fraction=1.0, depth_offset=8, floor_time=1e-6, sharpness=1.0)},
        streaming={
            KernelClass.DEFAULT: StreamingModel(bandwidth_fraction=1.0, floor_time=1e-6, caches=((1e6, 8.0), (3e7, 3.0))),
            KernelClass.GELU: StreamingModel(bandwidth_fraction=1.0, floor_time=1e-6, element_time=1e-9),
        },
        attention={"flash": AttentionModel(peak_fraction=0.5), "flash.bf16": AttentionModel(peak_fraction=0.25)},
    ),
    peaks={"flop_rate.fp32": 2e11, "memory_bandwidth": 13e9},
)
MACHINES = {
    "spec": make_machine(),
    "cpu": make_machine(calibration=CPU, dtype=Dtype.FP32),
    **{name: shipped_machine(name) for name in CALIBRATED},
}
machines = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
SHAPE = {"batch": 2.0, "heads": 16.0, "kv_heads": 8.0, "query_length": 2048.0, "key_length": 4096.0, "head_dim": 128.0,
         "causal_fraction": 0.5, "itemsize": 2.0}  # fmt: skip
PRODUCT = {"batch": 1.0, "m": 4096.0, "n": 4096.0, "k": 4096.0, "itemsize": 2.0}


def random_arrays(shape, *names, low=1, high=8192, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.integers(low, high, shape).astype(float) for name in names}


def check_rows_equal_single(function, columns, **constants):
    """Each element of a batch, and each column of it, equals the evaluation on its own, to the bit."""
    batch = function(**columns, **constants)
    rows, plans = batch.shape
    for row in range(0, rows, 3):
        for plan in range(0, plans, max(plans // 7, 1)):
            alone = {name: column[row, plan] if column.shape[1] > 1 else column[row, 0] for name, column in columns.items()}
            assert function(**alone, **constants) == batch[row, plan]
    for plan in range(0, plans, max(plans // 5, 1)):
        column = {name: values[:, plan : plan + 1] if values.shape[1] > 1 else values for name, values in columns.items()}
        np.testing.assert_array_equal(function(**column, **constants), batch[:, plan : plan + 1])


@machines
@pytest.mark.parametrize("plans", [1, 7, 301])
def test_matmul_row_of_a_batch_equals_the_single_one(machine, plans):
    columns = random_arrays((60, plans), "m", "n") | random_arrays((60, 1), "k", seed=1) | random_arrays((60, 1), "batch", high=64, seed=2)
    check_rows_equal_single(matmul_time, columns, itemsize=2.0, machine=machine)


def test_matmul_is_the_same_with_tiles_stacked_or_one_by_one(monkeypatch):
    columns = random_arrays((60, 50), "m", "n", "k")
    stacked = matmul_time(batch=1.0, **columns, itemsize=2.0, machine=MACHINES["a100"])
    monkeypatch.setattr(compute, "STACK_LIMIT", 0)
    np.testing.assert_array_equal(matmul_time(batch=1.0, **columns, itemsize=2.0, machine=MACHINES["a100"]), stacked)


@machines
def test_streaming_row_of_a_batch_equals_the_single_one(machine):
    columns = random_arrays((30, 41), "num_bytes", high=2**31) | random_arrays((30, 41), "num_elements", high=2**30, seed=1)
    codes = np.arange(30)[:, None] % len(KernelClass)
    batch = streaming_time(**columns, kernel_class=codes, machine=machine)
    for row in range(30):
        kernel = list(KernelClass)[codes[row, 0]]
        alone = {name: column[row, 5] for name, column in columns.items()}
        assert streaming_time(**alone, kernel_class=kernel, machine=machine) == batch[row, 5]


@machines
@pytest.mark.parametrize("is_backward", [False, True])
def test_attention_row_of_a_batch_equals_the_single_one(machine, is_backward):
    columns = random_arrays((9, 50), "batch", "heads", high=64) | random_arrays((9, 50), "query_length", "key_length", seed=1)
    columns["kv_heads"] = columns["heads"]
    constants = {"head_dim": 128.0, "causal_fraction": 0.5, "itemsize": 2.0, "is_backward": is_backward}
    check_rows_equal_single(attention_time, columns, **constants, machine=machine)


@machines
@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["batch", "m", "n", "k"]),
    shape=st.tuples(*[st.integers(1, 20000)] * 3),
    batch=st.integers(1, 200),
    more=st.integers(1, 5000),
)
@pytest.mark.slow
def test_a_larger_matmul_is_not_quicker(machine, name, shape, batch, more):
    small = dict(zip(("m", "n", "k"), map(float, shape), strict=True)) | {"batch": float(batch)}
    large = small | {name: small[name] + more}
    # Small products choose their tile by what is left over; nothing else may make a larger one quicker.
    assert matmul_time(**large, itemsize=2.0, machine=machine) >= matmul_time(**small, itemsize=2.0, machine=machine) * (1 - 1e-12)


@machines
@pytest.mark.parametrize("kernel", list(KernelClass))
def test_more_bytes_take_longer(machine, kernel):
    num_bytes = np.geomspace(1, 1e11, 500)
    time = streaming_time(num_bytes=num_bytes, num_elements=num_bytes / 4, kernel_class=kernel, machine=machine)
    assert (np.diff(time) > 0).all()


@pytest.mark.parametrize("name", ["query_length", "key_length", "heads", "head_dim", "batch"])
@machines
def test_more_attention_takes_longer(machine, name):
    sizes = np.arange(1.0, 3000.0, 37)
    time = attention_time(**(SHAPE | {name: sizes}), machine=machine)
    assert (np.diff(time) >= -1e-15).all()


def test_a_faster_chip_is_not_slower():
    fast = make_chip(peak_flop_rate={Dtype.BF16: 800e12})
    for function, operands in ((matmul_time, PRODUCT), (attention_time, SHAPE)):
        assert function(**operands, machine=make_machine(chip=fast)) < function(**operands, machine=make_machine())


def test_the_clock_factor_slows_matmuls_only():
    cool, hot = shipped_machine("h100", clock=False), shipped_machine("h100")
    clock = load_calibration("h100").sustained.sustained_clock_fraction
    assert clock < 1
    slow = matmul_time(**PRODUCT, machine=hot) / matmul_time(**PRODUCT, machine=cool)
    assert slow == pytest.approx(1 / clock, rel=0.02)
    stream = {"num_bytes": 1e10, "num_elements": 5e9, "kernel_class": KernelClass.DEFAULT}
    assert streaming_time(**stream, machine=hot) == pytest.approx(streaming_time(**stream, machine=cool), rel=1e-3)


def test_a_batch_of_products_fills_the_chip():
    """Thirty-two products at once take far less than thirty-two times one: their tiles share the waves."""
    one = {"m": 256.0, "n": 256.0, "k": 64.0, "itemsize": 2.0, "machine": MACHINES["a100"]}
    assert matmul_time(batch=32.0, **one) < 8 * matmul_time(batch=1.0, **one)
    assert matmul_time(batch=3200.0, **one) > 50 * matmul_time(batch=32.0, **one)


def test_without_tiles_a_matmul_is_flops_over_rate():
    expected = 1e-6 + 2 * 100 * 200 * (300 + 8) / 2e11 + 4 * (100 * 300 + 300 * 200 + 100 * 200) / 13e9
    assert matmul_time(batch=1, m=100, n=200, k=300, itemsize=4, machine=MACHINES["cpu"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("num_bytes", "bandwidth"), [(5e4, 104e9), (5e6, 39e9), (5e9, 13e9)])
def test_streaming_falls_from_cache_to_memory_bandwidth(num_bytes, bandwidth):
    stream = {"num_bytes": num_bytes, "num_elements": num_bytes / 4, "kernel_class": KernelClass.DEFAULT}
    time = streaming_time(**stream, machine=MACHINES["cpu"]) - 1e-6
    assert num_bytes / time == pytest.approx(bandwidth, rel=0.15)


def test_compute_bound_streaming_costs_its_elements():
    stream = {"num_bytes": 8e6, "num_elements": 1e6, "kernel_class": KernelClass.GELU}
    assert streaming_time(**stream, machine=MACHINES["cpu"]) == pytest.approx(1e-6 + 8e6 / 13e9 + 1e6 * 1e-9, rel=1e-12)


def test_an_attention_entry_for_a_dtype_takes_the_place_of_the_plain_one():
    assert make_machine(calibration=CPU, dtype=Dtype.FP32).attention["flash"].model.peak_fraction == 0.5
    assert make_machine(calibration=CPU, dtype=Dtype.BF16).attention["flash"].model.peak_fraction == 0.25


def test_backward_is_five_products_against_two():
    shape = SHAPE | {"key_length": 65536.0, "query_length": 65536.0}
    machine = MACHINES["a100"]
    ratio = attention_time(**shape, machine=machine, is_backward=True) / attention_time(**shape, machine=machine)
    assert ratio == pytest.approx(2.5 / machine.attention["flash"].model.backward_rate, rel=0.01)


def test_codes_are_the_order_of_the_classes():
    assert [KERNEL_CODE[kernel] for kernel in KernelClass] == list(range(len(KernelClass)))


def test_one_row_per_operator_is_quick():
    """The budget of one prediction: about 40 us for all its matrix multiplies (here with room for a busy machine)."""
    import timeit

    columns = random_arrays((60, 1), "m", "n", "k")
    best = min(timeit.repeat(lambda: matmul_time(batch=1.0, **columns, itemsize=2.0, machine=MACHINES["a100"]), number=50, repeat=7)) / 50
    assert best < 200e-6
