"""`perfmodel fit`: what it prints, what it writes, what it refuses."""

import pytest

from tests.cli.conftest import joined
from tests.fitting.made_up import BASE, csv_text, rows


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(csv_text([{**row, "wandb": "x"} for row in rows()[:3]]))
    return path


def test_it_prints_errors_behaviours_and_runs(call, runs):
    code, out, err = call("fit", runs, "--profile", BASE)
    assert (code, err) == (0, "")
    for words in (
        "fitted to 3 runs: mean error ",
        "left out",
        "next run",
        "Fitted parameters, with one standard deviation",
        "by the runs",
        "still prior",
        "run-2",
        "wandb",
    ):
        assert words in joined(out)


def test_the_object_and_the_file(call_json, runs, tmp_path):
    mine = tmp_path / "mine.yaml"
    fit = call_json("fit", runs, "--profile", BASE, "--save", mine)
    assert fit["num_runs"] == 3
    assert fit["error_left_out"] < fit["error_before"]
    assert {behaviour["determined"] for behaviour in fit["habits"]} >= {"by the runs", "still prior"}
    assert fit["next_run"]["plan"]["num_chips"] == 16
    assert fit["saved"] == str(mine)
    assert call_json("profiles", mine)["profiles"][0]["fitted"]["num_runs"] == 3


def test_what_rows_leave_out_is_reported_once(call_json, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("micro_batch,step_time\n" + f"1,{rows()[0]['step_time']}\n")
    job = ("--model", "llama-3-8b", "--cluster", "h100-sxm-80gb", "--chips", 16, "--fsdp", 16, "--gbs", 64, "--seq-len", "4k")
    fit = call_json("fit", path, *job, "--profile", BASE)
    assert fit["runs"][0]["plan"]["layout"]["dp_shard"] == 16


def test_what_cannot_be_read_ends_with_a_sentence(call, tmp_path):
    for content, says in (("", "is empty"), ("hello\nworld\n", "holds no step"), ("{]\n", "not a JSON object")):
        path = tmp_path / "runs.txt"
        path.write_text(content)
        code, out, err = call("fit", path, "--save", tmp_path / "mine.yaml")
        assert (code, out) == (2, "")
        assert says in err
    assert not (tmp_path / "mine.yaml").exists()
