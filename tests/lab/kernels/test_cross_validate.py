"""Cross-validation on made-up tables: planted parameters are found without the shapes, and groups are left out whole."""

from dataclasses import replace

import numpy as np
import pytest

from lab.kernels import held_out
from lab.kernels.cross_validate import SUMMARISED, Errors, document, main, summary, table
from lab.kernels.held_out import (
    attention_errors,
    attention_groups,
    collective_errors,
    matmul_errors,
    matmul_groups,
    size_decades,
)
from perfmodel.calibrate import fits
from perfmodel.calibrate.fits import AttentionTable, CollectiveTable, MatmulTable, predict_attention, predict_collective, predict_matmul
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES, AttentionModel, CollectiveModel, MatmulModel
from perfmodel.hardware.reader import load_cluster

H100 = load_cluster("dgx-h100", num_chips=16)


def grid(*axes):
    return [column.ravel().astype(float) for column in np.meshgrid(*axes, indexing="ij")]


def matmuls():
    m, n, k = grid([1, 16, 128, 1024, 8192], [256, 1024, 4096, 12288], [256, 1024, 4096, 12288])
    true = MatmulModel(
        peak_fraction=0.8, depth_offset=100, wave_softness=0.2, memory_fraction=0.85, floor_time=3e-6, sharpness=3, least_waves=0.6,
        split_depth=3000, small_tile_penalty=0.1, tiles=GPU_TILES,
    )  # fmt: skip
    table = MatmulTable(m=m, n=n, k=k, time=np.ones_like(m))
    return replace(table, time=predict_matmul(true, table, H100, Dtype.BF16))


def attentions():
    batch, heads, length, head_dim = grid([1, 4, 16], [8, 16, 32, 64], [512, 2048, 8192], [64, 128])
    true = AttentionModel(
        peak_fraction=0.7, head_dim_offset=30, sequence_offset=9e4, floor_time=15e-6, wave_softness=0.8, memory_fraction=0.6
    )
    table = AttentionTable(batch=batch, heads=heads, kv_heads=heads / 4, length=length, head_dim=head_dim, time=np.ones_like(batch))
    return replace(table, time=predict_attention(true, table, H100, Dtype.BF16))


def all_gathers():
    num_bytes, ranks = grid(2.0 ** np.arange(9, 30), [2, 4, 8])
    true = CollectiveModel(base_time=5e-6, hop_time=1e-6, bandwidth_fraction=0.8, own_share=0.4, step_share=0.3, bulk_time=15e-6)
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=np.ones_like(ranks))
    return replace(table, time=predict_collective(true, CollectiveKind.ALL_GATHER, table, H100))


def test_planted_parameters_predict_the_shapes_left_out():
    assert np.median(matmul_errors(matmuls(), H100, Dtype.BF16)) < 0.03
    assert np.median(attention_errors(attentions(), H100)) < 0.02
    assert np.median(collective_errors(all_gathers(), CollectiveKind.ALL_GATHER, H100)) < 0.03


def test_noise_shows_as_it_is():
    table = matmuls()
    noise = np.exp(np.random.default_rng(1).normal(0, 0.15, len(table.time)))
    errors = matmul_errors(replace(table, time=table.time * noise), H100, Dtype.BF16)
    assert 0.07 < np.median(errors) < 0.16  # the median of |N(0, .15)| is .10


def test_cross_validation_is_deterministic():
    table = all_gathers()
    np.testing.assert_array_equal(*(collective_errors(table, CollectiveKind.ALL_GATHER, H100) for _ in range(2)))


def test_a_group_holds_a_weight_at_every_m():
    table = matmuls()
    groups = matmul_groups(table)
    assert len(set(groups)) == 16
    for group in set(groups):
        assert len(set(table.m[groups == group])) == 5
        assert len(set(zip(table.n[groups == group], table.k[groups == group], strict=True))) == 1


def test_a_group_holds_the_heads_at_every_batch_and_length():
    table = attentions()
    groups = attention_groups(table)
    assert len(set(groups)) == 8
    assert {(groups == group).sum() for group in set(groups)} == {9}


def test_a_decade_holds_the_sizes_of_all_ranks():
    table = all_gathers()
    decades = size_decades(table)
    assert sorted(set(decades)) == [2, 3, 4, 5, 6, 7, 8]
    assert set(table.ranks[decades == 4]) == {2, 4, 8}


@pytest.mark.parametrize(
    ("table", "groups", "name", "errors"),
    [
        (matmuls(), lambda t: t.n * 1e6 + t.k, "fit_matmul", lambda t: matmul_errors(t, H100, Dtype.BF16)),
        (attentions(), lambda t: t.heads * 1e6 + t.head_dim, "fit_attention", lambda t: attention_errors(t, H100)),
        (
            all_gathers(),
            lambda t: np.floor(np.log10(t.num_bytes)),
            "fit_collective",
            lambda t: collective_errors(t, CollectiveKind.ALL_GATHER, H100),
        ),
    ],
    ids=["matmul", "attention", "collective"],
)
def test_no_shape_of_a_group_left_out_is_in_its_fit(monkeypatch, table, groups, name, errors):
    fitted, fit = [], getattr(fits, name)

    def watched(rows, *arguments, **options):
        fitted.append(set(groups(rows)))
        return fit(rows, *arguments, **options)

    def watched_prediction(predict):
        def predicted(model, *arguments):
            rows = next(a for a in arguments if hasattr(a, "rows"))
            assert not set(groups(rows)) & fitted[-1]
            return predict(model, *arguments)

        return predicted

    monkeypatch.setattr(held_out, name, watched)
    for predict in ("predict_matmul", "predict_attention", "predict_collective"):
        monkeypatch.setattr(held_out, predict, watched_prediction(getattr(held_out, predict)))
    errors(table)
    assert len(fitted) == (7 if name == "fit_collective" else fits.NUM_FOLDS)


def test_the_summary_takes_the_median_and_the_worst_chip():
    part = SUMMARISED[0]
    rows = [Errors(part=part, chip=str(error), errors=np.array([error])) for error in (0.1, 0.02, 0.04)]
    assert summary(rows) == [(part, 0.04, 0.1)]


def test_rows_as_csv_and_as_a_page():
    part = SUMMARISED[0]
    rows = [Errors(part=part, chip="a100", errors=np.array([0.03, 0.05, 0.1]))]
    assert table(rows).splitlines() == ["part,chip,points,median_error,p90_error", f"{part},a100,3,0.0500,0.0900"]
    page = document(rows)
    assert f"| {part} | 5.0% | 5.0% |\n" in page
    assert f"| {part} | a100 | 3 | 5.0% | 9.0% |" in page


def test_every_row_of_a_csv_has_its_columns():
    rows = [Errors(part=part, chip="h100, h200", errors=np.array([0.1])) for part in SUMMARISED]
    assert {line.count(",") for line in table(rows).splitlines()} == {4}


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
