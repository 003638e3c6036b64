"""The data frame of a search has the columns and the values of `search --csv`."""

import pytest

import perfmodel
from perfmodel.cli.app import run
from tests.parallel.test_rows import FLAGS, JOB, assert_agrees


@pytest.mark.slow
def test_the_frame_is_the_table_of_the_command_line(tmp_path):
    result = perfmodel.find_plans(**JOB, chips=8, top=3)
    frame = result.to_frame()
    assert run(["search", *FLAGS.split(), "--chips", "8", "--top", "3", "--csv", str(tmp_path / "table.csv")]) == 0
    assert_agrees(frame, tmp_path / "table.csv")
    baselines = [baseline.name for baseline in result.baselines if baseline.plans]
    assert list(frame["place"]) == [*map(str, result.ranking.places), *baselines]
    assert list(frame["step_time"][:3]) == [plan.step_time for plan in result.plans]
    assert frame["fits"].dtype == "bool"


def test_the_frame_of_a_service_is_the_table_of_the_command_line(tmp_path):
    words = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 2, "input_len": 512, "output_len": 128}
    frame = perfmodel.find_serving(**words, top=3, disaggregated=True).to_frame()
    flags = [text for name, value in words.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert run(["serve", "--search", "--disaggregated", "--top", "3", *flags, "--csv", str(tmp_path / "table.csv")]) == 0
    assert_agrees(frame, tmp_path / "table.csv")
    kinds = list(frame["kind"])
    assert list(frame["place"]) == [*range(1, kinds.count("aggregated") + 1), *range(1, kinds.count("disaggregated") + 1)]
