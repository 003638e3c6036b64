"""Experts with narrow weights: planted parameters come back, of several kernels the quickest counts."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels.grouped import BALANCED
from lab.kernels.grouped_weights import fit_grouped_weights, measured_experts, predict_grouped_weights, read_grouped_weights
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.hardware.serving_kernels import FEW, GroupedWeightModel
from tests.lab.kernels.test_grouped import layers

B200 = load_cluster("dgx-b200", num_chips=16)
PLAIN = load_calibration("b200").matmul[Dtype.BF16]
TRUE = GroupedWeightModel(
    rate_fraction=0.9, memory_fraction=0.95, depth_factor=2.0, sharpness=3.0, row_fraction=0.4, expert_time=2e-7, floor_time=25e-6
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), [("fp8", {"fp8"}), ("nvfp4", {"nvfp4", "nvfp4.few"})])
def test_planted_parameters_come_back(name, kernels):
    table = layers()
    few = replace(TRUE, floor_time=15e-6, row_fraction=0.05)
    planted = {name: TRUE} if len(kernels) == 1 else {name: TRUE, name + FEW: few}
    table = replace(table, time=predict_grouped_weights(planted, name, PLAIN, table, B200))
    found = fit_grouped_weights(table, name, PLAIN, B200)
    assert set(found) == kernels
    errors = np.abs(predict_grouped_weights(found, name, PLAIN, table, B200) / table.time - 1)
    assert np.median(errors) < 0.02
    assert found[name].memory_fraction == pytest.approx(TRUE.memory_fraction, rel=0.1)


def test_of_several_kernels_the_quickest_counts(tmp_path):
    import pandas as pd

    folder = tmp_path / "aiconfigurator" / "b200_sxm" / "moe" / "v"
    folder.mkdir(parents=True)
    row = {
        "moe_dtype": "nvfp4", "kernel_source": "moe_torch_flow_cutlass", "distribution": BALANCED, "num_tokens": 64, "hidden_size": 4096,
        "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 2, "moe_ep_size": 4, "latency": 0.5,
    }  # fmt: skip
    rows = [row, row | {"kernel_source": "moe_torch_flow_min_latency", "latency": 0.3}, row | {"kernel_source": "other", "latency": 0.1}]
    pd.DataFrame([*rows, row | {"moe_dtype": "w4a16_mxfp4"}]).to_parquet(folder / "moe_perf.parquet")
    assert measured_experts(tmp_path, "b200_sxm", "v") == {"nvfp4": "nvfp4"}
    assert read_grouped_weights(tmp_path, "b200_sxm", "v", "nvfp4").time == pytest.approx([3e-4])
