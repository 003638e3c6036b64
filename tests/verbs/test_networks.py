"""Plans of `shard` through the verbs that take any plan."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan_file import write_plan


@pytest.fixture(scope="module")
def plan():
    return perfmodel.shard_network("alexnet", cluster="dgx-a100", chips=4, batch=64).best.plan


def test_a_plan_of_shard_is_predicted_like_any_plan(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.yaml")
    prediction = perfmodel.predict(tmp_path / "plan.yaml")
    assert prediction == perfmodel.predict_network_plan(plan)
    both = perfmodel.predict(plan, cluster=["dgx-a100", "dgx-h100"])
    assert both[0].step_time == prediction.step_time > both[1].step_time


@pytest.mark.parametrize("given", [{"tp": 2}, {"seq_len": 8192}, {"chips": 8}])
def test_what_the_plan_decides_is_refused(given, plan):
    (name,) = given
    with pytest.raises(InputError, match=f"{name}={given[name]}: is fixed by a plan of `perfmodel shard`"):
        perfmodel.predict(plan, **given)


def test_one_profile_at_a_time(plan):
    with pytest.raises(InputError, match="takes one value"):
        perfmodel.predict(plan, profile=["megatron", "generic"])
