"""Rates that no table of kernels gives, as published runs say them."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab.cases import read_runs
from lab.kernels.clocks import Rate, clocks_values, fitted_clocks, main, rows_of

CASES = Path(__file__).parents[2] / "golden" / "published_training.jsonl.gz"
DETERMINED = Rate(
    calibration="h100", of="matmul", shipped=0.83, value=0.84, spread=0.02, low=0.82, high=0.85, num_runs=9, frameworks=("a", "b")
)


def test_a_clock_that_depends_on_one_framework_is_undetermined():
    assert DETERMINED.is_determined
    assert not replace(DETERMINED, frameworks=("a",)).is_determined
    assert not replace(DETERMINED, low=0.7).is_determined
    assert not replace(DETERMINED, spread=0.1).is_determined
    assert rows_of([DETERMINED])[0][-1] == "determined"


def test_what_ships_and_surprises_the_runs_is_named():
    assert clocks_values([DETERMINED])["surprises"] == "none"
    assert clocks_values([replace(DETERMINED, value=0.9)])["surprises"] == "matmul of h100"


@pytest.mark.slow
def test_the_clocks_that_ship_are_those_of_the_published_runs():
    """The determined clocks, with a few runs of some frameworks."""
    runs = [run for run in read_runs(CASES) if run.profile in ("composer-fsdp", "megatron", "torchtitan")]
    clocks = {(clock.calibration, clock.of): clock for clock in fitted_clocks(runs, most=12)}
    for calibration in ("a100", "h100"):
        rate = clocks[calibration, "matmul"]
        assert rate.value == pytest.approx(rate.shipped, rel=0.03)
    assert clocks["h100", "matmul"].frameworks == ("Composer", "torch")
    assert not clocks["h100", "flash1"].is_determined


def test_bad_input_is_answered_with_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
