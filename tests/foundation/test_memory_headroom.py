"""Whether something fits: by what stays free, and by how likely it is."""

import math

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import (
    DEFAULT_HEADROOM,
    DEFAULT_RISK,
    MemoryUncertainty,
    RankNeed,
    Verdict,
    check_headroom,
    check_risk,
    fit_probability,
    memory_rule,
    outcome_rule,
)

KNOWN = MemoryUncertainty(centre=0.0, scale=0.1)
UNKNOWN = MemoryUncertainty(centre=0.0, scale=0.1, of_unseen=True)


def verdict_of(needed, *, uncertainty=KNOWN, sure=0.0, imbalance=1.0, outside=0.0, extra=0.0, **asked):
    rank = RankNeed(total=needed, sure=sure, outside=outside, imbalance=imbalance, extra=extra)
    return memory_rule(**asked).verdict([rank], 100.0, uncertainty)


@pytest.mark.parametrize(
    ("needed", "headroom", "expected"),
    [
        (90, 0.1, Verdict.FITS),
        (91, 0.1, Verdict.TIGHT),
        (100, 0.1, Verdict.TIGHT),
        (101, 0.1, Verdict.DOES_NOT_FIT),
        (100, 0.0, Verdict.FITS),
        (101, 0.0, Verdict.DOES_NOT_FIT),
        (96, DEFAULT_HEADROOM, Verdict.TIGHT),
    ],
)
@pytest.mark.parametrize("uncertainty", [KNOWN, UNKNOWN])
def test_three_verdicts(needed, headroom, expected, uncertainty):
    assert verdict_of(needed, memory_headroom=headroom, uncertainty=uncertainty) is expected


def test_a_plan_that_fits_does_so_at_a_risk_of_five_percent_unless_something_else_is_asked_for():
    assert DEFAULT_RISK == 0.05
    assert memory_rule() == memory_rule(risk=DEFAULT_RISK)
    assert (verdict_of(74), verdict_of(75)) == (Verdict.FITS, Verdict.TIGHT)
    assert verdict_of(94, memory_headroom=0.01) is Verdict.FITS
    assert verdict_of(94, memory_headroom=0.01, risk=0.05) is Verdict.TIGHT
    assert verdict_of(80, risk=0.2) is Verdict.FITS


def test_the_outcome_of_a_run_is_judged_by_a_headroom_and_of_an_unknown_framework_by_its_likelihood_too():
    def outcome(needed, uncertainty, imbalance=1.0):
        rank = RankNeed(total=needed, sure=0.0, imbalance=imbalance)
        return outcome_rule(uncertainty).verdict([rank], 100.0, uncertainty)

    assert (outcome(94, KNOWN), outcome(94, UNKNOWN)) == (Verdict.FITS, Verdict.TIGHT)
    assert (outcome(80, UNKNOWN), outcome(80, UNKNOWN, 1.25)) == (Verdict.FITS, Verdict.TIGHT)


@pytest.mark.parametrize("risk", [0.5, 0.2, DEFAULT_RISK, 0.05, 0.01])
@pytest.mark.parametrize(("sure", "more"), [(0.0, {}), (40.0, {"outside": 6.0}), (40.0, {"outside": 6.0, "imbalance": 1.5, "extra": 9.0})])
def test_a_risk_is_where_the_probability_is(risk, sure, more):
    uncertainty = MemoryUncertainty(centre=0.03, scale=0.08)
    most = RankNeed(total=0.0, sure=sure, **more).allowed(100.0, memory_rule(risk=risk).ratio(uncertainty))
    rank = RankNeed(total=most, sure=sure, **more)
    assert fit_probability([rank], 100.0, uncertainty) == pytest.approx(1.0 - risk)
    assert rank.at_most(uncertainty.ratio_at(1.0 - risk)) == pytest.approx(100.0)
    assert verdict_of(most * 0.999, risk=risk, uncertainty=uncertainty, sure=sure, **more) is Verdict.FITS
    assert verdict_of(most * 1.001, risk=risk, uncertainty=uncertainty, sure=sure, **more) is not Verdict.FITS


def test_what_is_sure_fits_or_does_not():
    def probability(**need):
        return fit_probability([RankNeed(**need)], 100.0, KNOWN)

    assert probability(total=99.0, sure=99.0) == 1.0
    assert probability(total=101.0, sure=101.0) == 0.0
    assert probability(total=90.0, sure=60.0) < probability(total=90.0, sure=80.0)
    assert KNOWN.probability_below(math.inf) == 1.0
    assert KNOWN.probability_below(-math.inf) == 0.0


def test_the_rank_that_is_nearest_to_the_limit_decides():
    small, full = RankNeed(total=50.0, sure=10.0), RankNeed(total=95.0, sure=10.0)
    assert fit_probability([small, full], 100.0, KNOWN) == fit_probability([full], 100.0, KNOWN)


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan")])
def test_a_headroom_is_a_share(headroom):
    with pytest.raises(InputError, match=r"memory_headroom=.*: must be a share"):
        check_headroom(headroom)


@pytest.mark.parametrize("risk", [0.0, 1.0, -0.1, float("nan")])
def test_a_risk_is_a_probability(risk):
    with pytest.raises(InputError, match=r"risk=.*: must be a probability"):
        check_risk(risk)
