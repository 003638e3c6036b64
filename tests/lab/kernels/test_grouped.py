"""Tables of grouped products: loads of the published routings, and runs that are left out."""

import numpy as np
import pytest

from lab.kernels.grouped import BALANCED, fallback_runs, load_of, tuned_grouped
from tests.lab.kernels.tables_of_tests import publish


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
    row = {
        "moe_dtype": "bfloat16", "kernel_source": "moe_torch_flow_cutlass", "distribution": BALANCED, "num_tokens": 64, "hidden_size": 4096,
        "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 2, "moe_ep_size": 4, "latency": 0.5,
    }  # fmt: skip
    rows = [row, row | {"latency": 0.7}, row | {"distribution": "power_law_1.2"}, row | {"moe_dtype": "fp8"}]
    publish(tmp_path, "h100_sxm/moe/v/moe_perf", rows)
    table = tuned_grouped(tmp_path, "h100_sxm", "v", "bfloat16")
    assert table.time == pytest.approx([6e-4])
    assert (table.pairs, table.experts, table.intermediate_size, table.num_experts) == (32.0, 2.0, 7168.0, 8.0)
