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
    return {each.parameter: each for each in sensitivities(setting.estimator, plan, most=most)}


def test_faster_parts_shorten_the_step_and_slower_ones_lengthen_it():
    found = named(tp=4, pp=2, micro_batch=1, profile="nanotron")
    for name, each in found.items():
        if name.startswith(("rate", "memory bandwidth", "link bandwidth", "tensor-parallel communication that hides")):
            assert each.change < 0, name
        else:
            assert each.change > 0, name
        assert abs(each.change) <= STEP + 1e-9, name


def test_the_largest_is_first_and_three_are_named():
    changes = [abs(each.change) for each in named().values()]
    assert changes == sorted(changes, reverse=True)
    assert len(named(most=3)) == 3


def test_one_chip_hangs_on_no_link():
    found = named(model="gpt2", seq_len=1024, chips=1, cluster="dgx-a100")
    assert not [name for name in found if name.startswith("link")]
    assert "rate of matrix multiplies (sustained clock)" in found


def test_a_step_constant_is_its_share_of_the_step():
    setting = make_setting(make_job("gpt2", global_batch=8, seq_len=1024), "dgx-h100", chips=8)
    plan = plan_in(setting, Knobs())
    (constant,) = [each for each in sensitivities(setting.estimator, plan, most=20) if each.parameter == "step constant"]
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
    for each in fields(getattr(setting.estimator.profile, group)):
        own = setting.estimator.profile.option(each.name)
        if isinstance(own, float):
            # shares stay shares, factors grow
            profile = setting.estimator.profile.having(**{each.name: own / 2 if own < 1.0 else own * 1.5})
            anew = make_setting(setting.estimator.job, "dgx-h100", chips=64, profile=profile).estimator.predict(plan).step_time
            swapped = setting.estimator.predict(plan).step_time * exp(log_change(setting.estimator, plan, profile))
            assert swapped == pytest.approx(anew, rel=1e-9), each.name
