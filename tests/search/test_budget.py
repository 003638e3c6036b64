"""Searches count work: load changes nothing. Seconds count where a user asked for them."""

import itertools
import time

import numpy as np
import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.search import Budget, OutOfBudget, eliminate, eliminate_within, partition_chain


def problem():
    rng = np.random.default_rng(1)
    costs, weights = [rng.random(8) for _ in range(24)], [rng.random(8) for _ in range(24)]
    return costs, [(u, u + step, rng.random((8, 8))) for step in (1, 2, 5) for u in range(24 - step)], weights


def answers():
    costs, edges, weights = problem()
    times = [matrix for _, _, matrix in edges[:12]]
    return (
        eliminate(costs, edges, memory_limit=1e4, budget=Budget(3e7)),
        eliminate_within(costs, edges, weights, 8.0, budget=Budget(5e7)),
        partition_chain(times, num_stages=3, num_microbatches=4, held=times, limits=[1.5] * 3, budget=Budget(2e7)),
    )


def test_a_slow_clock_changes_nothing(monkeypatch):
    before = answers()
    assert any(solution.cut_off == "work limit" for solution in before)
    seconds = itertools.count(step=1000.0)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: next(seconds))
    assert answers() == before


def test_a_time_limit_is_a_wish_of_the_user(monkeypatch):
    costs, edges, weights = problem()
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    solution = eliminate_within(costs, edges, weights, 8.0, budget=Budget(time_limit=3.0))
    assert solution.cut_off == "time limit"
    assert solution.gap > 0


def test_parts_count_for_the_whole():
    budget = Budget(100.0)
    part = budget.part(10.0)
    part.spend(30.0)
    assert (part.is_spent, budget.is_spent, budget.left) == (True, False, 70.0)
    assert (part.spent, budget.spent) == ("work limit", "")
    assert isinstance(part.ran_out("nothing"), OutOfBudget)


@pytest.mark.parametrize(
    ("given", "sentence"), [((0.0, 1.0), "work_limit=0"), ((1.0, -1.0), "time_limit=-1"), ((1.0, float("nan")), "time")]
)
def test_limits_are_positive(given, sentence):
    with pytest.raises(InputError, match=f"{sentence}.*must be positive"):
        Budget(given[0], time_limit=given[1])
