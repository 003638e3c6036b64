"""Decode attention: planted parameters come back, heads are left out whole, and what is fitted is what serving has."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels import decode as module
from lab.kernels.decode import (
    DecodeTable,
    decode_errors,
    decode_groups,
    fit_decode,
    predict_decode,
    read_decode,
    serving_decode,
)
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import DecodeAttentionModel
from perfmodel.hardware.reader import load_cluster

H100 = load_cluster("dgx-h100", num_chips=16)
TRUE = DecodeAttentionModel(memory_fraction=0.9, floor_time=10e-6, ramp_time=15e-6, ramp_bytes=50e6, wave_time=2e-6)


def caches(lengths=(128, 1024, 8192, 65536)):
    axes = np.meshgrid([1, 8, 64, 512], [8, 16, 32, 64], [1, 4, 8], lengths, [64, 128], indexing="ij")
    batch, heads, kv_heads, key_length, head_dim = (axis.ravel().astype(float) for axis in axes)
    table = DecodeTable(batch=batch, heads=heads, kv_heads=kv_heads, key_length=key_length, head_dim=head_dim, time=np.ones_like(batch))
    return replace(table, time=predict_decode(TRUE, table, H100, Dtype.BF16))


def test_planted_parameters_come_back():
    table = caches(lengths=(2, 128, 1024, 8192, 65536))
    found = fit_decode(table, H100, Dtype.BF16)
    np.testing.assert_allclose(predict_decode(found, table, H100, Dtype.BF16), table.time, rtol=0.01)
    for name in ("memory_fraction", "floor_time", "ramp_time", "wave_time"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05)


def test_planted_parameters_predict_the_heads_left_out():
    assert np.median(decode_errors(caches(), H100)) < 0.01


def test_no_heads_left_out_are_in_their_fit(monkeypatch):
    table, seen, predicted = caches(), [], []

    def heads(rows):
        return set(zip(rows.heads, rows.kv_heads, rows.head_dim, strict=True))

    monkeypatch.setattr(module, "fit_decode", lambda rows, *_: seen.append(heads(rows)) or TRUE)
    monkeypatch.setattr(module, "predict_decode", lambda model, rows, *_: predicted.append(heads(rows)) or rows.time)
    decode_errors(table, H100)
    assert len(seen) == 5
    assert all(not (inside & outside) for inside, outside in zip(seen, predicted, strict=True))
    assert set.union(*predicted) == heads(table)
    assert len(np.unique(decode_groups(table))) == len(heads(table))


def test_a_published_table_is_read_and_cut_to_what_serving_has(tmp_path):
    import pandas as pd

    folder = tmp_path / "aiconfigurator" / "a100_sxm" / "attention" / "v"
    folder.mkdir(parents=True)
    row = {
        "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0, "batch_size": 4, "num_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "isl": 1, "step": 4095, "latency": 0.02,
    }  # fmt: skip
    others = [{"kv_cache_dtype": "fp8"}, {"window_size": 128}, {"step": 15}, {"num_key_value_heads": 1}, {"head_dim": 256}]
    pd.DataFrame([row, row | {"latency": 0.03}] + [row | other for other in others]).to_parquet(
        folder / "generation_attention_perf.parquet"
    )
    table = read_decode(tmp_path, "a100_sxm", "v")
    assert len(table.time) == 4
    usual = serving_decode(table)
    assert (usual.key_length, usual.batch, usual.time) == (4096.0, 4.0, pytest.approx([25e-6]))
