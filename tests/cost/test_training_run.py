"""Failures, checkpoints, energy and cost around steps that are predicted already."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel
from perfmodel.cost.training_run import checkpoint_bytes, daly_interval, goodput, poisson_quantile, training_run
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.assumptions import load_assumptions
from tests.cost.jobs import make_job

RUN = dict(tokens=1e12, days=50.0, num_chips=1024, checkpoint_bytes=1e12, chip_watts=700.0, price_per_hour=2.0)


def run(**changes):
    assumptions = load_assumptions().with_given(changes.pop("assume", {}))
    return training_run(**(RUN | changes), assumptions=assumptions)


@pytest.mark.parametrize(
    "stall, mtbf, restart, interval, waste",
    [(60, 8400, 0, 964, 11.5), (20, 10800, 0, 644, 6.0), (30, 6480, 0, 604, 9.3), (10, 6480, 0, 353, 5.5), (5, 11136, 600, 330, 8.1)],
)
def test_intervals_and_waste_are_those_of_daly(stall, mtbf, restart, interval, waste):
    """Rows worked out from Daly's formulas; the last has the rates of Llama 3 on 16,384 chips."""
    best = daly_interval(stall=stall, mtbf=mtbf)
    assert best == pytest.approx(interval, abs=0.5)
    assert 100 * (1 - goodput(interval=best, stall=stall, restart=restart, mtbf=mtbf)) == pytest.approx(waste, abs=0.05)


@given(stall=st.floats(0.1, 600), mtbf=st.floats(3600, 1e7), restart=st.floats(0, 1800))
def test_no_other_interval_has_a_clearly_better_goodput(stall, mtbf, restart):
    best = daly_interval(stall=stall, mtbf=mtbf)
    highest = goodput(interval=best, stall=stall, restart=restart, mtbf=mtbf)
    others = [goodput(interval=best * factor, stall=stall, restart=restart, mtbf=mtbf) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert 0 < highest <= 1
    assert max(others) <= highest * 1.001


def test_a_job_that_fails_all_the_time_makes_no_progress():
    assert goodput(interval=1e4, stall=1e4, restart=1e5, mtbf=1.0) == 0.0
    assert math.isinf(run(num_chips=10**7, assume={"restart_time": 1e6}).wall_days)


def test_spare_nodes_are_a_quantile_of_the_failures():
    assert poisson_quantile(0.0, 0.95) == 0
    assert poisson_quantile(1.0, 0.95) == 3  # 0.368 + 0.368 + 0.184 + 0.061
    assert poisson_quantile(1000.0, 0.95) == pytest.approx(1000 + 1.645 * math.sqrt(1000), abs=1.5)
    assert run(num_chips=8).spare_nodes <= 1


def test_parts_of_a_run_follow_from_its_wall_time():
    training = run()
    assert training.wall_days == pytest.approx(training.days / training.goodput)
    assert training.chip_hours == pytest.approx(training.wall_days * 24 * 1024)
    assert training.cost == pytest.approx(2.0 * training.chip_hours)
    assert training.failures == pytest.approx(training.wall_days * 86400 / training.mtbf)
    assert training.carbon == pytest.approx(training.energy / 3.6e6 * 0.481)


def test_more_failures_cost_time_and_nothing_else_changes_the_steps():
    few, many = (run(assume={"failures_per_node_day": rate}) for rate in (1e-4, 1e-1))
    assert few.days == many.days
    assert few.goodput > many.goodput
    assert few.checkpoint_interval > many.checkpoint_interval


def test_a_checkpoint_is_written_before_the_next_begins():
    slow = run(assume={"storage_bandwidth": 0.01})
    assert slow.checkpoint_interval == slow.checkpoint_write == pytest.approx(1e5)


def test_a_checkpoint_holds_fourteen_bytes_of_a_parameter_with_adamw_in_bf16_mixed():
    job = make_job()
    assert checkpoint_bytes(job) == 14 * job.transformer.num_parameters
    assert checkpoint_bytes(replace(job, precision=perfmodel.Precision.FP32)) == 12 * job.transformer.num_parameters
    assert checkpoint_bytes(job, stores_master=True) == 12 * job.transformer.num_parameters


def test_what_is_not_known_is_not_made_up():
    training = run(chip_watts=0.0, price_per_hour=0.0)
    assert (training.energy, training.carbon, training.cost) == (0.0, 0.0, 0.0)
    assert run(price_per_hour=0.0, assume={"price": 3.0}).cost == pytest.approx(3.0 * run().chip_hours)


@pytest.mark.parametrize(
    "assume, sentence",
    [
        ({"pew": 1}, "assume=pew: is no assumption; did you mean 'pue'"),
        ({"location": "mars"}, "assume location=mars: has no carbon intensity; use world"),
        ({"pue": "much"}, "assume pue=much: must be a number above 0"),
        ({"pue": -1}, "must be a number above 0"),
        ({"power_utilization": 2}, "is a share of a whole, at most 1"),
    ],
)
def test_a_wrong_assumption_is_refused(assume, sentence):
    with pytest.raises(InputError, match=sentence):
        run(assume=assume)


def test_every_constant_has_a_source_and_lies_in_its_published_range():
    for assumption in perfmodel.list_assumptions():
        assert assumption.low <= assumption.value <= assumption.high, assumption.name
        assert assumption.source
        assert assumption.means
        assert assumption.date
