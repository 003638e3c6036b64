"""Sensitivities: signs, order, and that they are what a changed parameter does."""

from dataclasses import fields
from math import exp

import pytest

from perfmodel.parallel.knobs import Knobs
from perfmodel.uncertainty.sensitivity import STEP, log_change, sensitivities
from perfmodel.verbs.setting import make_job, make_setting, plan_in

JOB = dict(global_batch=128, seq_len=4096)


def named(most=20, *, model="llama-3-8b", cluster="dgx-h100", chips=64, seq_len=4096, profile=None, **knobs):
    setting = make_setting(make_job(model, global_batch=128, seq_len=seq_len), cluster, chips=chips, profile=profile)
    plan = plan_in(setting, Knobs(**knobs))
    return {sensitivity.parameter: sensitivity for sensitivity in sensitivities(setting.estimator, plan, most=most)}


def test_faster_parts_shorten_the_step_and_slower_ones_lengthen_it():
    by_parameter = named(tp=4, pp=2, micro_batch=1, profile="nanotron")
    for name, sensitivity in by_parameter.items():
        if name.startswith(("rate", "memory bandwidth", "link bandwidth", "tensor-parallel communication that hides")):
            assert sensitivity.change < 0, name
        else:
            assert sensitivity.change > 0, name
        assert abs(sensitivity.change) <= STEP + 1e-9, name


def test_the_largest_is_first_and_three_are_named():
    changes = [abs(sensitivity.change) for sensitivity in named().values()]
    assert changes == sorted(changes, reverse=True)
    assert len(named(most=3)) == 3


def test_one_chip_depends_on_no_link():
    by_parameter = named(model="gpt2", seq_len=1024, chips=1, cluster="dgx-a100")
    assert not [name for name in by_parameter if name.startswith("link")]
    assert "rate of matrix multiplies (sustained clock)" in by_parameter


def test_a_step_constant_is_its_share_of_the_step():
    setting = make_setting(make_job("gpt2", global_batch=8, seq_len=1024), "dgx-h100", chips=8)
    plan = plan_in(setting, Knobs())
    (constant,) = [
        sensitivity for sensitivity in sensitivities(setting.estimator, plan, most=20) if sensitivity.parameter == "step constant"
    ]
    share = setting.estimator.profile.timing.step_time_constant / setting.estimator.predict(plan).step_time
    assert constant.change == pytest.approx(STEP * share, rel=1e-6)
    assert constant.rests_on == "profile: generic"


def test_the_estimator_is_left_as_it_was():
    setting = make_setting(make_job("llama-3-8b", **JOB), "dgx-h100", chips=64)
    plan = plan_in(setting, Knobs(tp=8))
    before = setting.estimator.predict(plan).step_time
    sensitivities(setting.estimator, plan)
    assert setting.estimator.predict(plan).step_time == before


@pytest.mark.parametrize("group", ["kernels", "state", "communication", "timing"])
def test_another_profile_in_place_is_what_an_estimator_made_with_it_predicts(group):
    setting = make_setting(make_job("llama-3-8b", **JOB), "dgx-h100", chips=64)
    plan = plan_in(setting, Knobs(tp=2, pp=2, zero=1))
    for option in fields(getattr(setting.estimator.profile, group)):
        value = setting.estimator.profile.option(option.name)
        if isinstance(value, float):
            # shares stay shares, factors grow
            profile = setting.estimator.profile.having(**{option.name: value / 2 if value < 1.0 else value * 1.5})
            anew = make_setting(setting.estimator.job, "dgx-h100", chips=64, profile=profile).estimator.predict(plan).step_time
            swapped = setting.estimator.predict(plan).step_time * exp(log_change(setting.estimator, plan, profile))
            assert swapped == pytest.approx(anew, rel=1e-9), option.name
