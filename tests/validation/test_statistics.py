"""Statistics of errors."""

import math

import pytest

from perfmodel.validation.statistics import error_statistics


def test_statistics_are_of_absolute_errors_and_the_bias_has_its_sign():
    of = error_statistics([-0.3, 0.1, math.nan, -0.2], [True, False])
    assert (of.count, of.median, of.bias, of.coverage) == (3, 0.2, -0.2, 0.5)
    assert (of.mean, of.p90) == (pytest.approx(0.2), pytest.approx(0.28))


def test_without_errors_there_is_nothing():
    of = error_statistics([])
    assert of.count == 0
    assert all(math.isnan(value) for value in (of.mean, of.median, of.p90, of.bias, of.coverage))
