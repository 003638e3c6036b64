"""Cross-validation on made-up tables: planted parameters are found without the shapes, and groups are left out whole."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from lab.kernels.chip_kernels import attention_kernel, collective_kernel, matmul_kernel
from lab.kernels.cross_validate import SUMMARISED, Errors, document, main, rows_text, summary
from lab.kernels.tables import AttentionTable, CollectiveTable, MatmulTable
from perfmodel.calibrate.fits import NUM_FOLDS
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES, AttentionModel, CollectiveModel, MatmulModel
from perfmodel.hardware.reader import load_cluster
from tests.lab.kernels.tables_of_tests import grid, planted

H100 = load_cluster("dgx-h100", num_chips=16)


def matmul(rows):
    return matmul_kernel(rows, H100, Dtype.BF16)


def attention(rows):
    return attention_kernel(rows, H100)


def all_gather(rows):
    return collective_kernel(rows, CollectiveKind.ALL_GATHER, H100)


def matmuls():
    m, n, k = grid([1, 16, 128, 1024, 8192], [256, 1024, 4096, 12288], [256, 1024, 4096, 12288])
    true = MatmulModel(
        peak_fraction=0.8, depth_offset=100, wave_softness=0.2, memory_fraction=0.85, floor_time=3e-6, sharpness=3, least_waves=0.6,
        split_depth=3000, small_tile_penalty=0.1, tiles=GPU_TILES,
    )  # fmt: skip
    return planted(matmul, MatmulTable(m=m, n=n, k=k, time=np.ones_like(m)), true)


def attentions():
    batch, heads, length, head_dim = grid([1, 4, 16], [8, 16, 32, 64], [512, 2048, 8192], [64, 128])
    true = AttentionModel(
        peak_fraction=0.7, head_dim_offset=30, sequence_offset=9e4, floor_time=15e-6, wave_softness=0.8, memory_fraction=0.6
    )
    table = AttentionTable(batch=batch, heads=heads, kv_heads=heads / 4, length=length, head_dim=head_dim, time=np.ones_like(batch))
    return planted(attention, table, true)


def all_gathers():
    num_bytes, ranks = grid(2.0 ** np.arange(9, 30), [2, 4, 8])
    true = CollectiveModel(base_time=5e-6, hop_time=1e-6, bandwidth_fraction=0.8, own_share=0.4, step_share=0.3, bulk_time=15e-6)
    return planted(all_gather, CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=np.ones_like(ranks)), true)


KERNELS = {"matmul": matmul(matmuls()), "attention": attention(attentions()), "collective": all_gather(all_gathers())}


@cache
def held_out_errors(name):
    return KERNELS[name].held_out_errors()


@pytest.mark.parametrize(("name", "most"), [("matmul", 0.03), ("attention", 0.02), ("collective", 0.03)])
@pytest.mark.slow
def test_planted_parameters_predict_the_shapes_left_out(name, most):
    assert np.median(held_out_errors(name)) < most


def test_noise_shows_as_it_is():
    table = matmuls()
    noise = np.exp(np.random.default_rng(1).normal(0, 0.15, len(table.time)))
    errors = matmul(replace(table, time=table.time * noise)).held_out_errors()
    assert 0.07 < np.median(errors) < 0.16  # the median of |N(0, .15)| is .10


@pytest.mark.slow
def test_cross_validation_is_deterministic():
    np.testing.assert_array_equal(held_out_errors("collective"), KERNELS["collective"].held_out_errors())


def test_a_group_holds_a_weight_at_every_m():
    table = matmuls()
    groups = matmul(table).groups
    assert len(set(groups)) == 16
    for group in set(groups):
        assert len(set(table.m[groups == group])) == 5
        assert len(set(zip(table.n[groups == group], table.k[groups == group], strict=True))) == 1


def test_a_group_holds_the_heads_at_every_batch_and_length():
    groups = attention(attentions()).groups
    assert len(set(groups)) == 8
    assert {(groups == group).sum() for group in set(groups)} == {9}


def test_a_decade_holds_the_sizes_of_all_ranks():
    table = all_gathers()
    decades = all_gather(table).groups
    assert sorted(set(decades)) == [2, 3, 4, 5, 6, 7, 8]
    assert set(table.ranks[decades == 4]) == {2, 4, 8}


@pytest.mark.parametrize(
    ("name", "num_folds", "groups"),
    [
        ("matmul", NUM_FOLDS, lambda t: t.n * 1e6 + t.k),
        ("attention", NUM_FOLDS, lambda t: t.heads * 1e6 + t.head_dim),
        ("collective", 7, lambda t: np.floor(np.log10(t.num_bytes))),
    ],
)
def test_no_shape_of_a_group_left_out_is_in_its_fit(name, num_folds, groups):
    fitted, predicted = [], []
    watched = replace(
        KERNELS[name],
        fit=lambda rows: fitted.append(set(groups(rows))),
        predict=lambda _, rows: predicted.append(set(groups(rows))) or rows.time,
    )
    watched.held_out_errors()
    assert all(not inside & outside for inside, outside in zip(fitted, predicted, strict=True))
    assert len(fitted) == num_folds


def test_the_summary_takes_the_median_and_the_worst_chip():
    part = SUMMARISED[0]
    rows = [Errors(part=part, chip=str(error), errors=np.array([error])) for error in (0.1, 0.02, 0.04)]
    assert summary(rows) == [(part, 0.04, 0.1)]


def test_rows_as_csv_and_as_a_page():
    part = SUMMARISED[0]
    rows = [Errors(part=part, chip="a100", errors=np.array([0.03, 0.05, 0.1]))]
    assert rows_text(rows).splitlines() == ["part,chip,points,median_error,p90_error", f"{part},a100,3,0.0500,0.0900"]
    page = document(rows)
    assert f"| {part} | 5.0% | 5.0% |\n" in page
    assert f"| {part} | a100 | 3 | 5.0% | 9.0% |" in page


def test_every_row_of_a_csv_has_its_columns():
    rows = [Errors(part=part, chip="h100, h200", errors=np.array([0.1])) for part in SUMMARISED]
    assert {line.count(",") for line in rows_text(rows).splitlines()} == {4}


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such table; give the folder that holds the kernel tables" in capsys.readouterr().err


def test_a_table_that_cannot_be_read_is_refused(tmp_path, capsys):
    table = tmp_path / "aiconfigurator/a100_sxm/gemm/trtllm/1.0.0/gemm_perf.parquet"
    table.parent.mkdir(parents=True)
    table.write_text("no table")
    assert main([str(tmp_path), "--chip", "a100"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_an_unknown_chip_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["folder", "--chip", "a101"])
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
