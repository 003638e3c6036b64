"""Advice checked on published runs that differ in one option."""

from pathlib import Path

import pytest

from lab.advice import main, pairs
from perfmodel.validation.cases import read_cases
from tests.validation.published_cases import changed, sweep, write

PUBLISHED = Path(__file__).parents[1] / "golden" / "published_training.jsonl.gz"
LEAST_RIGHT = 0.9


def of(tmp_path, runs, left_out=None):
    return list(pairs(read_cases(write(tmp_path / "cases.jsonl", runs)), left_out))


@pytest.mark.slow
def test_nine_of_ten_advised_options_are_faster_on_published_sweeps():
    advised = [pair for pair in pairs(read_cases(PUBLISHED)) if pair.is_advised]
    assert len(advised) > 1_000
    assert sum(pair.is_right for pair in advised) >= LEAST_RIGHT * len(advised)
    for option in ("micro_batch", "tp", "pp"):
        same = [pair for pair in advised if pair.option == option]
        assert sum(pair.is_right for pair in same) >= LEAST_RIGHT * len(same) > 200 * LEAST_RIGHT, option


def test_pairs_differ_in_one_option_and_more_than_the_noise(tmp_path):
    found_pairs = of(tmp_path, [*sweep(), changed(id="nanotron-other", global_batch=256, micro_batch=2)])
    names = {(pair.option, *(run.options[pair.option] for run in (pair.fast, pair.slow))) for pair in found_pairs}
    assert names == {("tp", *degrees) for degrees in ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8))} | {("pp", 1, 2)}
    assert not of(tmp_path, sweep(times=(2.0, 2.01, 2.02, 2.03, 2.04)))


def test_repeated_runs_count_once_with_their_median_time(tmp_path):
    repeats = [changed(id=f"nanotron-again-{time}", tp=2, pp=1, dp=32, measured={"step_time_s": time}) for time in (1.0, 1.5)]
    first, *_ = [pair for pair in of(tmp_path, [*sweep()[:2], *repeats]) if pair.option == "tp"]
    assert (first.fast.measured, first.slow.measured) == (1.5, 2.0)


def test_the_direction_is_that_of_the_given_predictions(tmp_path, capsys):
    runs = sweep()[:2]
    right, wrong = ({"nanotron-0": time, "nanotron-1": 1.0} for time in (0.9, 1.1))
    assert [pair.is_right for pair in of(tmp_path, runs, right)] == [True]
    assert [pair.is_right for pair in of(tmp_path, runs, wrong)] == [False]
    assert not of(tmp_path, runs, {"nanotron-0": 1.0})
    (tmp_path / "left_out.csv").write_text("id,predicted_step_time\nnanotron-0,1.1\nnanotron-1,1.0\n")
    assert main([str(tmp_path / "cases.jsonl"), "--left-out", str(tmp_path / "left_out.csv"), "--wrong"]) == 0
    out = capsys.readouterr().out
    assert "tp      1      0.0%   1        0.0%" in out
    assert "tp: 1 over 2: measured +25.0%, predicted -9.1%: nanotron-0, nanotron-1" in out


@pytest.mark.parametrize("arguments", [["missing.jsonl"], ["{cases}", "--left-out", "missing.csv"]])
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments):
    cases = write(tmp_path / "cases.jsonl", sweep())
    assert main([argument.format(cases=cases) for argument in arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
