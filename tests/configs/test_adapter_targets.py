"""Modules that adapters are attached to, as frameworks name them."""

import pytest

from perfmodel.configs.adapter_targets import adapter_targets, peft_targets
from perfmodel.parallel.request import Request
from perfmodel.verbs.configs import start_from

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("modules", "model", "expected"),
    [
        (["v_proj", "q_proj"], "llama-3-8b", ["v_proj", "q_proj"]),
        ("q_proj,v_proj", "llama-3-8b", ["q_proj", "v_proj"]),
        ("['q_proj', 'v_proj']", "llama-3-8b", ["q_proj", "v_proj"]),
        ("linear_qkv linear_proj", "llama-3-8b", ATTENTION),
        (["c_attn"], "gpt2", ATTENTION[:3]),
        (["*.self_attn.o_proj", "*up_proj"], "llama-3-8b", ["o_proj", "up_proj"]),
        (r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj", "gemma-3-4b", ["q_proj", "up_proj"]),
        (r".*\.layers\.(3|7)\.self_attn\.(q|k|v|o)_proj", "qwen3-8b", ATTENTION),
        (["down_proj"], "qwen3.5-35b-a3b", ["shared_down_proj"]),  # experts are one parameter, no module
        (["experts.gate_up_proj"], "qwen3.5-35b-a3b", ["experts_up"]),
        (["q_proj"], "qwen3-next-80b-a3b", ["q_proj", "q_gate_proj"]),  # of which q_proj makes both
        (["kv_a_proj_with_mqa"], "deepseek-v3", ["kv_a_proj"]),
        (["q_proj", "visual.merger"], "a model that is not shipped", ["q_proj"]),
    ],
)
def test_names_and_patterns_become_linear_operators(modules, model, expected):
    assert adapter_targets(modules, model) == expected


@pytest.mark.parametrize("modules", ["all-linear", "all", ["*"], "['*_proj']", ["all-linear", "all-router"], ".*"])
def test_all_linear_modules_need_no_names(modules):
    assert adapter_targets(modules, "llama-3-8b") is None


@pytest.mark.parametrize("modules", [["visual.merger"], r"visual\.(merger|blocks)", "(unclosed"])
def test_what_matches_nothing_is_left_to_the_job(modules):
    assert adapter_targets(modules, "llama-3-8b") == ([modules] if isinstance(modules, str) else modules)


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("llama-3.1-8b", ["q_proj", "v_proj"]),
        ("phi-2", ["q_proj", "v_proj", "up_proj", "down_proj"]),
        ("pythia-1.4b", ["q_proj", "k_proj", "v_proj"]),
        ("gpt2", ["q_proj", "k_proj", "v_proj"]),
    ],
)
def test_trl_without_targets_takes_those_of_peft(tmp_path, model, targets):
    path = tmp_path / "sft.yaml"
    lines = [f"model_name_or_path: {model}", "per_device_train_batch_size: 1", "use_peft: true", "packing: true", "max_length: 1024"]
    path.write_text("\n".join(lines))
    plan = start_from(path, Request(cluster="dgx-h100", chips=8)).plan
    assert list(plan.job.train.targets) == targets


def test_a_model_without_a_default_of_peft_has_all():
    assert peft_targets("qwen3-30b-a3b") is None
    assert peft_targets("no-such-model") is None
