"""Laws of the kernels of serving and of mixtures of experts: grouped products, attention of one new token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.compute import attention_decode_time, grouped_matmul_time, grouped_product_time, matmul_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SPEC_SHEET, DecodeAttentionModel, GroupedMatmulModel, KernelClass, MatmulModel, StreamingModel
from tests.cost.machines import CALIBRATED, make_chip, make_machine, shipped_machine

CPU = replace(
    SPEC_SHEET,
    kernels=replace(
        SPEC_SHEET.kernels,
        matmul={Dtype.FP32: MatmulModel(peak_fraction=1.0)},
        streaming={KernelClass.DEFAULT: StreamingModel(bandwidth_fraction=1.0)},
    ),
)
MACHINES = {
    "spec": make_machine(),
    "cpu": make_machine(calibration=CPU, dtype=Dtype.FP32),
    **{name: shipped_machine(name) for name in CALIBRATED},
}
machines = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
calibrated = pytest.mark.parametrize("name", CALIBRATED)
LAYER = {"experts": 8.0, "rows": 4096.0, "tokens": 2048.0, "hidden_size": 4096.0, "intermediate_size": 14336.0, "itemsize": 2.0}
CACHE = {"batch": 16.0, "heads": 32.0, "kv_heads": 8.0, "key_length": 4096.0, "head_dim": 128.0, "itemsize": 2.0}


def random_columns(example, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.integers(1, 4096, (20, 9)).astype(float) for name in example if name != "itemsize"}


@pytest.mark.parametrize(("function", "example"), [(grouped_matmul_time, LAYER), (attention_decode_time, CACHE)])
@machines
def test_a_row_of_a_batch_equals_the_single_one(machine, function, example):
    columns = random_columns(example)
    batch = function(**columns, itemsize=2.0, machine=machine)
    for row in range(20):
        alone = {name: column[row, 3] for name, column in columns.items()}
        assert function(**alone, itemsize=2.0, machine=machine) == batch[row, 3]


@machines
@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["rows", "tokens", "hidden_size", "intermediate_size"]),
    experts=st.integers(1, 256),
    rows=st.integers(1, 500),
    sizes=st.tuples(st.integers(64, 8192), st.integers(16, 16384)),
    more=st.integers(1, 5000),
)
def test_more_of_anything_is_not_quicker(machine, name, experts, rows, sizes, more):
    small = LAYER | {"experts": float(experts), "rows": float(rows * experts)}
    small |= {"hidden_size": float(sizes[0]), "intermediate_size": float(sizes[1])}
    large = small | {name: small[name] + more}
    assert grouped_matmul_time(**large, machine=machine) >= grouped_matmul_time(**small, machine=machine) * (1 - 1e-12)


@machines
def test_the_same_rows_on_more_experts_take_longer_for_their_weights(machine):
    experts = np.array([1.0, 2, 8, 32, 128])
    time = grouped_matmul_time(**(LAYER | {"experts": experts, "rows": 128.0}), machine=machine)
    assert (np.diff(time) > 0).all()


@machines
def test_one_expert_with_all_rows_is_two_plain_products_and_what_joins_them(machine):
    """With the plain rates, nothing is left but the floor and the passes over rows."""
    grouped = machine.grouped_matmul
    machine = replace(machine, grouped_matmul=replace(grouped, matmul=replace(machine.matmul, floor_time=0.0), expert_time=0.0))
    rows, hidden, inter = 3000.0, 4096.0, 1536.0
    shape = {"batch": 1.0, "m": rows, "itemsize": 2.0, "machine": machine}
    plain = matmul_time(n=2 * inter, k=hidden, **shape) + matmul_time(n=hidden, k=inter, **shape) - 2 * machine.matmul.floor_time
    passes = 2 * (rows * (3 * hidden + 3 * inter) + rows * hidden) / grouped.row_bandwidth
    time = grouped_matmul_time(
        experts=1.0, rows=rows, tokens=rows, hidden_size=hidden, intermediate_size=inter, itemsize=2.0, machine=machine
    )
    assert time == pytest.approx(plain + passes + grouped.floor_time, rel=1e-12)


@calibrated
def test_one_expert_with_many_rows_is_near_to_two_plain_products(name):
    machine = shipped_machine(name, clock=False)
    rows, hidden, inter = 16384.0, 4096.0, 14336.0
    shape = {"batch": 1.0, "m": rows, "itemsize": 2.0, "machine": machine}
    plain = matmul_time(n=2 * inter, k=hidden, **shape) + matmul_time(n=hidden, k=inter, **shape)
    time = grouped_matmul_time(
        experts=1.0, rows=rows, tokens=rows, hidden_size=hidden, intermediate_size=inter, itemsize=2.0, machine=machine
    )
    # TensorRT-LLM's kernel on the A100 is an older one: .45 of the peak where plain products reach .85.
    assert time / plain == pytest.approx(1.75 if name == "a100" else 1.0, rel=0.2)


@calibrated
def test_few_rows_cost_what_the_weights_do(name):
    machine = shipped_machine(name, clock=False)
    layer = LAYER | {"experts": 128.0, "hidden_size": 4096.0, "intermediate_size": 1536.0, "tokens": 16.0}
    time = grouped_matmul_time(**(layer | {"rows": np.array([128.0, 512.0])}), machine=machine)
    streaming = 128 * 3 * 4096 * 1536 * 2 / machine.memory.bandwidth
    assert time[1] < 1.15 * time[0]
    assert (streaming < time).all()
    assert (time < 1.8 * streaming).all()


def test_a_layer_without_a_gate_has_less_to_do():
    machine = MACHINES["h100"]
    assert grouped_matmul_time(**LAYER, up_projections=1, machine=machine) < 0.75 * grouped_matmul_time(**LAYER, machine=machine)


def test_a_faster_chip_is_not_slower():
    fast = make_machine(chip=make_chip(peak_flop_rate={Dtype.BF16: 800e12}))
    assert grouped_matmul_time(**LAYER, machine=fast) < grouped_matmul_time(**LAYER, machine=MACHINES["spec"])


@pytest.mark.parametrize("name", ["batch", "heads", "kv_heads", "key_length", "head_dim"])
@machines
def test_more_to_attend_to_takes_longer(machine, name):
    time = attention_decode_time(**(CACHE | {name: np.arange(1.0, 5000.0, 37)}), machine=machine)
    assert (np.diff(time) > 0).all()


@calibrated
def test_a_large_cache_is_read_at_the_memory_bandwidth_and_a_small_one_is_not(name):
    machine = shipped_machine(name, clock=False)
    key_length = np.array([2.0**9, 2.0**12, 2.0**15])
    time = attention_decode_time(**(CACHE | {"key_length": key_length}), machine=machine)
    fraction = 2 * 2 * 16 * 8 * 128 * key_length / time / machine.memory.bandwidth
    assert (np.diff(fraction) > 0).all()
    assert fraction[0] < 0.4
    assert 0.7 < fraction[2] < 1.0


@calibrated
def test_many_short_caches_cost_what_their_heads_do(name):
    """A key-value head of a sequence takes a compute unit for some time, however few tokens it has."""
    machine = shipped_machine(name, clock=False)
    time = attention_decode_time(**(CACHE | {"batch": np.array([4096.0, 8192.0]), "key_length": 2.0}), machine=machine)
    assert time[1] - time[0] == pytest.approx(4096 * 8 * machine.serving.decode_attention["flash"].unit_time, rel=0.2)


def test_an_unmeasured_chip_runs_grouped_products_as_plain_ones():
    machine = MACHINES["spec"]
    assert machine.grouped_matmul.matmul.flop_rate == machine.matmul.flop_rate
    assert machine.grouped_matmul.floor_time == 2 * machine.matmul.floor_time
    assert set(machine.serving.decode_attention) == {"flash"}


def test_models_are_those_of_the_dtype_and_in_units():
    kernels = replace(
        SPEC_SHEET.kernels,
        grouped_matmul={
            Dtype.BF16: GroupedMatmulModel(rate_fraction=0.9, memory_fraction=0.8, row_fraction=0.5, expert_time=1e-7, floor_time=2e-5),
            Dtype.FP8: GroupedMatmulModel(rate_fraction=0.7),
        },
        decode_attention={"flash": DecodeAttentionModel(memory_fraction=0.5, floor_time=1e-5, wave_time=2e-6, ramp_bytes=4e7)},
    )
    calibration = replace(SPEC_SHEET, kernels=kernels)
    machine = make_machine(calibration=calibration)
    rates, decode = machine.grouped_matmul, machine.serving.decode_attention["flash"]
    assert rates.matmul.flop_rate == pytest.approx(0.9 * machine.matmul.flop_rate)
    assert rates.matmul.bandwidth == pytest.approx(0.8 * machine.matmul.bandwidth)
    assert (rates.row_bandwidth, rates.expert_time, rates.floor_time) == (1e12, 1e-7, 1e-5)  # half of the floor shows
    assert (decode.bandwidth, decode.floor_time, decode.unit_time) == (1e12, 5e-6, 2e-8)
    fp8 = make_machine(calibration=calibration, dtype=Dtype.FP8, chip=make_chip(peak_flop_rate={Dtype.FP8: 800e12}))
    assert fp8.grouped_matmul.matmul.flop_rate == pytest.approx(0.7 * fp8.matmul.flop_rate)


# Transformer Engine's grouped products on B200, bf16: experts, rows of one, columns, depth, us forward, us of the input's gradient.
# Source: SimuMax, configs/system/b200_bf16_ceperm.json (measured shares of 2,250 TFLOP/s).
TRAINED = [
    (20, 1232, 3072, 5120, 765, 884),
    (20, 1232, 5120, 1536, 433, 443),
    (32, 1024, 4096, 7168, 1871, 1964),
    (40, 2460, 3072, 5120, 2826, 3044),
    (40, 9832, 5120, 1536, 6182, 5932),
]


@pytest.mark.parametrize(("experts", "rows", "columns", "depth", "forward", "gradient"), TRAINED)
def test_training_multiplies_expert_by_expert_at_the_rates_of_plain_products(experts, rows, columns, depth, forward, gradient):
    machine = shipped_machine("b200")
    for n, k, measured in ((columns, depth, forward), (depth, columns, gradient)):
        time = grouped_product_time(batch=float(experts), m=float(rows), n=float(n), k=float(k), itemsize=2.0, machine=machine)
        assert time * 1e6 == pytest.approx(measured, rel=0.17)


def test_rows_of_an_expert_are_padded_where_their_scales_want_it():
    machine = shipped_machine("b200")
    padded = replace(machine, row_multiple=16.0)

    def time(machine, m, k=4096.0):
        return grouped_product_time(batch=8.0, m=m, n=2048.0, k=k, itemsize=1.0, machine=machine)

    assert time(padded, 100.0) == time(machine, 112.0) != time(machine, 100.0)
    assert time(padded, 4096.0, k=100.0) == time(machine, 4096.0, k=112.0)
    assert time(padded, 112.0) == time(machine, 112.0)
