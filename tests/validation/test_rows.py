"""The data frame of a validation has the columns and the values of `validate --out`."""

import pytest

from perfmodel.validation.judgement import summarise
from perfmodel.validation.rows import COLUMNS, SERVING_COLUMNS, case_columns, case_rows
from perfmodel.validation.validate import validate_cases
from tests.parallel.test_rows import assert_agrees
from tests.validation.published_cases import changed, sweep, write
from tests.validation.serving_cases import CASE as SERVED

TRAINING = [*sweep(), changed(id="broken", micro_batch=3), changed(id="no model", model={}, num_chips=None)]
SERVING = [SERVED, {**SERVED, "id": "unknown engine", "framework": "own server", "batch": None}]


@pytest.mark.parametrize("cases", [TRAINING, SERVING, [*TRAINING, *SERVING]], ids=["training", "serving", "both"])
def test_the_frame_is_the_table_of_the_command_line(cases, tmp_path):
    result = validate_cases(write(tmp_path / "cases.jsonl", cases), out=tmp_path / "table.csv")
    frame = result.to_frame()
    assert_agrees(frame, tmp_path / "table.csv")
    assert frame["predicted_fits"].dtype == "boolean"
    numeric = ["concurrency", "predicted_ttft"] if cases is SERVING else ["num_chips", "predicted_step_time", "step_time_low"]
    assert [str(frame[name].dtype) for name in numeric] == ["float64"] * len(numeric)


@pytest.mark.parametrize("cases", [TRAINING, SERVING, [*TRAINING, *SERVING]], ids=["training", "serving", "both"])
def test_rows_have_their_columns_in_the_order_of_the_table(cases, tmp_path):
    rows = validate_cases(write(tmp_path / "cases.jsonl", cases)).every_row
    assert list(dict.fromkeys(name for row in case_rows(rows) for name in row)) == case_columns(rows)


def test_training_runs_come_first(tmp_path):
    frame = validate_cases(write(tmp_path / "cases.jsonl", [SERVED, changed(id="trained")])).to_frame()
    assert list(frame["id"]) == ["trained", SERVED["id"]]
    assert list(frame.columns) == list(dict.fromkeys((*COLUMNS, *SERVING_COLUMNS)))


def test_a_result_without_runs_has_the_columns_of_training_runs():
    frame = summarise([]).to_frame()
    assert (list(frame.columns), len(frame)) == (list(COLUMNS), 0)
