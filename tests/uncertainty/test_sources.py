"""Shares of a variance, and the cheapest thing that halves it."""

import math

import pytest

from perfmodel.parallel.interval import NORMAL, StepInterval
from perfmodel.uncertainty.sources import REST, SMALLER, TrustAccount, VarianceSource, remedy, uncertainty_sources, variance_of, with_rest

SPREAD = 0.1
INTERVAL = StepInterval(low=math.exp(-NORMAL * SPREAD), high=math.exp(NORMAL * SPREAD), rests_on="runs", num_runs=9)


def variance_source(name, spread):
    return VarianceSource(name=name, variance=spread**2, rests_on="a sheet")


def test_shares_add_up_to_the_interval():
    sources = uncertainty_sources(
        with_rest([variance_source("a", 0.06), variance_source("b", 0.04), variance_source("none", 0.0)], INTERVAL, rests_on="runs")
    )
    assert [source.name for source in sources] == [REST, "a", "b"]
    assert [source.share for source in sources] == pytest.approx([0.48, 0.36, 0.16])
    assert (
        math.sqrt(sum(source.spread**2 for source in sources)) == pytest.approx(math.sqrt(variance_of(INTERVAL))) == pytest.approx(SPREAD)
    )


def test_what_is_known_to_differ_more_than_the_runs_show_has_no_rest():
    """Each is cut by as much, so that they make the interval."""
    sources = uncertainty_sources(
        with_rest([variance_source("a", 0.2), variance_source("b", 0.005), variance_source("c", 0.002)], INTERVAL, rests_on="runs")
    )
    assert math.sqrt(sum(source.spread**2 for source in sources)) == pytest.approx(SPREAD)
    assert [source.name for source in sources] == ["a", SMALLER]
    assert sources[1].rests_on == "2 others, b the largest"
    assert sum(source.share for source in sources) == pytest.approx(1.0)


def test_the_cheapest_measurement_that_halves_is_named_before_what_only_some_can_say():
    def left(share, **more):
        return remedy(f"{share:.0%}", "", left=share, total=1.0, interval=INTERVAL, **more)

    def cheapest(*remedies):
        return TrustAccount(interval=INTERVAL, uncertainties=(), remedies=remedies).cheapest

    small, stated, first, second = left(0.9), left(0.1, is_measured=False), left(0.5), left(0.2)
    assert cheapest(small, stated, first, second) is first
    assert cheapest(small, stated) is stated
    assert cheapest(small, left(0.8)).share_left == 0.8
    assert cheapest() is None
    assert math.log(first.high) == pytest.approx(math.log(INTERVAL.high) * math.sqrt(0.5))
