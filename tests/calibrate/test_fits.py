"""Linear fits have no negative coefficients, and their errors are of points that they did not see."""

import numpy as np
import pytest

from perfmodel.calibrate.fits import fit_linear, held_out_errors, rounded


def test_linear_coefficients_are_never_negative():
    x = np.arange(1.0, 20.0)
    columns = np.stack([np.ones_like(x), x], axis=1)
    assert fit_linear(columns, 5 - 0.1 * x) == pytest.approx([np.mean(5 - 0.1 * x), 0], rel=0.2, abs=1e-9)
    assert fit_linear(columns, 2 + 3 * x) == pytest.approx([2, 3])


def test_held_out_points_are_not_seen_by_their_fit():
    group, time = np.repeat(np.arange(10), 3), np.linspace(1, 2, 30)

    def refit(chosen):
        def predict(rows):
            assert not set(rows) & set(chosen)
            assert not set(group[rows]) & set(group[chosen])
            return time[rows] * 1.1

        return predict

    assert held_out_errors(group, time, refit) == pytest.approx(0.1)


def test_parameters_are_rounded_to_what_a_fit_supports():
    assert rounded(0.123456789) == 0.1235
    assert rounded(1e-17) == 0
