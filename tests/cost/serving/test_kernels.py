"""Kernels of serving: limits, published figures, and what a chip without a table gets."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import attention_decode_time, grouped_matmul_time, matmul_time
from perfmodel.cost.link_rates import NEVER
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.serving.kernels import (
    cached_attention_time,
    grouped_weight_time,
    latent_decode_time,
    small_all_reduce_time,
    weight_product_time,
)
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.reader import calibrations_for, load_calibration, load_cluster
from perfmodel.hardware.serving_kernels import (
    ONE_SHOT,
    TYPICAL,
    WEIGHT_FORMATS,
    ServingKernels,
    SmallAllReduceModel,
)
from perfmodel.workload.quantization import QUANTIZATIONS
from tests.cost.machines import make_machine, make_tier, shipped_machine

ALL_REDUCES = {  # TensorRT-LLM's own kernel, aiconfigurator's tables: chip, bytes, ranks, us
    ("h100", 65536, 8): 4.59, ("h100", 262144, 4): 5.48, ("h100", 2097152, 2): 9.41, ("b200", 65536, 8): 5.99,
    ("b200", 1048576, 8): 17.8, ("b200", 2097152, 4): 14.6, ("a100", 65536, 8): 9.0, ("a100", 524288, 2): 7.84,
}  # fmt: skip


@pytest.mark.parametrize(("chip", "num_bytes", "ranks"), ALL_REDUCES)
def test_small_all_reduces_take_what_was_measured(chip, num_bytes, ranks):
    machine = shipped_machine(chip)
    time = small_all_reduce_time(num_bytes, ranks, machine)
    assert time * 1e6 == pytest.approx(ALL_REDUCES[chip, num_bytes, ranks], rel=0.13)
    assert time < collective_time(CollectiveKind.ALL_REDUCE, num_bytes, group_size=ranks, inside=[ranks, ranks], machine=machine)


def test_a_large_all_reduce_is_left_to_the_library():
    machine = shipped_machine("h100")
    library = collective_time(CollectiveKind.ALL_REDUCE, 1e9, group_size=8, inside=[8, 8], machine=machine)
    assert small_all_reduce_time(1e9, 8, machine) > library


def test_an_all_reduce_in_limits():
    machine = make_machine()
    sizes, ranks = np.array([1.0, 1e5, 1e7, 1e9]), np.array([[1], [2], [4], [8], [16]])
    time = small_all_reduce_time(sizes, ranks, machine)
    assert not time[0].any()
    assert (time[4] == NEVER).all()
    assert (np.diff(time[1:4], axis=0) > 0).all()
    assert (np.diff(time[1:4], axis=1) > 0).all()
    assert time[2, 1] == small_all_reduce_time(1e5, 4, machine)


def test_few_peers_leave_links_of_a_mesh_idle():
    mesh = make_machine(make_tier(Topology.FULL_MESH, bandwidth=448e9, pair_bandwidth=64e9))
    switch = make_machine(make_tier(bandwidth=448e9))
    assert small_all_reduce_time(1e6, 2, mesh) > 3 * small_all_reduce_time(1e6, 2, switch)
    assert small_all_reduce_time(1e6, 8, mesh) == pytest.approx(small_all_reduce_time(1e6, 8, switch))


def test_ranks_that_cannot_read_each_other_have_none():
    machine = make_machine(make_tier(Topology.PCIE_TREE, bandwidth=25e9, peer_to_peer=False))
    assert small_all_reduce_time(1e4, 2, machine) == NEVER


def test_a_chip_without_tables_gets_its_neighbours():
    cluster = load_cluster("dgx-h100")
    others = [other for other in calibrations_for("h100-sxm-80gb") if other.name != "h100"]
    bare = small_all_reduce_time(65536, 8, resolve_machine(cluster, others[0] if others else SPEC_SHEET))
    assert bare == pytest.approx(small_all_reduce_time(65536, 8, shipped_machine("h100")), rel=0.6)


def test_serving_kernels_survive_a_pickle_and_are_checked():
    calibration = load_calibration("h100")
    assert pickle.loads(pickle.dumps(calibration)) == calibration
    with pytest.raises(InputError, match="small_all_reduce"):
        ServingKernels(small_all_reduce={"three_shot": SmallAllReduceModel(base_time=1e-6)})
    with pytest.raises(InputError, match="base_time"):
        SmallAllReduceModel(base_time=-1.0)
    assert replace(calibration.kernels, serving=ServingKernels()).serving.small_all_reduce.get(ONE_SHOT) is None


PRODUCTS = {  # aiconfigurator's tables, with the pass before the product: chip, format, m, n, k, us
    ("h100", "fp8", 16, 8192, 8192): 37.7, ("h100", "fp8", 4096, 8192, 8192): 446.6, ("h100", "fp8", 16, 128, 128): 12.3,
    ("h100", "fp8-block", 64, 8192, 8192): 32.4, ("b200", "nvfp4", 64, 10240, 8192): 20.4, ("b200", "nvfp4", 4096, 8192, 8192): 132.4,
    ("b200", "fp8", 64, 16384, 4096): 27.2, ("b200", "fp8-block", 4096, 16384, 4096): 197.2, ("a100", "w4a16", 4096, 8192, 8192): 2140.0,
    ("a100", "int8", 4096, 8192, 8192): 1031.0, ("a100", "w4a16", 1, 65536, 4096): 89.1, ("a100", "w4a16", 16, 16384, 16384): 101.4,
}  # fmt: skip


@pytest.mark.parametrize(("chip", "name", "m", "n", "k"), PRODUCTS)
def test_narrow_weights_take_what_was_measured(chip, name, m, n, k):
    machine = shipped_machine(chip, clock=False)
    time = weight_product_time(m=m, n=n, k=k, quantization=QUANTIZATIONS[name], machine=machine, casts=1.0)
    assert time * 1e6 == pytest.approx(PRODUCTS[chip, name, m, n, k], rel=0.15)


def test_weights_in_16_bits_are_plain_products():
    machine, m = shipped_machine("h100"), np.array([1.0, 64.0, 4096.0])
    plain = matmul_time(batch=1.0, m=m, n=4096.0, k=8192.0, itemsize=2.0, machine=machine)
    np.testing.assert_array_equal(weight_product_time(m=m, n=4096.0, k=8192.0, quantization=QUANTIZATIONS["bf16"], machine=machine), plain)


def test_narrow_weights_start_as_plain_products_do_and_a_cast_is_an_extra():
    machine = shipped_machine("h100", clock=False)
    plain = matmul_time(batch=1.0, m=1.0, n=128.0, k=128.0, itemsize=2.0, machine=machine)
    fused, apart = (
        weight_product_time(m=1.0, n=128.0, k=128.0, quantization=QUANTIZATIONS["fp8"], machine=machine, casts=casts) for casts in (0, 1)
    )
    assert fused == pytest.approx(plain, rel=0.1)
    assert apart - fused == pytest.approx(machine.serving.kernels.weight_product["fp8"].cast_time, rel=0.01)


@pytest.mark.parametrize("name", ["w4a16", "int8-weights"])
@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_a_row_takes_the_read_of_weights_that_the_product_widens(chip, name):
    machine, quantization = shipped_machine(chip), QUANTIZATIONS[name]
    num_bytes = quantization.weight_bytes * 4096 * 65536
    time = weight_product_time(m=1, n=4096, k=65536, quantization=quantization, machine=machine)
    many = weight_product_time(m=1, n=65536, k=4096, quantization=quantization, machine=machine)
    assert num_bytes / machine.memory.bandwidth < many < 1.6 * num_bytes / machine.memory.bandwidth
    assert many < time < 3 * num_bytes / machine.memory.bandwidth  # few columns keep few units busy


def test_streaming_weights_costs_their_bytes():
    machine = shipped_machine("b200", clock=False)
    shape = {"m": 1.0, "n": 65536.0, "k": 16384.0, "machine": machine}
    times = [float(weight_product_time(quantization=QUANTIZATIONS[name], **shape)) for name in ("bf16", "fp8", "nvfp4")]
    assert times[0] > 1.8 * times[1]
    assert times[1] > 1.3 * times[2]


def test_every_format_has_figures_and_rows_of_a_batch_equal_the_single_ones():
    assert set(WEIGHT_FORMATS) == {scheme.kernel for scheme in QUANTIZATIONS.values() if not scheme.is_plain} == set(TYPICAL.weight_product)
    assert set(TYPICAL.grouped_weight) == set(WEIGHT_FORMATS)
    machine, m = make_machine(), np.array([1.0, 7.0, 512.0])
    for name in WEIGHT_FORMATS:
        times = weight_product_time(m=m, n=4096.0, k=4096.0, quantization=QUANTIZATIONS[name], machine=machine)
        assert (np.diff(times) >= 0).all()
        assert times[1] == weight_product_time(m=7.0, n=4096.0, k=4096.0, quantization=QUANTIZATIONS[name], machine=machine)


LATENT = {  # aiconfigurator's tables: chip, bytes of an element, batch, heads, tokens, us
    ("h100", 2, 256, 16, 8192): 813.1, ("h100", 2, 256, 128, 8192): 981.0, ("h100", 2, 64, 128, 1024): 55.9,
    ("h100", 1, 256, 16, 8192): 457.4, ("h100", 2, 1, 16, 1024): 14.7, ("h100", 1, 128, 128, 4096): 236.2,
    ("b200", 2, 256, 16, 8192): 442.1, ("b200", 1, 256, 128, 8192): 258.8,
}  # fmt: skip


@pytest.mark.parametrize(("chip", "itemsize", "batch", "heads", "tokens"), LATENT)
def test_latent_decoding_takes_what_was_measured(chip, itemsize, batch, heads, tokens):
    machine = shipped_machine(chip, clock=False)
    time = latent_decode_time(batch=batch, heads=heads, key_length=tokens, cache_itemsize=itemsize, machine=machine)
    assert time * 1e6 == pytest.approx(LATENT[chip, itemsize, batch, heads, tokens], rel=0.2)


def test_latent_decoding_is_at_the_ridge_with_all_heads_alone():
    machine = shipped_machine("h100", clock=False)
    few, all_heads = (latent_decode_time(batch=256.0, heads=heads, key_length=8192.0, machine=machine) for heads in (16.0, 128.0))
    half = latent_decode_time(batch=256.0, heads=16.0, key_length=4096.0, machine=machine)
    assert half == pytest.approx(few / 2, rel=0.1)
    assert few < all_heads < 1.5 * few


def test_keys_and_values_in_16_bits_are_plain_decode_attention():
    machine, tokens = shipped_machine("h100"), np.array([128.0, 4096.0])
    shape = {"batch": 8.0, "kv_heads": 8.0, "key_length": tokens, "head_dim": 128.0, "machine": machine}
    np.testing.assert_array_equal(
        cached_attention_time(heads=64.0, queries=1.0, **shape), attention_decode_time(heads=64.0, itemsize=2.0, **shape)
    )
    assert (cached_attention_time(heads=64.0, queries=4.0, **shape) > cached_attention_time(heads=64.0, **shape)).all()


def test_a_cache_of_8_bits_is_read_in_half_the_time():
    machine = shipped_machine("h100", clock=False)
    shape = {"batch": 64.0, "heads": 64.0, "kv_heads": 8.0, "key_length": 8192.0, "head_dim": 128.0, "machine": machine}
    wide, narrow = (float(cached_attention_time(cache_itemsize=itemsize, **shape)) for itemsize in (2.0, 1.0))
    assert narrow == pytest.approx(wide / 2, rel=0.15)
    assert narrow * 1e6 == pytest.approx(372, rel=0.05)
    assert float(cached_attention_time(cache_itemsize=1.0, queries=4.0, **shape)) < 1.2 * narrow


EXPERTS = {  # aiconfigurator's tables, DeepSeek-V3's layer on one of 8 ranks, routed evenly: chip, format, tokens, us
    ("h100", "fp8-block", 64): 488.0, ("h100", "fp8-block", 4096): 875.0, ("h200", "fp8-block", 64): 361.0,
    ("b200", "fp8-block", 64): 268.0, ("b200", "nvfp4", 32): 136.0, ("b200", "fp8-block", 1024): 290.0,
}  # fmt: skip


@pytest.mark.parametrize(("chip", "name", "tokens"), EXPERTS)
def test_experts_with_narrow_weights_take_what_was_measured(chip, name, tokens):
    machine, rows = shipped_machine(chip, clock=False), float(tokens)
    time = grouped_weight_time(
        experts=min(rows, 32.0), rows=rows, tokens=rows, hidden_size=7168.0, intermediate_size=2048.0, quantization=QUANTIZATIONS[name],
        machine=machine,
    )  # fmt: skip
    assert time * 1e6 == pytest.approx(EXPERTS[chip, name, tokens], rel=0.25)


def test_experts_in_16_bits_are_plain_ones_and_narrow_ones_are_quicker():
    machine, rows = shipped_machine("b200", clock=False), np.array([8.0, 256.0, 8192.0])
    shape = {"experts": 8.0, "rows": rows, "tokens": rows, "hidden_size": 4096.0, "intermediate_size": 14336.0, "machine": machine}
    plain = grouped_weight_time(quantization=QUANTIZATIONS["fp16"], **shape)
    np.testing.assert_array_equal(plain, grouped_matmul_time(itemsize=2.0, **shape))
    for name in ("fp8", "fp8-block", "nvfp4"):
        times = grouped_weight_time(quantization=QUANTIZATIONS[name], **shape)
        assert (np.diff(times) > 0).all()
        assert (times < plain).all()


def test_a_calibration_of_fp8_alone_makes_a_machine():
    calibration = load_calibration("h100")
    kernels = replace(calibration.kernels, matmul={Dtype.FP8: calibration.kernels.matmul[Dtype.FP8]})
    alone = replace(calibration, kernels=kernels)
    machine = resolve_machine(load_cluster("dgx-h100"), alone, dtype=Dtype.FP8)
    assert machine.serving.relative_rate[Dtype.FP8] > 1.0
