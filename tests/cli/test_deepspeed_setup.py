"""A DeepSpeed configuration: its attention, its offloads, and advice that can be written."""

import json

import pytest

JOB = ("--cluster", "aws-p4d", "--chips", 16, "--model", "llama-2-13b", "--seq-len", 4096)


@pytest.fixture
def config(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**batch, "zero_optimization": zero}))
    return path


def test_a_deepspeed_configuration_has_the_attention_of_transformers(call_json, config):
    """The profile's unfused attention is that of Megatron-DeepSpeed."""
    assert call_json("predict", config, *JOB)["plan"]["attention"] == "flash"
    assert call_json("search", config, *JOB, "--top", 1)["plans"][0]["plan"]["attention"] == "flash"


def test_advice_drops_offloads_that_a_better_plan_does_not_need(call_json, config):
    advice = call_json("advise", config, *JOB)
    assert advice["best"]["step_time"] < 0.8 * advice["current"]["step_time"]
    options = {change["option"]: change["after"] for change in advice["options"]}
    assert options["zero_optimization.offload_optimizer.device"] is None
    assert options["zero_optimization.offload_param.device"] is None
    assert options["gradient_checkpointing"] is True, "an argument of the script, not of the JSON"
    assert not any("mics" in option for option in options)


@pytest.mark.parametrize("chips", [1, 16])
def test_offloaded_parameters_need_zero_3_on_several_chips(call_json, chips):
    job = ("--cluster", "aws-p4d", "--chips", chips, "--model", "llama-2-7b", "--seq-len", 2048, "--global-batch", 32)
    plans = call_json("search", *job, "--profile", "deepspeed", "--offload", "optimizer,parameters")["plans"]
    assert {plan["plan"]["zero"] for plan in plans} == {3 if chips > 1 else 0}


def test_a_plan_whose_parameters_cannot_be_offloaded_says_so(call):
    job = ("--cluster", "aws-p4d", "--chips", 16, "--model", "llama-2-7b", "--seq-len", 2048, "--global-batch", 32)
    _, out, _ = call("predict", *job, "--profile", "deepspeed", "--offload", "parameters", "--dp-shard", 16, "--zero", 1)
    assert "zero=1: deepspeed offloads parameters with ZeRO 3 only" in " ".join(out.split())
