"""Clusters and numbers of chips under a deadline and a budget."""

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.planner.sizing import size_runs
from perfmodel.verbs.sizing import read_budget, read_deadline

JOB = dict(model="gpt2", global_batch=64, seq_len="1k", profile="megatron", tp=1, pp=1, cp=1)
RUN = dict(JOB, cluster=["dgx-h100", "dgx-b200"], chips="8..32", tokens="1T")


@cache
def all_runs():
    return perfmodel.size_cluster(**RUN, ties=0)


@pytest.fixture
def sized():
    return all_runs()


def costs(runs):
    return [(sized_run.wall_time, sized_run.run.cost) for sized_run in runs]


def test_each_run_has_the_best_plan_of_a_search_of_its_own(sized):
    assert [(sized_run.cluster, sized_run.num_chips) for sized_run in sized.runs if sized_run.cluster == "dgx-h100"] == [
        ("dgx-h100", chips) for chips in (32, 16, 8)
    ]
    for sized_run in sized.runs:
        alone = perfmodel.find_plans(
            **JOB, cluster=sized_run.cluster, chips=sized_run.num_chips, objective="cost", tokens="1T", ties=0, any_framework=False
        )
        assert sized_run.prediction.step_time == alone.plans[0].step_time
        assert sized_run.run.cost == pytest.approx(alone.ranking.values[0])


def test_the_front_is_what_no_run_beats_by_brute_force(sized):
    beaten = [
        any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in costs(sized.runs)) for point in costs(sized.runs)
    ]
    assert costs(sized.front) == [point for point, is_beaten in zip(costs(sized.runs), beaten, strict=True) if not is_beaten]


@given(
    points=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    deadline=st.integers(1, 30),
    budget=st.integers(1, 30),
)
def test_marks_are_those_of_all_runs_not_of_the_front_alone(points, deadline, budget):
    one = all_runs().runs[0]
    runs = [replace(one, run=replace(one.run, wall_days=float(days), cost=float(cost))) for days, cost in points]
    sizing = size_runs(runs, deadline=86400.0 * deadline, budget=float(budget))
    in_time, within = [[p for p in points if p[at] <= limit] for at, limit in ((0, deadline), (1, budget))]
    assert (sizing.cheapest.run.cost if sizing.cheapest else None) == min((p[1] for p in in_time), default=None)
    assert (sizing.fastest.run.wall_days if sizing.fastest else None) == min((p[0] for p in within), default=None)
    both = [p for p in in_time if p in within]
    assert (sizing.best.run.cost if sizing.best else None) == min((p[1] for p in both), default=None)
    nearest = min(max(p[0] / deadline, p[1] / budget) for p in points)
    assert max(sizing.nearest.run.wall_days / deadline, sizing.nearest.run.cost / budget) == pytest.approx(nearest)


def test_a_deadline_and_a_budget_that_nothing_meets_name_the_nearest():
    sizing = perfmodel.size_cluster(**{**RUN, "cluster": "dgx-h100", "chips": [8, 16]}, by="1d", budget=100)
    assert sizing.best is sizing.cheapest is sizing.fastest is None
    assert sizing.reason.startswith("none of 2 runs trains 1T tokens in 1 days for 100 USD; the nearest is 8 chips of dgx-h100: ")
    assert f"{sizing.nearest.run.wall_days:,.1f} days, {sizing.nearest.run.cost:,.0f} USD" in sizing.reason


def test_without_chips_powers_of_two_times_a_node_are_tried_until_a_run_is_twice_too_late():
    sizing = perfmodel.size_cluster(**JOB, cluster="dgx-h100", tokens="10T", by="40d")
    tried = [sized_run.num_chips for sized_run in sizing.runs]
    assert tried == [tried[0] // 2**power for power in range(len(tried))]
    assert all(sized_run.wall_time <= 2 * 40 * 86400 for sized_run in sizing.runs[:-1])
    assert sizing.runs[-1].wall_time > 2 * 40 * 86400 or sizing.runs[-1].num_chips == 8
    assert sizing.notes == (f"chips: not given; {tried[-1]:,} to {tried[0]:,}, powers of two times a node",)


def test_the_user_s_price_decides():
    cheap = perfmodel.size_cluster(**RUN, by="1000d", assume={"price.dgx-b200": 0.1})
    dear = perfmodel.size_cluster(**RUN, by="1000d", assume={"price.dgx-b200": 100})
    assert (cheap.cheapest.cluster, dear.cheapest.cluster) == ("dgx-b200", "dgx-h100")


def test_a_number_of_chips_without_a_plan_is_not_sized():
    sizing = perfmodel.size_cluster(**{**RUN, "cluster": "dgx-h100", "chips": [8, 20]})
    assert [sized_run.num_chips for sized_run in sizing.runs] == [8]
    assert [case.asked["chips"] for case in sizing.not_sized] == [20]


def test_it_prints_its_front_and_makes_a_data_frame(sized):
    assert str(sized).startswith("6 runs; the front of time and cost:\n32 chips of dgx-b200: ")
    assert list(sized.to_frame()["chips"]) == [sized_run.num_chips for sized_run in sized.runs]


def test_an_interrupted_sizing_keeps_the_runs_so_far():
    sizing = perfmodel.size_cluster(**RUN, progress=lambda done: done > 0.3)
    assert sizing.interrupted
    assert 1 <= len(sizing.runs) < 6


@pytest.mark.parametrize(
    "read, value, expected",
    [
        (read_deadline, "30d", 30 * 86400),
        (read_deadline, 30, 30 * 86400),
        (read_deadline, "1.5", 1.5 * 86400),
        (read_deadline, "36 h", 129600),
        (read_deadline, None, math.inf),
        (read_budget, "2M", 2e6),
        (read_budget, "$2.5m", 2.5e6),
        (read_budget, "250k USD", 2.5e5),
        (read_budget, 5, 5),
        (read_budget, None, math.inf),
    ],
)
def test_deadlines_and_budgets_are_read_as_people_write_them(read, value, expected):
    assert read(value) == pytest.approx(expected)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ({"by": "soon"}, r"by=soon: must be a time above 0; write 30d"),
        ({"by": 0}, "by=0: must be a time above 0"),
        ({"budget": "2X"}, r"budget=2X: must be a cost above 0; write 2M or 250k \(USD\)"),
        ({"budget": -1}, "budget=-1: must be a cost above 0"),
        ({"tokens": "many"}, "tokens='many'"),
        ({"cluster": ["dgx-h100", "dgx-h1000"]}, "dgx-h1000"),
        ({"chips": "32..8"}, r"chips=32..8: must be two numbers, the smaller first; write 256..2048"),
        ({"chips": 20}, "chips"),
        ({"assume": {"failures_per_node_day": "100/day", "restart_time": "1e6 s"}}, "chips=8: it fails before it makes progress"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence):
    with pytest.raises(InputError, match=sentence):
        perfmodel.size_cluster(**{**RUN, "cluster": "dgx-h100", **words})
