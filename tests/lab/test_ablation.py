"""The value of each fitted number: judged by the runs that it moves; each shipped number is worth keeping."""

from pathlib import Path

import numpy as np
import pytest

from lab.ablation import HEADERS, WORTH, _judged, ablation_values, ablations, main, rows_of
from tests.lab.published_steps import published
from tests.validation.published_cases import write

GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_number_is_judged_by_the_runs_that_it_moves():
    base, without, measured = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.2, 3.3]), np.array([1.5, 2.0, 3.0])
    ablation = _judged(("a", "b"), "host_launch_time", 1e-5, "step time", base, without, measured)
    assert (ablation.num_runs, ablation.before) == (2, 0.0)
    assert ablation.worth == pytest.approx(0.1)
    (row,) = rows_of([ablation])
    assert row == ("a, b", "host_launch_time", "1e-05", "step time", "2", "0.0", "10.0", "+10.0")
    assert all(header in str(ablation_values([ablation])["table"]) for header in HEADERS)
    unmoved = _judged(("a",), "host_launch_time", 1e-5, "step time", base, base, measured)
    assert (unmoved.num_runs, unmoved.worth) == (0, 0.0)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return write(tmp_path_factory.mktemp("ablation") / "cases.jsonl", published("simumax"))


def test_a_framework_without_runs_has_no_lines(few, capsys):
    assert main([str(few)]) == 0
    printed = capsys.readouterr().out
    assert "megatron" in printed
    assert "nanotron" not in printed
    assert "numbers in the files of all frameworks" in printed


def test_bad_input_is_answered_with_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
def test_every_number_that_ships_is_worth_its_place():
    results = ablations(GOLDEN / "published_training.jsonl.gz")
    assert {result.constant: result.worth for result in results if result.worth < WORTH and not result.is_lent} == {}
