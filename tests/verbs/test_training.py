"""Objectives of a whole run: the search's columns against single plans, brute force, and bad input."""

from dataclasses import replace

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.request import Request
from perfmodel.planner.result import Objective
from perfmodel.planner.uniform.space import Space
from perfmodel.verbs.requests import make_requests, setting_of_request
from perfmodel.verbs.training import objective_values, read_run
from tests.cost.jobs import sweep_all

JOB = dict(model="gpt2", cluster="dgx-h100", chips=8, global_batch=64, seq_len="1k", profile="megatron")
ASSUME = {"price": 4.0, "failures_per_node_day": 0.5}
VALUE = {"cost": lambda run: run.cost, "energy": lambda run: run.energy, "goodput-time": lambda run: run.wall_days}


@pytest.fixture(scope="module")
def predictions():
    """Every plan of a space, predicted one by one."""
    space = Space(fixed={"cp": 1, "schedule": "1f1b", "virtual_stages": 1, "zero": 1})
    estimator = setting_of_request(make_requests(Request(**JOB))[0]).estimator
    state = sweep_all(estimator, space)
    return [perfmodel.predict(state.plan(int(i))) for i in state.best.time.ids]


@pytest.mark.parametrize("objective", VALUE)
@pytest.mark.slow
def test_the_best_plan_by_an_objective_is_that_of_all_plans_predicted_one_by_one(objective, predictions):
    value = {
        prediction.plan: VALUE[objective](perfmodel.estimate_run(prediction, "1T", assume=ASSUME))
        for prediction in predictions
        if prediction.fits
    }
    search = perfmodel.find_plans(
        **JOB, cp=1, schedule="1f1b", virtual_stages=1, zero=1, objective=objective, tokens="1T", assume=ASSUME, ties=0, top=5
    )
    assert len(value) > 50
    assert search.ranking.values[0] == pytest.approx(min(value.values()), rel=1e-9)
    assert list(search.ranking.values) == sorted(search.ranking.values)
    assert [value[plan.plan] for plan in search.plans if plan.plan in value] == pytest.approx(
        [v for plan, v in zip(search.plans, search.ranking.values, strict=True) if plan.plan in value], rel=1e-9
    )


@pytest.mark.parametrize("objective", VALUE)
def test_columns_are_the_totals_of_single_runs(objective, predictions):
    setting = setting_of_request(make_requests(Request(**JOB))[0])
    values = objective_values(Objective(objective), setting, predictions, read_run("1T", ASSUME))
    singles = [VALUE[objective](perfmodel.estimate_run(prediction, "1T", assume=ASSUME)) for prediction in predictions]
    assert values == pytest.approx(singles, rel=1e-12)
    ordered = sorted(range(len(values)), key=lambda index: predictions[index].step_time)
    assert [values[index] for index in ordered] == sorted(values)


def test_a_search_by_time_has_no_values():
    assert perfmodel.find_plans(**JOB, tp=1, pp=1, tokens="1T").ranking.values == ()


def test_the_price_of_one_cluster_is_not_that_of_another():
    plans = [perfmodel.predict(**{**JOB, "cluster": name}) for name in ("dgx-h100", "dgx-b200")]
    runs = [perfmodel.estimate_run(plan, "1T", assume={"price": 1.0, "price.dgx-b200": 4.0}) for plan in plans]
    assert [run.cost / run.chip_hours for run in runs] == pytest.approx([1.0, 4.0])
    by_chip = perfmodel.estimate_run(plans[0], "1T", assume={"price.h100-sxm-80gb": 2.5})
    assert by_chip.cost / by_chip.chip_hours == pytest.approx(2.5)


def test_an_objective_of_a_run_needs_what_it_counts():
    setting = setting_of_request(make_requests(Request(**JOB))[0])
    with pytest.raises(InputError, match="objective=cost: is of the whole run; give its tokens, as --tokens 15T"):
        perfmodel.find_plans(**JOB, objective="cost")
    with pytest.raises(InputError, match=r"assume=.*: is for the whole run; give its tokens"):
        perfmodel.find_plans(**JOB, assume={"price": 2})
    unknown = replace(setting.cluster, chip=replace(setting.cluster.chip, price_per_hour=0.0, tdp_watts=0.0))
    for objective, sentence in (("cost", "no price of h100-sxm-80gb is known; give one"), ("energy", "the power of h100-sxm-80gb is not")):
        with pytest.raises(InputError, match=sentence):
            perfmodel.find_plans(**{**JOB, "cluster": unknown}, objective=objective, tokens="1T")
    with pytest.raises(InputError, match=r"price\.dgx-b20: dgx-b20 is no cluster and no chip; did you mean 'dgx-b200'"):
        read_run("1T", {"price.dgx-b20": 3})
