"""Which plan comes first where the framework may be one of several."""

import pytest

from perfmodel.frameworks.ensemble import WeightedProfile
from perfmodel.frameworks.profile import load_profile
from perfmodel.planner.uniform.search import EXPECTED
from perfmodel.planner.uniform.space import Space
from perfmodel.report.searches import search_object, ties_line
from perfmodel.uncertainty.expected import expected_times
from perfmodel.verbs.setting import make_job, make_setting
from tests.planner.searches import search_plans

SPACE = Space(fixed={"cp": 1})
SLOW = WeightedProfile(weight=1.0, profile=load_profile("generic").having(prefetches_parameters=False, overlaps_gradients=(0, 1)))


@pytest.fixture(scope="module")
def estimator():
    return make_setting(make_job("llama-3-8b", global_batch=64, seq_len=2048), "dgx-h100", chips=64).estimator


def plans(result):
    return [row.plan for row in result.plans]


@pytest.mark.slow
def test_the_plan_that_is_expected_to_be_fastest_comes_first(estimator):
    plain = search_plans(estimator, SPACE, ties=0.01, top=EXPECTED, also=("front",))
    result = search_plans(estimator, SPACE, ties=0.01, top=EXPECTED, also=("front",), ensemble=[SLOW])
    assert plain.plans[0].plan.zero >= 2, "or there are no gathers that may show"
    assert result.plans[0].plan.zero < 2
    assert plain.ranking.expectation is None
    assert result.ranking.expectation is not None
    times = expected_times(estimator, plans(plain)[:EXPECTED], [SLOW])
    assert result.ranking.expectation.best == pytest.approx(times.min())
    assert result.ranking.expectation.first == pytest.approx(times[0])
    others = [plan for plan in plans(plain) if plan != plans(result)[0]]
    assert plans(result)[1:] == others, "the others stay in their order"
    assert result.ranking.places[0] == 1
    assert "plan 1 has the least expected time over the known frameworks" in ties_line(result)
    shown = search_object(result)["expectation"]
    assert shown == {"best": result.ranking.expectation.best, "first": result.ranking.expectation.first}


@pytest.mark.slow
def test_a_plan_that_is_expected_to_be_as_fast_stays(estimator):
    same = WeightedProfile(weight=1.0, profile=load_profile("generic"))
    plain = search_plans(estimator, SPACE, ties=0.01, also=("front",))
    result = search_plans(estimator, SPACE, ties=0.01, also=("front",), ensemble=[same])
    assert result.ranking.expectation is None
    assert plans(result) == plans(plain)
    assert search_object(result)["expectation"] is None


@pytest.mark.slow
def test_the_exact_order_and_memory_are_left_alone(estimator):
    for asked in (dict(ties=0.0), dict(ties=0.01, objective="memory")):
        plain = search_plans(estimator, SPACE, also=("front",), **asked)
        assert plans(search_plans(estimator, SPACE, also=("front",), ensemble=[SLOW], **asked)) == plans(plain)
