"""Products with narrow weights: planted parameters come back, with the pass before them or without."""

import numpy as np
import pytest

from lab.kernels.fit import TABLES
from lab.kernels.serving import products_version
from lab.kernels.weight_products import fit_weight_products, measured_formats, predict_weight_products
from perfmodel.calibrate.fits import MatmulTable
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.hardware.serving_kernels import WeightProductModel
from perfmodel.workload.quantization import QUANTIZATIONS

H100 = load_cluster("dgx-h100", num_chips=16)
PLAIN = load_calibration("h100").matmul[Dtype.BF16]
TRUE = WeightProductModel(
    rate_fraction=0.9, memory_fraction=0.95, depth_factor=2.0, waves_factor=1.2, split_factor=1.5, sharpness=3.0, cast_time=9e-6,
    cast_fraction=0.4,
)  # fmt: skip


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_planted_parameters_come_back(name):
    m, n, k = (axis.ravel() for axis in np.meshgrid([1.0, 16.0, 128.0, 1024.0, 8192.0], [256.0, 2048.0, 16384.0], [512.0, 4096.0, 16384.0]))
    table = MatmulTable(m=m, n=n, k=k, time=np.ones_like(m))
    quantization = QUANTIZATIONS[name]
    table = MatmulTable(m=m, n=n, k=k, time=predict_weight_products(TRUE, quantization, PLAIN, table, H100))
    found = fit_weight_products(table, name, PLAIN, H100)
    np.testing.assert_allclose(predict_weight_products(found, quantization, PLAIN, table, H100), table.time, rtol=0.02)
    for field in ("rate_fraction", "memory_fraction", "cast_time"):
        assert getattr(found, field) == pytest.approx(getattr(TRUE, field), rel=0.05)


def test_formats_of_a_table_are_found(tmp_path):
    import pandas as pd

    folder = tmp_path / "aiconfigurator" / "a100_sxm" / "gemm" / "v"
    folder.mkdir(parents=True)
    pd.DataFrame({"gemm_dtype": ["sq", "bfloat16", "int4_wo"]}).to_parquet(folder / "gemm_perf.parquet")
    assert measured_formats(tmp_path, "a100_sxm", "v") == ["int8", "w4a16"]


def test_products_of_kernels_that_were_tried_count_where_their_table_is(tmp_path):
    tables = TABLES["b200"]
    assert products_version(tmp_path, tables, "nvfp4") == tables.gemm
    path = tmp_path / "aiconfigurator" / tables.folder / "gemm" / tables.tuned["nvfp4"] / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    path.touch()
    assert (products_version(tmp_path, tables, "nvfp4"), products_version(tmp_path, tables, "fp8")) == (tables.tuned["nvfp4"], tables.gemm)
