"""Rows of values as a data frame."""

from perfmodel.foundation.frames import data_frame

ROWS = ({"model": "gpt2", "chips": 8, "fits": True}, {"model": "bert", "reason": "too few chips"})


def test_columns_are_in_the_order_of_their_first_use():
    assert list(data_frame(ROWS).columns) == ["model", "chips", "fits", "reason"]
    assert list(data_frame(ROWS, ["reason", "model"]).columns) == ["reason", "model"]


def test_complete_columns_keep_their_types():
    frame = data_frame(ROWS[:1])
    assert (frame["chips"].dtype, frame["fits"].dtype) == ("int64", "bool")


def test_missing_values_leave_numbers_and_booleans_what_they_are():
    frame = data_frame(ROWS)
    assert (frame["chips"].dtype, frame["fits"].dtype) == ("float64", "boolean")
    assert list(frame.isna().sum()) == [0, 1, 1, 1]
    assert list(frame[frame["fits"]]["model"]) == ["gpt2"]


def test_no_rows_are_an_empty_frame():
    assert data_frame([]).empty
    assert list(data_frame([], ["id", "reason"]).columns) == ["id", "reason"]
