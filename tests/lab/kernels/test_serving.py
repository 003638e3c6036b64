"""Kernels of serving: planted parameters come back, and tables are cut to what is fitted."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels.chips import TABLES
from lab.kernels.grouped import BALANCED
from lab.kernels.serving import (
    cached_kernel,
    grouped_weight_kernel,
    measured_experts,
    measured_formats,
    products_version,
    read_cached,
    read_grouped_weights,
    read_small_all_reduces,
    small_all_reduce_kernel,
    weight_product_kernel,
)
from lab.kernels.tables import CollectiveTable, DecodeTable, MatmulTable
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.hardware.serving_kernels import (
    CACHED_KERNELS,
    FEW,
    FP8_CACHE,
    LATENT_CACHE,
    LATENT_FP8_CACHE,
    ONE_SHOT,
    TWO_SHOT,
    CachedAttentionModel,
    GroupedWeightModel,
    SmallAllReduceModel,
    WeightProductModel,
)
from tests.lab.kernels.tables_of_tests import grid, planted, publish
from tests.lab.kernels.test_chip_kernels import layers

H100, B200 = (load_cluster(name, num_chips=16) for name in ("dgx-h100", "dgx-b200"))
H100_PLAIN, B200_PLAIN = (load_calibration(name).kernels.matmul[Dtype.BF16] for name in ("h100", "b200"))
ALL_REDUCES = {
    ONE_SHOT: SmallAllReduceModel(base_time=3e-6, peer_time=1e-7, bandwidth_fraction=0.65),
    TWO_SHOT: SmallAllReduceModel(base_time=9e-6, peer_time=1e-7, bandwidth_fraction=0.5),
}
CACHED = CachedAttentionModel(
    memory_fraction=0.9, query_fraction=0.4, peak_fraction=0.6, floor_time=10e-6, ramp_time=9e-6, ramp_bytes=50e6, wave_time=2e-6
)
PRODUCTS = WeightProductModel(
    rate_fraction=0.9, memory_fraction=0.95, depth_factor=2.0, waves_factor=1.2, split_factor=1.5, sharpness=3.0, cast_time=9e-6,
    cast_fraction=0.4,
)  # fmt: skip
EXPERTS = GroupedWeightModel(
    rate_fraction=0.9, memory_fraction=0.95, depth_factor=2.0, sharpness=3.0, row_fraction=0.4, expert_time=2e-7, floor_time=25e-6
)


def test_planted_all_reduces_come_back():
    num_bytes, ranks = grid(2.0 ** np.arange(8, 24), [2.0, 4.0, 8.0])
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=np.ones_like(ranks))
    table = planted(lambda rows: small_all_reduce_kernel(rows, H100), table, ALL_REDUCES)
    models = small_all_reduce_kernel(table, H100).model()
    for kernel, model in ALL_REDUCES.items():
        assert models[kernel].base_time == pytest.approx(model.base_time, rel=0.03)
        assert models[kernel].bandwidth_fraction == pytest.approx(model.bandwidth_fraction, rel=0.03)


def test_all_reduces_are_read_without_what_nccl_ran(tmp_path):
    ours = {"num_gpus": 8, "message_size": [2**10, 2**20, 2**25], "latency": [0.004, 0.04, 0.2]}
    theirs = {"op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": 8, "message_size": [2**12, 2**20], "latency": [0.01, 0.041]}
    publish(tmp_path, "h100_sxm/comm/trtllm/v/custom_allreduce_perf", ours)
    publish(tmp_path, "h100_sxm/comm/nccl/n/nccl_perf", theirs)
    table = read_small_all_reduces(tmp_path, "h100_sxm", "trtllm/v", "n")
    assert (table.num_bytes, table.time) == (pytest.approx([2048.0]), pytest.approx([4e-6]))


@pytest.mark.parametrize("name", CACHED_KERNELS)
def test_planted_caches_come_back(name):
    batch, heads, kv_heads, key_length, head_dim = grid([1, 8, 64, 512], [16, 64, 128], [8], [2, 128, 1024, 8192], [128])
    table = DecodeTable(batch=batch, heads=heads, kv_heads=kv_heads, key_length=key_length, head_dim=head_dim, time=np.ones_like(batch))
    table = planted(lambda rows: cached_kernel(rows, name, H100), table, {name: CACHED})
    kernel = cached_kernel(table, name, H100)
    models = kernel.model()
    np.testing.assert_allclose(kernel.predict(models, table), table.time, rtol=0.02)
    assert models[name].memory_fraction == pytest.approx(CACHED.memory_fraction, rel=0.05)


def test_published_caches_are_read(tmp_path):
    row = {"attn_dtype": "bfloat16", "kv_cache_dtype": "fp8", "batch_size": 4, "isl": 1, "step": 1023, "latency": 0.02}
    plain = row | {"window_size": 0, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    others = [{"kv_cache_dtype": "bfloat16"}, {"window_size": 128}, {"step": 15}, {"num_heads": 8}, {"num_heads": 256}]
    latent = [row | {"num_heads": 128}, row | {"num_heads": 16, "kv_cache_dtype": "bfloat16"}]
    publish(tmp_path, "h100_sxm/attention/v/generation_attention_perf", [plain, *(plain | other for other in others)])
    publish(tmp_path, "h100_sxm/mla/v/generation_mla_perf", latent)
    read = {kernel: read_cached(tmp_path, "h100_sxm", kernel, "v") for kernel in CACHED_KERNELS}
    assert {kernel: table.heads.tolist() for kernel, table in read.items()} == {
        LATENT_CACHE: [16.0], LATENT_FP8_CACHE: [128.0], FP8_CACHE: [32.0],
    }  # fmt: skip
    assert read[FP8_CACHE].key_length == [1024.0]


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_planted_products_come_back(name):
    m, n, k = grid([1, 16, 128, 1024, 8192], [256, 2048, 16384], [512, 4096, 16384])
    table = MatmulTable(m=m, n=n, k=k, time=np.ones_like(m))
    table = planted(lambda rows: weight_product_kernel(rows, name, H100_PLAIN, H100), table, {name: PRODUCTS})
    kernel = weight_product_kernel(table, name, H100_PLAIN, H100)
    models = kernel.model()
    np.testing.assert_allclose(kernel.predict(models, table), table.time, rtol=0.02)
    for field in ("rate_fraction", "memory_fraction", "cast_time"):
        assert getattr(models[name], field) == pytest.approx(getattr(PRODUCTS, field), rel=0.05)


def test_formats_of_a_table_are_found(tmp_path):
    publish(tmp_path, "a100_sxm/gemm/v/gemm_perf", {"gemm_dtype": ["sq", "bfloat16", "int4_wo"]})
    assert measured_formats(tmp_path, "a100_sxm", "v") == ["int8", "w4a16"]


def test_products_of_kernels_that_were_tried_count_where_their_table_is(tmp_path):
    tables = TABLES["b200"]
    assert products_version(tmp_path, tables, "nvfp4") == tables.gemm
    path = tmp_path / "aiconfigurator" / tables.folder / "gemm" / tables.tuned["nvfp4"] / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    path.touch()
    assert (products_version(tmp_path, tables, "nvfp4"), products_version(tmp_path, tables, "fp8")) == (tables.tuned["nvfp4"], tables.gemm)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), [("fp8", {"fp8"}), ("nvfp4", {"nvfp4", "nvfp4.few"})])
def test_planted_experts_come_back(name, kernels):
    few = replace(EXPERTS, floor_time=15e-6, row_fraction=0.05)
    true = {name: EXPERTS} if len(kernels) == 1 else {name: EXPERTS, name + FEW: few}
    table = planted(lambda rows: grouped_weight_kernel(rows, name, B200_PLAIN, B200), layers(), true)
    kernel = grouped_weight_kernel(table, name, B200_PLAIN, B200)
    models = kernel.model()
    assert set(models) == kernels
    assert np.median(kernel.errors(models)) < 0.02
    assert models[name].memory_fraction == pytest.approx(EXPERTS.memory_fraction, rel=0.1)


def test_of_several_kernels_of_experts_the_fastest_counts(tmp_path):
    row = {
        "moe_dtype": "nvfp4", "kernel_source": "moe_torch_flow_cutlass", "distribution": BALANCED, "num_tokens": 64, "hidden_size": 4096,
        "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 2, "moe_ep_size": 4, "latency": 0.5,
    }  # fmt: skip
    rows = [row, row | {"kernel_source": "moe_torch_flow_min_latency", "latency": 0.3}, row | {"kernel_source": "other", "latency": 0.1}]
    publish(tmp_path, "b200_sxm/moe/v/moe_perf", [*rows, row | {"moe_dtype": "w4a16_mxfp4"}])
    assert measured_experts(tmp_path, "b200_sxm", "v") == {"nvfp4": "nvfp4"}
    assert read_grouped_weights(tmp_path, "b200_sxm", "v", "nvfp4").time == pytest.approx([3e-4])
