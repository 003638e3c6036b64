"""Expected times: of one profile its prediction, of several their weighted mean."""

import pytest

from perfmodel.frameworks.ensemble import WeightedProfile, framework_ensemble
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.knobs import Knobs
from perfmodel.uncertainty.expected import expected_times
from perfmodel.verbs.setting import make_job, make_setting, plan_in

JOB = dict(global_batch=256, seq_len=4096)
KNOBS = [dict(tp=8), dict(tp=8, zero=1), dict(tp=4, pp=2, micro_batch=2), dict(zero=3, recompute="full")]


def setting(profile="generic"):
    return make_setting(make_job("llama-3-8b", **JOB), "dgx-h100", chips=64, profile=profile)


def plans_of(setting_of):
    return [plan_in(setting_of, Knobs(**knobs)) for knobs in KNOBS]


@pytest.mark.parametrize("name", ["megatron", "nanotron", "composer-fsdp", "torchtitan", "deepspeed"])
def test_of_one_framework_it_is_the_prediction_with_that(name):
    """Whatever profile the estimator has, and whatever of its programs is used again."""
    unknown, known = setting(), setting(name)
    times = expected_times(unknown.estimator, plans_of(unknown), [WeightedProfile(weight=1.0, profile=load_profile(name))])
    assert times == pytest.approx([known.estimator.predict(plan).step_time for plan in plans_of(unknown)], rel=1e-9)


def test_of_several_it_is_their_mean():
    unknown_setting = setting()
    estimator, plans = unknown_setting.estimator, plans_of(unknown_setting)
    ensemble = framework_ensemble(estimator.profile)
    times_by_profile = [expected_times(estimator, plans, [WeightedProfile(weight=1.0, profile=one.profile)]) for one in ensemble]
    mean = sum(one.weight * times for one, times in zip(ensemble, times_by_profile, strict=True))
    assert expected_times(estimator, plans, ensemble) == pytest.approx(mean)
