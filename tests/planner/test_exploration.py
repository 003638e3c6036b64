"""Gains along the last axis of an exploration, and where it saturates."""

import math

import pytest

from perfmodel.planner.exploration import Axis, Exploration, Point


def exploration(*times):
    axes = (Axis(name="plan.tp", values=(1, 2)), Axis(name="chip.memory.bandwidth", values=(1e12, 2e12, 4e12), kind="bandwidth"))
    values = [{"plan.tp": tp, "chip.memory.bandwidth": rate} for tp in axes[0].values for rate in axes[1].values]
    points = tuple(Point(values=point_values, time=time) for point_values, time in zip(values, times, strict=True))
    return Exploration(axes=axes, points=points, metric="step time", is_searched=False)


def test_gains_are_along_the_last_axis():
    gains = exploration(8.0, 4.0, 2.0, 6.0, 5.9, math.inf).gains()
    assert [round(gain, 3) for gain in gains[1:3]] == [2.0, 2.0]
    assert gains[4] == pytest.approx(6.0 / 5.9)
    assert [math.isnan(gain) for gain in gains] == [True, False, False, True, False, True]


def test_a_line_saturates_at_the_last_value_that_gained_a_tenth():
    explored = exploration(8.0, 4.0, 3.9, 6.0, 5.9, 5.8)
    first, second = (explored.saturation(line) for line in explored.lines())
    assert first.values["chip.memory.bandwidth"] == 2e12
    assert second.values["chip.memory.bandwidth"] == 1e12
    rising = exploration(8.0, 4.0, 2.0, 8.0, 4.0, 2.0)
    assert [rising.saturation(line) for line in rising.lines()] == [None, None]


def test_values_are_shown_with_their_units():
    assert [axis.text(axis.values[0]) for axis in exploration(*[1.0] * 6).axes] == ["1", "1 TB/s"]
