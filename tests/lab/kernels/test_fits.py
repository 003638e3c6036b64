"""Fits to made-up GPU tables give back the parameters that made them; the command reads real folders and refuses what is missing."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels.chip_kernels import BULK_BYTES, RING_STEP_BYTES, attention_kernel, collective_kernel, matmul_kernel
from lab.kernels.chips import TABLES
from lab.kernels.fit import main
from lab.kernels.tables import AttentionTable, CollectiveTable, MatmulTable
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES, AttentionModel, CollectiveModel, MatmulModel
from perfmodel.hardware.reader import load_calibration, load_cluster
from tests.lab.kernels.tables_of_tests import grid

H100 = load_cluster("dgx-h100", num_chips=16)


def assert_comes_back(kernel, true, *, rtol):
    """A fit to the times of a model predicts them, and is returned."""
    times = kernel.predict(true, kernel.table)
    model = kernel.fit(replace(kernel.table, time=times))
    np.testing.assert_allclose(kernel.predict(model, kernel.table), times, rtol=rtol)
    return model


def test_a_matmul_model_comes_back():
    true = MatmulModel(
        peak_fraction=0.8, depth_offset=110, wave_softness=0.2, memory_fraction=0.85, floor_time=3e-6, sharpness=3.5,
        small_tile_penalty=0.02, least_waves=0.6, split_depth=4000.0, tiles=GPU_TILES,
    )  # fmt: skip
    m, n, k = grid([128, 384, 1024, 4096, 8192], [256, 768, 2048, 5120, 8192], [64, 256, 1024, 3072, 8192])
    table = MatmulTable(m=m, n=n, k=k, time=np.ones_like(m))
    model = assert_comes_back(matmul_kernel(table, H100, Dtype.BF16), true, rtol=0.03)
    assert model.peak_fraction == pytest.approx(0.8, rel=0.02)


def test_an_attention_model_comes_back():
    true = AttentionModel(
        peak_fraction=0.7, head_dim_offset=30, sequence_offset=9e4, floor_time=15e-6, wave_softness=0.8, memory_fraction=0.6
    )
    batch, heads, length, head_dim = grid([1, 4, 16], [8, 24, 64], [512, 1024, 4096, 16384], [64, 128])
    table = AttentionTable(batch=batch, heads=heads, kv_heads=heads, length=length, head_dim=head_dim, time=np.ones_like(batch))
    assert_comes_back(attention_kernel(table, H100, backward_rate=0.8), true, rtol=0.03)


def test_a_collective_model_comes_back():
    true = CollectiveModel(
        base_time=5e-6, hop_time=1.5e-6, bandwidth_fraction=0.8, own_share=0.4, step_share=0.3, step_bytes=RING_STEP_BYTES,
        bulk_time=15e-6, bulk_bytes=BULK_BYTES,
    )  # fmt: skip
    num_bytes, ranks = grid(2.0 ** np.arange(9, 30), [2, 4, 8])
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=np.ones_like(ranks))
    assert_comes_back(collective_kernel(table, CollectiveKind.ALL_GATHER, H100), true, rtol=0.02)


def test_a_folder_without_tables_is_refused(tmp_path, capsys):
    assert main(["--data", str(tmp_path), "--chip", "a100", "--out", str(tmp_path)]) == 2
    assert "no such table" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TABLES)
def test_shipped_calibrations_say_where_they_come_from(name):
    calibration = load_calibration(name)
    assert calibration.chips == (TABLES[name].chip,)
    assert "clock" in calibration.source.lower()
    assert calibration.date
    assert set(calibration.fit.errors) == set(calibration.fit.points)
    errors = calibration.fit.errors
    assert errors["matmul.bf16"] < 0.07
    assert errors["matmul.bf16.m<128"] < 0.12
    assert errors["attention.flash"] < 0.06
    assert max(error for part, error in errors.items() if part.startswith(("matmul", "attention", "scale_up"))) < 0.15
