"""Grouped products: loads of the published routings, runs that are left out, and planted parameters that come back."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels import grouped as module
from lab.kernels.grouped import BALANCED, GroupedTable, fallback_runs, fit_grouped, grouped_errors, load_of, predict_grouped
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES, GroupedMatmulModel, MatmulModel
from perfmodel.hardware.reader import load_cluster

H100 = load_cluster("dgx-h100", num_chips=16)
PLAIN = MatmulModel(
    peak_fraction=0.8, depth_offset=100, memory_fraction=0.82, floor_time=3e-6, sharpness=3.3, least_waves=0.6, split_depth=3000.0,
    small_tile_penalty=0.08, tiles=GPU_TILES,
)  # fmt: skip
TRUE = GroupedMatmulModel(rate_fraction=0.85, memory_fraction=0.9, row_fraction=0.5, expert_time=2e-7, floor_time=25e-6)


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
    tokens, hidden, inter, whole, experts, top_k, load, touched = np.array(rows, dtype=float).T
    table = GroupedTable(
        tokens=tokens, rows=load, experts=touched, hidden_size=hidden, intermediate_size=inter, whole_intermediate_size=whole,
        num_experts=experts, top_k=top_k, is_fallback=np.zeros(len(tokens), dtype=bool), time=np.ones_like(tokens),
    ).only(load > 0)  # fmt: skip
    return replace(table, time=predict_grouped(TRUE, PLAIN, table, H100, Dtype.BF16))


def test_planted_parameters_come_back():
    table = layers()
    found = fit_grouped(table, PLAIN, H100, Dtype.BF16)
    np.testing.assert_allclose(predict_grouped(found, PLAIN, table, H100, Dtype.BF16), table.time, rtol=0.02)
    for name in ("rate_fraction", "memory_fraction", "row_fraction", "floor_time"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05)


@pytest.mark.slow
def test_noise_and_a_badly_chosen_kernel_move_them_little():
    table, generator = layers(), np.random.default_rng(0)
    noisy = table.time * generator.lognormal(sigma=0.05, size=len(table.time))
    noisy[::9] *= 3
    found = fit_grouped(replace(table, time=noisy), PLAIN, H100, Dtype.BF16)
    assert found.rate_fraction == pytest.approx(TRUE.rate_fraction, rel=0.1)
    assert found.memory_fraction == pytest.approx(TRUE.memory_fraction, rel=0.1)


@pytest.mark.slow
def test_a_fit_never_exceeds_the_data_sheet():
    table = layers()
    found = fit_grouped(replace(table, time=table.time / 3), PLAIN, H100, Dtype.BF16)
    assert found.rate_fraction * PLAIN.peak_fraction <= 1.001
    assert found.memory_fraction * PLAIN.memory_fraction <= 1.001


@pytest.mark.slow
def test_planted_parameters_predict_the_layers_left_out():
    assert np.median(grouped_errors(layers(), PLAIN, H100, Dtype.BF16)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("column", ["layer", "hidden_size", "num_experts", "top_k"])
def test_no_run_of_a_group_left_out_is_in_its_fit(monkeypatch, column):
    table, seen, predicted = layers(), [], []

    def fit(rows, *_):
        seen.append(set(getattr(rows, column)))
        return TRUE

    def predict(model, plain, rows, *_):
        predicted.append(set(getattr(rows, column)))
        return rows.time

    # `layer` numbers the layers of the table at hand, so it is compared by its sizes.
    if column == "layer":
        monkeypatch.setattr(GroupedTable, "layer", property(lambda self: (self.hidden_size * self.whole_intermediate_size).astype(int)))
    monkeypatch.setattr(module, "fit_grouped", fit)
    monkeypatch.setattr(module, "predict_grouped", predict)
    grouped_errors(table, PLAIN, H100, Dtype.BF16, groups=getattr(table, column))
    assert seen
    assert all(not (inside & outside) for inside, outside in zip(seen, predicted, strict=True))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (3, 256, 8), (64, 128, 8), (1000, 16, 1), (4096, 8, 2)])
def test_even_routing_uses_all_experts_alike(tokens, experts, top_k):
    rows, touched = load_of(tokens, experts, top_k, 1, BALANCED)
    assert rows == tokens * top_k
    assert touched == min(tokens * top_k, experts)
    if tokens * top_k >= 8 * experts:
        assert load_of(tokens, experts, top_k, 4, BALANCED)[0] == pytest.approx(rows / 4, rel=0.15)


@pytest.mark.parametrize("routing", ["power_law_1.01", "power_law_1.2"])
def test_a_power_law_loads_the_fullest_rank_more(routing):
    rows, touched = load_of(512, 128, 8, 1, routing)
    assert rows == pytest.approx(512 * 8, rel=0.01)
    assert 100 < touched <= 128
    fullest, _ = load_of(512, 128, 8, 8, routing)
    assert rows / 8 < fullest < rows


def test_a_series_that_loses_to_more_work_on_a_chip_is_a_fallback():
    tokens, tp = (column.ravel().astype(float) for column in np.meshgrid([1, 16, 256, 4096], [1, 2, 4], indexing="ij"))
    time = (1e-4 + 1e-6 * tokens) / tp
    layer, ep = np.zeros_like(tp), np.ones_like(tp)
    assert not fallback_runs(layer, tokens, tp, ep, time).any()
    slow = np.where(tp == 4, 5 * time, time)
    np.testing.assert_array_equal(fallback_runs(layer, tokens, tp, ep, slow), tp == 4)


def test_one_slow_run_does_not_make_a_series_a_fallback():
    tokens, tp = (column.ravel().astype(float) for column in np.meshgrid([1, 16, 256, 4096], [1, 2], indexing="ij"))
    time = np.where((tp == 2) & (tokens == 16), 9e-4, 1e-4 / tp)
    assert not fallback_runs(np.zeros_like(tp), tokens, tp, np.ones_like(tp), time).any()


def test_a_published_table_is_read(tmp_path):
    import pandas as pd

    folder = tmp_path / "aiconfigurator" / "h100_sxm" / "moe" / "v"
    folder.mkdir(parents=True)
    row = {
        "moe_dtype": "bfloat16", "kernel_source": "moe_torch_flow_cutlass", "distribution": BALANCED, "num_tokens": 64, "hidden_size": 4096,
        "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 2, "moe_ep_size": 4, "latency": 0.5,
    }  # fmt: skip
    rows = [row, row | {"latency": 0.7}, row | {"distribution": "power_law_1.2"}, row | {"moe_dtype": "fp8"}]
    pd.DataFrame(rows).to_parquet(folder / "moe_perf.parquet")
    table = module.tuned_grouped(tmp_path, "h100_sxm", "v", "bfloat16")
    assert table.time == pytest.approx([6e-4])
    assert (table.rows, table.experts, table.intermediate_size, table.num_experts) == (32.0, 2.0, 7168.0, 8.0)
