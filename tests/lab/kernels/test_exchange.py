"""Exchanges with experts: planted parameters come back, and layers of few experts are left out."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.hardware.reader import load_cluster
from perfmodel.hardware.serving_kernels import EXPERT_EXCHANGES, ExpertExchangeModel
from perfmodel.lab.kernels.exchange import VERSION, ExchangeTable, fit_exchanges, has_exchanges, predict_exchanges, read_exchanges

H100 = load_cluster("dgx-h100", num_chips=16)
TRUE = ExpertExchangeModel(base_time=9e-6, expert_time=15e-9, bandwidth_fraction=0.5)


@pytest.mark.parametrize("way", EXPERT_EXCHANGES)
def test_planted_parameters_come_back(way):
    axes = np.meshgrid([1, 16, 128, 1024], [2, 8], [2048, 7168], [128, 512], indexing="ij")
    tokens, top_k, hidden, experts = (axis.ravel().astype(float) for axis in axes)
    table = ExchangeTable(tokens=tokens, top_k=top_k, hidden_size=hidden, experts=experts, time=np.ones_like(tokens))
    found = fit_exchanges(replace(table, time=predict_exchanges(TRUE, way, table, H100)), way, H100)
    for name in ("base_time", "expert_time", "bandwidth_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02)


def test_a_published_table_is_read(tmp_path):
    import pandas as pd

    folder = tmp_path / "aiconfigurator" / "h100_sxm" / "comm" / "sglang" / VERSION
    folder.mkdir(parents=True)
    row = {
        "node_num": 1, "hidden_size": 4096, "num_token": 4, "num_topk": 8, "num_experts": 256, "dispatch_avg_t_us": 12.0,
        "combine_avg_t_us": 13.0,
    }  # fmt: skip
    pd.DataFrame([row, row | {"num_experts": 8}, row | {"node_num": 2}]).to_parquet(folder / "wideep_deepep_ll_perf.parquet")
    assert has_exchanges(tmp_path, "h100_sxm")
    assert not has_exchanges(tmp_path, "a100_sxm")
    assert read_exchanges(tmp_path, "h100_sxm", "combine").time == pytest.approx([13e-6])
