"""Decode attention to narrow and latent caches: planted parameters come back, and tables are cut to what is fitted."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels.cached import fit_cached, predict_cached, read_cached
from lab.kernels.decode import DecodeTable
from perfmodel.hardware.reader import load_cluster
from perfmodel.hardware.serving_kernels import CACHED_KERNELS, FP8_CACHE, LATENT_CACHE, LATENT_FP8_CACHE, CachedAttentionModel

H100 = load_cluster("dgx-h100", num_chips=16)
TRUE = CachedAttentionModel(
    memory_fraction=0.9, query_fraction=0.4, peak_fraction=0.6, floor_time=10e-6, ramp_time=9e-6, ramp_bytes=50e6, wave_time=2e-6
)


@pytest.mark.parametrize("kernel", CACHED_KERNELS)
def test_planted_parameters_come_back(kernel):
    axes = np.meshgrid([1, 8, 64, 512], [16, 64, 128], [8], [2, 128, 1024, 8192], [128], indexing="ij")
    batch, heads, kv_heads, key_length, head_dim = (axis.ravel().astype(float) for axis in axes)
    table = DecodeTable(batch=batch, heads=heads, kv_heads=kv_heads, key_length=key_length, head_dim=head_dim, time=np.ones_like(batch))
    table = replace(table, time=predict_cached(TRUE, kernel, table, H100))
    found = fit_cached(table, kernel, H100)
    np.testing.assert_allclose(predict_cached(found, kernel, table, H100), table.time, rtol=0.02)
    assert found.memory_fraction == pytest.approx(TRUE.memory_fraction, rel=0.05)


def test_published_tables_are_read(tmp_path):
    import pandas as pd

    row = {"attn_dtype": "bfloat16", "kv_cache_dtype": "fp8", "batch_size": 4, "isl": 1, "step": 1023, "latency": 0.02}
    plain = row | {"window_size": 0, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    others = [{"kv_cache_dtype": "bfloat16"}, {"window_size": 128}, {"step": 15}, {"num_heads": 8}, {"num_heads": 256}]
    latent = [row | {"num_heads": 128}, row | {"num_heads": 16, "kv_cache_dtype": "bfloat16"}]
    for name, rows in (
        ("attention/v/generation_attention_perf", [plain, *(plain | other for other in others)]),
        ("mla/v/generation_mla_perf", latent),
    ):
        path = tmp_path / "aiconfigurator" / "h100_sxm" / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(path)
    read = {kernel: read_cached(tmp_path, "h100_sxm", kernel, "v") for kernel in CACHED_KERNELS}
    assert {kernel: table.heads.tolist() for kernel, table in read.items()} == {
        LATENT_CACHE: [16.0], LATENT_FP8_CACHE: [128.0], FP8_CACHE: [32.0],
    }  # fmt: skip
    assert read[FP8_CACHE].key_length == [1024.0]
