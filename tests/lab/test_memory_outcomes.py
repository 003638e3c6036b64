"""The likeliest uncertainty of outcomes, and the calibration of stated probabilities."""

import math

import numpy as np
import pytest

from lab.memory_outcomes import (
    MemoryOutcome,
    likeliest_uncertainty,
    reliability,
    reliability_values,
    uncertainty_over,
    wilson_band,
)
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import MemoryUncertainty, Verdict

TRUE = MemoryUncertainty(centre=0.05, scale=0.1)


def drawn(count, model, seed):
    """Return runs whose needs follow the true uncertainty."""
    numbers = np.random.default_rng(seed)
    rooms = numbers.uniform(-0.6, 0.6, count)
    needs = numbers.logistic(TRUE.centre, TRUE.scale, count)
    return [
        MemoryOutcome(id=f"{model}{i}", model=model, log_headroom=float(headroom), ran=bool(need <= headroom), verdict=Verdict.FITS)
        for i, (headroom, need) in enumerate(zip(rooms, needs, strict=True))
    ]


def test_the_uncertainty_that_made_the_outcomes_is_recovered():
    uncertainty = likeliest_uncertainty(drawn(3000, "a", 1))
    assert (uncertainty.centre, uncertainty.scale) == (pytest.approx(0.05, abs=0.02), pytest.approx(0.1, abs=0.015))
    figures = np.random.default_rng(2).logistic(TRUE.centre, TRUE.scale, 2000).tolist()
    uncertainty = likeliest_uncertainty((), figures)
    assert (uncertainty.centre, uncertainty.scale) == (pytest.approx(0.05, abs=0.01), pytest.approx(0.1, abs=0.01))
    with pytest.raises(InputError, match="none says whether it ran out of memory"):
        likeliest_uncertainty([])


def test_stated_probabilities_that_are_right_happen():
    bins = reliability([*drawn(2000, "a", 3), *drawn(2000, "b", 4)])
    assert len(bins) == 10
    assert max(bucket.error for bucket in bins) < 0.1
    values = reliability_values(bins)
    assert "| 0% to 10% |" in str(values["table"])
    assert values["reliability_runs"] == "4,000"
    assert all(low <= bucket.happened <= high for bucket in bins for low, high in [bucket.band])


def test_the_band_of_a_share_is_wide_where_runs_are_few():
    assert wilson_band(0.0, 6) == pytest.approx((0.0, 0.390), abs=1e-3)  # tables of Wilson's interval
    assert wilson_band(0.5, 10) == pytest.approx((0.237, 0.763), abs=1e-3)
    assert wilson_band(1.0, 1000)[0] > 0.99


def test_a_model_is_judged_by_the_runs_of_the_others():
    biased = [MemoryOutcome(id="x", model="b", log_headroom=0.3, ran=False, verdict=Verdict.FITS)] * 50
    bins = {bucket.low: bucket for bucket in reliability([*drawn(2000, "a", 5), *biased])}
    assert bins[0.9].happened < 0.9


def test_the_uncertainty_of_sources_is_their_difference():
    near, far = MemoryUncertainty(centre=0.0, scale=0.1), MemoryUncertainty(centre=0.4, scale=0.1)
    assert uncertainty_over([near, near], rests_on="x") == MemoryUncertainty(centre=0.0, scale=0.1, rests_on="x")
    both = uncertainty_over([near, far], rests_on="x")
    assert both.centre == 0.2
    assert both.scale**2 * math.pi**2 / 3 == pytest.approx(0.1**2 * math.pi**2 / 3 + 0.2**2, rel=1e-3)
