"""Figures: every part and class is drawn, to its size, in each format."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.report.figures import (
    GIB,
    label_marks,
    new_figure,
    predictions_figure,
    scaling_figure,
    search_figure,
    write_figure,
)

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192)
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def predictions():
    return [perfmodel.predict(**JOB, tp=2, pp=pp) for pp in (1, 2)]


@pytest.fixture(scope="module")
def result():
    return perfmodel.find_plans(**JOB)


def test_bars_are_as_tall_as_the_step_and_the_memory(predictions):
    left, right = predictions_figure(predictions, names=["one", "two"]).axes
    for axes, sizes in (
        (left, [prediction.step_time for prediction in predictions]),
        (right, [prediction.memory["total"] / GIB for prediction in predictions]),
    ):
        tops = [
            max(bar.get_y() + bar.get_height() for bar in axes.patches if round(bar.get_x() + bar.get_width() / 2) == i) for i in (0, 1)
        ]
        assert tops == pytest.approx(sizes)


@pytest.mark.slow
def test_axes_carry_units(predictions, result):
    labels = [axes.get_ylabel() for axes in predictions_figure(predictions).axes]
    assert "[s]" in labels[0]
    assert "[GiB]" in labels[1]
    (axes,) = search_figure(result).axes
    assert "[GiB]" in axes.get_xlabel()
    assert "[s]" in axes.get_ylabel()


def test_baselines_and_front_are_in_the_legend(result):
    (axes,) = search_figure(result).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any(line.startswith("Pareto front") for line in legend)
    assert any(line.startswith("data parallel (does not fit)") for line in legend)


def test_the_axis_of_a_search_is_that_of_its_plans(result):
    """The slow end of the front does not squeeze the best plans into a corner."""
    (axes,) = search_figure(result).axes
    low, high = axes.get_ylim()
    times = [plan.step_time for plan in result.plans]
    assert low < min(times) <= max(times) < high
    assert high < 3 * max(*times, *(plan.step_time for baseline in result.baselines for plan in baseline.plans if plan.fits))


def test_a_total_does_not_lie_on_the_line_of_what_is_usable(predictions):
    nearly_full = [replace(prediction, memory_usable=1.02 * prediction.memory["total"]) for prediction in predictions]
    right = predictions_figure(nearly_full).axes[1]
    labels = [text for text in right.texts if text.get_text().endswith("GiB")]
    assert [text.get_position()[1] for text in labels] == pytest.approx([prediction.memory_usable / GIB for prediction in nearly_full])


def test_what_is_too_thin_to_be_seen_is_not_in_the_legend(predictions):
    for axes in predictions_figure(predictions).axes:
        tallest = max(bar.get_y() + bar.get_height() for bar in axes.patches)
        seen = {bar.get_height() for bar in axes.patches if bar.get_height() > 0.005 * tallest}
        assert len(axes.get_legend().get_texts()) <= len(seen) + 1


def test_many_bars_stay_narrow_and_have_names_of_their_own():
    predictions = perfmodel.predict(**dict(JOB, tp=[1, 2, 4, 8], micro_batch=[1, 2], recompute=["none", "full"]))
    assert len(predictions) == 16
    figure = predictions_figure(list(predictions))
    assert figure.get_figwidth() * 150 <= 1600
    fastest = sorted(prediction.step_time for prediction in predictions)[:12]
    for axes in figure.axes:
        labels = [text.get_text() for text in axes.get_xticklabels()]
        assert len(labels) == len(set(labels)) == len(fastest)
    assert "the 12 fastest of 16" in figure.get_suptitle()


def test_several_numbers_of_chips_are_all_drawn():
    """Throughput and MFU against chips, a line for each cluster."""
    predictions = [
        perfmodel.predict(**dict(JOB, cluster=cluster, chips=chips, tp=2))
        for cluster in ("dgx-h100", "dgx-a100")
        for chips in (64, 128, 256)
    ]
    left, right = scaling_figure(predictions).axes
    drawn = [line for line in left.lines if line.get_linestyle() == "-"]
    assert [line.get_label() for line in drawn] == ["dgx-h100", "dgx-a100"]
    assert [list(line.get_xdata()) for line in (*drawn, *right.lines)] == [[64, 128, 256]] * 4
    assert list(right.lines[1].get_ydata()) == [pytest.approx(100 * prediction.mfu_palm) for prediction in predictions[3:]]
    assert "tokens/s]" in left.get_ylabel()
    assert not {512.0, 1024.0, 2048.0} & set(left.get_yticks())
    assert "MFU" in right.get_ylabel()


@pytest.mark.parametrize("ending", MAGIC)
@pytest.mark.slow
def test_each_format_is_written(ending, predictions, result, tmp_path):
    write_figure(predictions_figure(predictions), tmp_path / f"predict{ending}")
    write_figure(search_figure(result), tmp_path / f"search{ending}")
    for name in ("predict", "search"):
        assert (tmp_path / f"{name}{ending}").read_bytes().startswith(MAGIC[ending])


def test_neither_an_unknown_backend_nor_an_unwritable_home_disturbs_a_figure(tmp_path):
    (tmp_path / "home").write_text("a file")
    code = (
        "from pathlib import Path\n"
        "from perfmodel.report.figures import new_figure, write_figure\n"
        "write_figure(new_figure(width=2, height=2), Path('figure.png'))\n"
        "import os; assert os.environ['MPLBACKEND'] == 'nothing'\n"
    )
    environment = os.environ | {"HOME": str(tmp_path / "home"), "MPLBACKEND": "nothing"}
    environment.pop("MPLCONFIGDIR", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "figure.png").exists()


def test_labels_of_marks_stay_inside_the_axes_and_cover_nothing():
    figure = new_figure(width=6.0, height=4.0)
    axes = figure.subplots()
    spots = [(float(x), 1.0 + 0.01 * x) for x in range(10)]
    axes.plot(*zip(*spots, strict=True), "o")
    figure.draw_without_rendering()
    label_marks(axes, [(f"a rather long label {x:g}", (x, y)) for x, y in spots], spots)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) >= 3
    assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[index + 1 :])
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
