"""Accuracy table: every line reaches its target.

published_training.jsonl.gz, published_out_of_memory.jsonl.gz, published_serving.jsonl.gz   runs that their sources published, each with
`source` and `source_ref` (serving omits fields without information, and lists corrections in `notes`); measured values are kept apart
from the inputs (`perfmodel.validation.cases.NOT_INPUTS`)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lab.accuracy_lines import EVERY, median_of_means
from lab.cases import PublishedRun, read_runs
from lab.left_out.fits import LeftOut, PredictedRun
from lab.left_out.table import LINES, LeftOutTable, judge
from perfmodel.validation.cases import read_cases
from perfmodel.validation.judgement import summarise
from perfmodel.validation.statistics import error_statistics
from perfmodel.validation.step_times import StepTimes
from perfmodel.validation.validate import CasePredictor

CASES = Path(__file__).parent / "published_training.jsonl.gz"
OUT_OF_MEMORY = Path(__file__).parent / "published_out_of_memory.jsonl.gz"

MEAN_AT_LEAST = {
    "Megatron-LM on A100, Korthikanti": 0.03,
    "SimuMax, dense, B200": 0.08,
    "vTrain, one node": 0.07,
    "vTrain, many nodes": 0.11,
    "MPT with FSDP, A100": 0.06,
    "MPT with FSDP, H100": 0.09,
    "nanotron, H100, 8-512": 0.10,
    "torchtitan and IBM FSDP, bf16": 0.09,
}


@pytest.fixture(scope="module")
def runs():
    return read_runs(CASES)


def assert_lines_reached(table: LeftOutTable, titles: Iterable[str] = MEAN_AT_LEAST) -> None:
    for title in titles:
        assert error_statistics(table.errors(title)).mean <= MEAN_AT_LEAST[title], title


def assert_reached(table: LeftOutTable) -> None:
    assert_lines_reached(table)
    assert max(map(abs, table.errors("Megatron-LM on A100, Korthikanti"))) <= 0.07
    counted = error_statistics(table.lines[EVERY])
    assert counted.median <= 0.06
    assert counted.mean <= 0.09
    assert counted.p90 <= 0.20
    assert median_of_means(table.lines) <= 0.08
    assert table.choices.overall.num_groups == 12
    assert table.choices.overall.mean_regret <= 0.04


def test_every_line_that_counts_has_a_target():
    assert set(MEAN_AT_LEAST) == {line.title for line in LINES if line.counts}


@pytest.mark.slow
def test_the_shipped_constants_reach_the_table(runs):
    times = StepTimes(runs=runs).predict(range(len(runs)), {})
    assert_reached(judge([PredictedRun(run=run, predicted=float(time), fold="shipped") for run, time in zip(runs, times, strict=True)]))


def judged_without_their_model(runs: Sequence[PublishedRun]) -> LeftOutTable:
    predictions = LeftOut.of_times(runs).predictions()
    assert len(predictions) == len(runs)
    assert np.all([f"without {prediction.run.model}" in prediction.fold for prediction in predictions])
    return judge(predictions)


@pytest.mark.slow
def test_fits_that_saw_no_run_of_a_model_reach_the_lines_of_two_frameworks(runs):
    titles = ("Megatron-LM on A100, Korthikanti", "nanotron, H100, 8-512")
    assert_lines_reached(judged_without_their_model([run for run in runs if run.profile in ("megatron", "nanotron")]), titles)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_fits_that_saw_no_run_of_a_model_reach_the_table(runs):
    """Without NVIDIA's recipes, which no line counts and whose fits take half the time."""
    assert_reached(judged_without_their_model([run for run in runs if run.profile != "nemo"]))


@pytest.fixture(scope="module")
def judged():
    """Both files as `validate` judges them, intervals aside."""
    predictor = CasePredictor(has_intervals=False)
    return summarise(
        [predictor.row(case) for path in (CASES, OUT_OF_MEMORY) for case in read_cases(path) if case.tier in ("primary", "oom")]
    )


@pytest.mark.slow
def test_runs_that_ran_out_of_memory_do_not_fit_and_those_that_ran_do(judged):
    assert (judged.fits.num_ran, judged.fits.num_out) == (845, 340)
    assert judged.fits.false_fit_fraction <= 0.02
    assert judged.fits.false_out_fraction <= 0.03
    for source in judged.source_fits:
        if source.num_ran >= 10:
            assert source.false_out_fraction <= 0.03, source.name


@pytest.mark.slow
def test_the_readme_has_the_figures_that_validate_prints(judged):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"{judged.scored.num_runs:,} published training runs" in readme


def test_the_published_runs_say_where_they_are_from():
    for path, count in ((CASES, 1493), (OUT_OF_MEMORY, 342)):
        cases = list(read_cases(path))
        assert len(cases) == count
        assert all(case.group for case in cases)
        assert not any(case.reason for case in cases)
