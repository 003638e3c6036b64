"""Frameworks without expert parallelism get no plans with it."""

import pytest

import perfmodel
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.runnable import not_runnable_reason

JOB = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "chips": 8, "global_batch": 32, "seq_len": 2048}


@pytest.mark.parametrize(("framework", "has"), [("hf-trainer", False), ("unsloth", False), ("verl-fsdp", False), ("torchtitan", True)])
def test_searches_distribute_experts_where_the_framework_does(framework, has):
    result = perfmodel.find_plans(**JOB, profile=framework, top=5)
    assert any(prediction.plan.ep > 1 for prediction in result.plans) is has
    plan = perfmodel.predict(**JOB, ep=8, fsdp=8, profile="torchtitan").plan
    assert (not_runnable_reason(plan, load_profile(framework)) == "") is has
    if not has:
        assert not_runnable_reason(plan, load_profile(framework)) == f"ep=8: {framework} has no ep"


def test_the_best_plan_of_a_trainer_is_exported():
    best = perfmodel.find_plans(**JOB, profile="trl", top=1).plans[0].plan
    assert perfmodel.export_plan(best, to="trl").files


def test_torchtitan_dispatches_tokens_by_all_to_all_or_deepep():
    plans = [prediction.plan for prediction in perfmodel.find_plans(**JOB, profile="torchtitan", top=10).plans]
    assert {str(plan.dispatcher) for plan in plans if plan.ep > 1} == {"flex"}
    best = next(plan for plan in plans if plan.ep > 1)
    assert perfmodel.export_plan(best, to="torchtitan").options["parallelism.expert_parallel_comm_backend"] == "deepep"
    gathered = perfmodel.predict(**JOB, ep=8, fsdp=8, dispatcher="allgather", profile="torchtitan")
    assert gathered.not_runnable == "dispatcher=allgather: torchtitan has alltoall and flex only"
