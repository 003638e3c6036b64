"""Figures of errors: every judged run is drawn, axes carry units."""

from pathlib import Path

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.validation.cases import read_cases
from perfmodel.validation.figures import FIGURES, error_by_chips, error_distribution, predicted_against_measured
from perfmodel.validation.validate import validate_cases
from tests.validation.published_cases import CASE, changed, sweep, write

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = write(
        tmp_path_factory.mktemp("figures") / "cases.jsonl", [*sweep(), *sweep("vtrain"), {"id": "nothing"}, changed(measured=None)]
    )
    return [row for row in validate_cases(path).rows if row.has_time]


def test_every_judged_run_is_a_point(rows):
    assert len(rows) == 10
    (axes,) = predicted_against_measured(rows).axes
    drawn = [line for line in axes.lines if line.get_label().startswith(("nanotron", "vTrain"))]
    points = {(x, y) for line in drawn for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}
    assert points == {(row.measured_step_time, row.predicted_step_time) for row in rows}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "[s]" in axes.get_xlabel()
    assert "[s]" in axes.get_ylabel()


def test_sources_have_names_and_no_prefixes_of_case_ids(rows):
    (axes,) = predicted_against_measured(rows).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["nanotron (5)", "vTrain (5)"]
    published = {
        case.id.partition("-")[0] for name in ("training", "out_of_memory") for case in read_cases(GOLDEN / f"published_{name}.jsonl.gz")
    }
    names = read_yaml(resource_dir("strategies") / "source_names.yaml")
    assert published <= set(names)
    assert names["titan2506"] == "torchtitan, June 2025"
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_at_most_1600_pixels_wide(rows, name):
    assert FIGURES[name](rows).get_figwidth() * 150 <= 1600


def test_error_by_chips_has_the_median_of_each_number_of_chips(rows):
    (axes,) = error_by_chips(rows).axes
    (median,) = [line for line in axes.lines if line.get_label().startswith("median")]
    assert list(median.get_xdata()) == [64.0]
    errors = sorted(min(row.time_error, 1.0) for row in rows)
    assert median.get_ydata()[0] == pytest.approx((errors[4] + errors[5]) / 2)


def test_the_distribution_counts_every_run(rows):
    left, right = error_distribution(rows).axes
    assert sum(bar.get_height() for bar in left.patches) == len(rows)
    assert all(line.get_ydata()[-1] == 1.0 for line in right.lines)


@pytest.mark.slow
def test_figures_are_written_to_a_new_folder(tmp_path):
    folder = tmp_path / "plots"
    validate_cases(write(tmp_path / "cases.jsonl", sweep()), plots=folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.png" for name in FIGURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_an_impossible_folder_is_refused_before_anything_is_written(tmp_path):
    path, out = write(tmp_path / "cases.jsonl", [CASE]), tmp_path / "results.csv"
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder, reason in ((tmp_path / "file", "is a file"), (tmp_path / "no" / "plots", "its folder does not exist")):
        with pytest.raises(InputError, match=reason):
            validate_cases(path, out=out, plots=folder)
    assert not out.exists()


def test_nothing_to_draw_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="nothing to draw"):
        validate_cases(write(tmp_path / "cases.jsonl", [changed(measured=None)]), plots=tmp_path / "plots")
