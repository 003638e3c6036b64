"""Searches on several kinds of chips, against every plan of a small space."""

from itertools import product

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import make_plan
from perfmodel.verbs.setting import make_job, make_setting

MIX = "2@a100-sxm-80gb+2@h100-sxm-80gb"
JOB = {"model": "gpt3-125m", "global_batch": 8, "seq_len": 1024}


def every_plan(pp, **knobs):
    setting = make_setting(make_job(**JOB), MIX, profile="megatron")
    kernel, layers = setting.estimator.profile.kernels.default_attention, 12
    for cut in product(range(layers + 1), repeat=pp):
        if sum(cut) == layers:
            yield setting.estimator.predict(
                make_plan(
                    setting.job,
                    cluster=setting.reference,
                    num_chips=4,
                    profile=setting.profile,
                    calibration="",
                    attention=kernel,
                    pp=pp,
                    stage_layers=cut,
                    **knobs,
                )
            )


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.slow
def test_the_best_layers_are_those_of_brute_force(pp, micro_batch):
    fixed = {"tp": 1, "cp": 1, "zero": 0, "micro_batch": micro_batch, "recompute": "none", "schedule": "1f1b"}
    order = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
    result = perfmodel.find_plans(**JOB, cluster=MIX, profile="megatron", pp=pp, ties=0.0, order=order, **fixed)
    least = min(prediction.step_time for prediction in every_plan(pp, **fixed, order=order))
    assert result.plans[0].step_time == least


def test_a_search_tries_both_places_of_the_pipeline():
    """Stages on different chips, or replicas."""
    result = perfmodel.find_plans(**JOB, cluster=MIX, profile="megatron", top=50)
    pools = {plan.plan.layout.pp for plan in result.plans}
    assert {1, 2} <= pools
    times = [plan.step_time for plan in result.plans]
    assert times[1:] == sorted(times[1:])
    assert all(plan.fits for plan in result.plans)
    assert result.num_evaluated == result.num_feasible + sum(result.rejected.values())
    assert any("of each kind of chip alone were predicted" in note for note in result.best.warnings)


@pytest.mark.slow
def test_the_mix_is_faster_than_either_kind_alone():
    mix = perfmodel.find_plans(model="llama-3-8b", global_batch=64, seq_len=4096, cluster="8@dgx-h100+8@dgx-a100", profile="megatron")
    for cluster in ("dgx-h100", "dgx-a100"):
        alone = perfmodel.find_plans(model="llama-3-8b", global_batch=64, seq_len=4096, cluster=cluster, chips=8, profile="megatron")
        assert mix.best.step_time < alone.best.step_time


def test_where_nothing_fits_the_smallest_changes_are_listed():
    result = perfmodel.find_plans(model="llama-3-70b", global_batch=8, seq_len=4096, cluster="4@dgx-h100+4@dgx-a100", profile="megatron")
    assert not result.plans
    assert result.least_memory


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("8@dgx-h100", "one pool of chips only"),
        ("8@dgx-h100+0@dgx-a100", "no pool of chips"),
        ("8@dgx-h100+8@nothing", "unknown cluster"),
        ("8@dgx-h100*0+8@dgx-a100", "must be above 0"),
    ],
)
def test_bad_pools_are_refused(cluster, says):
    with pytest.raises(InputError, match=says):
        perfmodel.predict(**JOB, cluster=cluster)
