"""Splits of a cross-validation: nothing that is held out is seen, and everything is held out once."""

import numpy as np
import pytest

from lab.splits import cross_validated, k_of_n, leave_one_out

LABELS = ["b", "a", "b", "c", "a"]


def test_each_label_is_held_out_once_with_all_its_runs():
    splits = list(leave_one_out(LABELS))
    assert [split.label for split in splits] == ["a", "b", "c"]
    for split in splits:
        assert {LABELS[index] for index in split.held_out} == {split.label}
        assert sorted((*split.held_out, *split.seen)) == list(range(5))


def test_some_runs_are_drawn_at_random_and_the_rest_is_held_out():
    splits = list(k_of_n(2, 5, draws=3, random=np.random.default_rng(1)))
    assert len(splits) == 3
    assert all(len(split.seen) == 2 and sorted((*split.held_out, *split.seen)) == list(range(5)) for split in splits)
    assert len({tuple(split.seen) for split in splits}) > 1


@pytest.mark.parametrize("shape", [(), (2,)])
def test_predictions_are_in_the_order_of_the_runs(shape):
    values = np.arange(5.0)
    predictions = cross_validated(LABELS, lambda split: [np.full(shape, values[index]) for index in split.held_out])
    np.testing.assert_array_equal(predictions.reshape(5, -1)[:, 0], values)


def test_a_prediction_depends_on_the_other_labels_only():
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    predictions = cross_validated(LABELS, lambda split: [values[split.seen].mean()] * len(split.held_out))
    assert predictions.tolist() == pytest.approx([11 / 3, 8 / 3, 11 / 3, 11 / 4, 8 / 3])


def test_without_runs_there_are_no_predictions():
    assert cross_validated([], lambda split: []).size == 0
