"""Decode attention and grouped products: planted parameters come back, and groups are left out whole."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels.chip_kernels import decode_kernel, grouped_kernel
from lab.kernels.grouped import BALANCED, GroupedTable, load_of
from lab.kernels.kernel_fit import chosen_rows
from lab.kernels.tables import DecodeTable, read_decode, serving_decode
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES, DecodeAttentionModel, GroupedMatmulModel, MatmulModel
from perfmodel.hardware.reader import load_cluster
from tests.lab.kernels.tables_of_tests import grid, planted, publish

H100 = load_cluster("dgx-h100", num_chips=16)
DECODE = DecodeAttentionModel(memory_fraction=0.9, floor_time=10e-6, ramp_time=15e-6, ramp_bytes=50e6, wave_time=2e-6)
PLAIN = MatmulModel(
    peak_fraction=0.8, depth_offset=100, memory_fraction=0.82, floor_time=3e-6, sharpness=3.3, least_waves=0.6, split_depth=3000.0,
    small_tile_penalty=0.08, tiles=GPU_TILES,
)  # fmt: skip
GROUPED = GroupedMatmulModel(rate_fraction=0.85, memory_fraction=0.9, row_fraction=0.5, expert_time=2e-7, floor_time=25e-6)


def decode(table):
    return decode_kernel(table, H100)


def grouped(table):
    return grouped_kernel(table, PLAIN, H100, Dtype.BF16)


def caches(lengths=(128, 1024, 8192, 65536)):
    batch, heads, kv_heads, key_length, head_dim = grid([1, 8, 64, 512], [8, 16, 32, 64], [1, 4, 8], lengths, [64, 128])
    table = DecodeTable(batch=batch, heads=heads, kv_heads=kv_heads, key_length=key_length, head_dim=head_dim, time=np.ones_like(batch))
    return planted(decode, table, DECODE)


def layers():
    """Six layers on one to eight chips, routed evenly."""
    shapes = [
        (2048, 768, 128, 8),
        (4096, 14336, 8, 2),
        (7168, 2048, 256, 8),
        (5120, 8192, 16, 1),
        (4096, 1536, 128, 8),
        (6144, 3072, 128, 4),
    ]
    rows = [
        (tokens, hidden, inter / tp, inter, experts, top_k, *load_of(tokens, experts, top_k, ep, BALANCED))
        for hidden, inter, experts, top_k in shapes
        for tp in (1, 8)
        for ep in (1, 4)
        for tokens in (1, 8, 64, 256, 1024, 4096, 16384)
    ]
    tokens, hidden, inter, whole_inter, experts, top_k, load, touched = np.array(rows, dtype=float).T
    table = GroupedTable(
        tokens=tokens, pairs=load, experts=touched, hidden_size=hidden, intermediate_size=inter, whole_intermediate_size=whole_inter,
        num_experts=experts, top_k=top_k, is_fallback=np.zeros(len(tokens), dtype=bool), time=np.ones_like(tokens),
    )  # fmt: skip
    return planted(grouped, chosen_rows(table, load > 0), GROUPED)


@pytest.mark.parametrize(
    ("make", "table", "true", "names", "rtol"),
    [
        (decode, caches(lengths=(2, 128, 1024, 8192, 65536)), DECODE, ("memory_fraction", "floor_time", "ramp_time", "wave_time"), 0.01),
        (grouped, layers(), GROUPED, ("rate_fraction", "memory_fraction", "row_fraction", "floor_time"), 0.02),
    ],
    ids=["decode", "grouped"],
)
def test_planted_parameters_come_back(make, table, true, names, rtol):
    kernel = make(table)
    model = kernel.fit(table)
    np.testing.assert_allclose(kernel.predict(model, table), table.time, rtol=rtol)
    for name in names:
        assert getattr(model, name) == pytest.approx(getattr(true, name), rel=0.05)


def test_planted_parameters_predict_the_heads_left_out():
    assert np.median(decode(caches()).held_out_errors()) < 0.01


@pytest.mark.slow
def test_planted_parameters_predict_the_layers_left_out():
    assert np.median(grouped(layers()).held_out_errors()) < 0.02


@pytest.mark.parametrize(
    ("kernel", "true", "columns"),
    [
        (decode(caches()), DECODE, ("heads", "kv_heads", "head_dim")),
        (grouped(layers()), GROUPED, ("hidden_size", "whole_intermediate_size", "num_experts", "top_k")),
    ],
    ids=["decode", "grouped"],
)
def test_no_group_left_out_is_in_its_fit(kernel, true, columns):
    seen, predicted = [], []

    def shapes(rows):
        return set(zip(*(getattr(rows, name) for name in columns), strict=True))

    watched = replace(
        kernel,
        fit=lambda rows: seen.append(shapes(rows)) or true,
        predict=lambda model, rows: predicted.append(shapes(rows)) or rows.time,
    )
    watched.held_out_errors()
    assert len(seen) == 5
    assert all(not (inside & outside) for inside, outside in zip(seen, predicted, strict=True))
    assert set.union(*predicted) == shapes(kernel.table)
    assert len(np.unique(kernel.groups)) == len(shapes(kernel.table))


@pytest.mark.slow
def test_noise_and_a_badly_chosen_kernel_move_them_little():
    table, generator = layers(), np.random.default_rng(0)
    noisy = table.time * generator.lognormal(sigma=0.05, size=len(table.time))
    noisy[::9] *= 3
    model = grouped(table).fit(replace(table, time=noisy))
    assert model.rate_fraction == pytest.approx(GROUPED.rate_fraction, rel=0.1)
    assert model.memory_fraction == pytest.approx(GROUPED.memory_fraction, rel=0.1)


@pytest.mark.slow
def test_a_fit_never_exceeds_the_data_sheet():
    table = layers()
    model = grouped(table).fit(replace(table, time=table.time / 3))
    assert model.rate_fraction * PLAIN.peak_fraction <= 1.001
    assert model.memory_fraction * PLAIN.memory_fraction <= 1.001


def test_a_published_table_is_read_and_cut_to_what_serving_has(tmp_path):
    row = {
        "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0, "batch_size": 4, "num_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "isl": 1, "step": 4095, "latency": 0.02,
    }  # fmt: skip
    others = [{"kv_cache_dtype": "fp8"}, {"window_size": 128}, {"step": 15}, {"num_key_value_heads": 1}, {"head_dim": 256}]
    rows = [row, row | {"latency": 0.03}] + [row | other for other in others]
    publish(tmp_path, "a100_sxm/attention/v/generation_attention_perf", rows)
    table = read_decode(tmp_path, "a100_sxm", "v")
    assert len(table.time) == 4
    usual = serving_decode(table)
    assert (usual.key_length, usual.batch, usual.time) == (4096.0, 4.0, pytest.approx([25e-6]))
