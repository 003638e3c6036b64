"""Frameworks that run a plan for which none was given."""

from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.verbs.exporting import runs_in
from perfmodel.verbs.requests import make_requests, setting_of_request
from perfmodel.verbs.setting import plan_in


def test_plans_without_a_framework_name_those_that_run_them():
    job = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 16, "global_batch": 64, "seq_len": 4096}

    def running(**words):
        asked = Request(**job | {name: words.pop(name) for name in ("train", "profile") if name in words})
        setting = setting_of_request(make_requests(asked)[0])
        return runs_in(setting, plan_in(setting, Knobs(**words)))

    assert running(tp=2, profile="megatron") is None
    assert {"megatron", "torchtitan", "nanotron"} <= set(running(tp=2))
    assert set(running(tp=2, train="lora:16")) == {"swift-megatron", "megatron-bridge"}
    assert "megatron" not in running(zero=3)
    assert "deepspeed" in running(zero=3)
    assert running(zero=3, pp=2, dp_shard=2, dp_replicate=4, schedule="gpipe", rules="ulysses", cp=1) == ()
