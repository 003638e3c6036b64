"""Constants of a framework from made-up steps: planted ones come back, few runs hardly move them."""

import numpy as np
import pytest

from lab.fit_profiles import fit_constants
from perfmodel.foundation.errors import InputError
from perfmodel.uncertainty.priors import Constant

CLOCK = Constant(name="clock", prior=0.9, spread=0.1, lower=0.4, upper=1.0)
HOST = Constant(name="host", prior=3e-3, spread=0.5, lower=1e-4, upper=3e-2)
SHARE = Constant(name="share", prior=0.5, spread=0.3, lower=0.0, upper=1.0, is_ratio=False)


def steps(values, work, launches, wire):
    """Compute at a clock or the host's floor, whichever is longer, and a share of the wire. [s]"""
    return np.maximum(work / values["clock"], launches * values["host"]) + values["share"] * wire


def made_up(num_runs, planted, *, noise=0.0):
    random = np.random.default_rng(7)
    work, launches, wire = random.uniform(0.1, 2, num_runs), random.uniform(1, 400, num_runs), random.uniform(0, 1, num_runs)
    measured = steps(planted, work, launches, wire) * np.exp(noise * random.standard_normal(num_runs))
    return measured, lambda values: np.log(steps(values, work, launches, wire) / measured)


def test_planted_constants_come_back():
    planted = {"clock": 0.7, "host": 4.5e-3, "share": 0.9}
    _, log_errors = made_up(300, planted, noise=0.02)
    fit = fit_constants(log_errors, (CLOCK, HOST, SHARE), num_runs=300)
    for name, value in planted.items():
        assert fit.values[name] == pytest.approx(value, rel=0.03)
    assert fit.mean_error < 0.02
    assert fit.num_runs == 300


def test_a_few_runs_that_are_far_off_do_not_decide():
    planted = {"clock": 0.7, "host": 4.5e-3, "share": 0.9}
    _, log_errors = made_up(200, planted)
    broken = np.where(np.arange(200) % 20 == 0, -1.0, 0.0)  # one run in twenty took 2.7 times as long
    fit = fit_constants(lambda values: log_errors(values) + broken, (CLOCK, HOST, SHARE), num_runs=200)
    assert fit.values["clock"] == pytest.approx(0.7, rel=0.02)


def test_without_runs_the_priors_hold():
    fit = fit_constants(lambda values: np.empty(0), (CLOCK, HOST, SHARE), num_runs=0)
    assert fit.values == {"clock": 0.9, "host": 3e-3, "share": 0.5}
    assert np.isnan(fit.mean_error)


def test_the_fewer_the_runs_the_nearer_to_the_prior():
    """One run that alone would want a clock of .45 moves it less than two hundred do."""

    def clock(num_runs):
        return fit_constants(lambda values: np.full(num_runs, np.log(0.45 / values["clock"])), (CLOCK,), num_runs=num_runs).values["clock"]

    assert 0.45 < clock(200) < clock(3) < clock(1) < 0.9
    assert clock(200) == pytest.approx(0.45, rel=0.03)


def test_constants_stay_within_what_is_possible():
    fit = fit_constants(lambda values: np.full(100, np.log(2.0 / values["clock"])), (CLOCK,), num_runs=100)
    assert fit.values["clock"] <= 1.0
    assert fit.values["clock"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(prior=2.0), "clock: prior=2.0: must lie in 0.4..1.0"),
        (dict(spread=0.0), "clock: spread=0.0: must be positive"),
        (dict(lower=0.0), "clock: lower=0.0: must be positive where"),
    ],
)
def test_a_constant_that_cannot_be_fitted_is_refused(change, rule):
    with pytest.raises(InputError, match=rule):
        Constant(**(dict(name="clock", prior=0.9, spread=0.1, lower=0.4, upper=1.0) | change))
