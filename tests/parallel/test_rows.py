"""The data frame of predictions has the columns and the values of `predict --csv`."""

import pandas

import perfmodel
from perfmodel.cli.app import run

JOB = {"model": "gpt2", "cluster": "dgx-h100", "global_batch": 64, "seq_len": 1024}
FLAGS = "--model gpt2 --cluster dgx-h100 --global-batch 64 --seq-len 1024"


def test_the_frame_is_the_table_of_the_command_line(tmp_path):
    frame = perfmodel.predict(**JOB, chips=[8, 16], tp=[1, 5]).to_frame()
    assert run(["predict", *FLAGS.split(), "--chips", "8,16", "--tp", "1,5", "--csv", str(tmp_path / "table.csv")]) == 0
    assert_agrees(frame, tmp_path / "table.csv")
    assert list(frame["fits"].isna()) == [False, False, True, True]
    assert list(frame["reason"] != "") == [False, False, True, True]


def test_numbers_are_numeric_and_verdicts_boolean():
    predictions = perfmodel.predict(**JOB, chips=[8, 16], tp=2)
    frame = predictions.to_frame()
    assert (frame["fits"].dtype, frame["sequence_parallel"].dtype, frame["tp"].dtype) == ("bool", "bool", "int64")
    assert list(frame["step_time"]) == [prediction.step_time for prediction in predictions]
    assert perfmodel.predict(**JOB, chips=[8, 16], tp=[1, 5]).to_frame()["fits"].dtype == "boolean"


def test_the_frame_has_the_rows_for_data_frames():
    predictions = perfmodel.predict(**JOB, chips=[8, 16], tp=[1, 5])
    rows = perfmodel.prediction_rows(predictions)
    assert list(predictions.to_frame().columns) == list(rows[0])
    assert perfmodel.prediction_rows(list(predictions)) == rows[:2]


def assert_agrees(frame, path):
    """The columns are those of the file, in its order, and so are the values: texts as they are, numbers to the digits written."""
    table = pandas.read_csv(path)
    assert list(frame.columns) == list(table.columns)
    assert len(frame) == len(table) > 0
    for name in frame.columns:
        if pandas.api.types.is_bool_dtype(frame[name].dtype):
            assert list(frame[name].dropna()) == list(table[name].dropna()), name
        elif pandas.api.types.is_numeric_dtype(frame[name].dtype):
            pandas.testing.assert_series_equal(frame[name], table[name], check_dtype=False, rtol=1e-8)
        else:
            assert not pandas.api.types.is_numeric_dtype(table[name].dtype) or table[name].isna().all(), name
            assert texts(frame[name]) == texts(table[name]), name


def texts(column):
    return ["" if pandas.isna(value) else value for value in column]
