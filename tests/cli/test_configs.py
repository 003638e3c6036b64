"""`predict CONFIG`, `export` and `advise` on the command line."""

import ast
import json
from pathlib import Path

import pytest

from tests.cli.conftest import joined

CASES = Path(__file__).parents[1] / "golden" / "configs"
SMALL = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 2048
odd_key = 3
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "full"
"""
#: What the file leaves to the user.
PLACE = ("--cluster", "dgx-h100", "--chips", 8)


@pytest.fixture
def result(call):
    """Return the object that a verb prints; a slow machine may show progress on standard error."""

    def run(*arguments: object) -> dict:
        code, out, err = call(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(SMALL)
    return path


def test_a_configuration_is_predicted_like_its_plan(result, config):
    prediction = result("predict", config, *PLACE)
    same = result(
        "predict", "--model", "llama-3-8b", *PLACE, "--global-batch", 16, "--seq-len", 2048, "--zero", 3, "--recompute", "full",
        "--profile", "torchtitan",
    )  # fmt: skip
    assert prediction["step_time"] == same["step_time"]
    assert prediction["memory"] == same["memory"]
    assert prediction["config"]["framework"] == "torchtitan"
    assert prediction["config"]["read"]["training.seq_len"] == "seq_len"
    assert prediction["config"]["ignored"] == ["training.odd_key"]


def test_flags_override_the_configuration(call, result, config):
    plan = result("predict", config, *PLACE, "--tp", 2, "--seq-len", 4096)["plan"]
    assert (plan["layout"]["tp"], plan["layout"]["dp_shard"], plan["job"]["seq_len"]) == (2, 4, 4096)
    code, out, _ = call("predict", config, *PLACE, "--tp", 2)
    assert code == 0
    assert "tp 2 (the file: 1)" in joined(out)


def test_what_is_missing_is_asked_for_by_its_flag(call, config):
    code, out, err = call("predict", config)
    assert (code, out) == (2, "")
    assert "--cluster, --chips: missing in the file; add them as flags" in joined(err)
    code, out, err = call("predict", CASES / "02-megatron-lm-moe" / "run_moe.sh", "--cluster", "dgx-h100")
    assert (code, out) == (2, "")
    assert "--model: missing in the file; add it as a flag" in joined(err)


def test_keys_that_are_not_read_are_listed(call, config):
    _, out, _ = call("predict", config, *PLACE)
    assert "keys that are not read: training.odd_key" in joined(out)


@pytest.mark.slow
def test_search_limits_and_explain_take_a_configuration(result, config):
    assert result("search", config, *PLACE, "--top", 1)["plans"][0]["plan"]["profile"] == "torchtitan"
    assert result("limits", config, *PLACE)["seq_len"] == 2048
    assert result("explain", config, *PLACE)["config"]["framework"] == "torchtitan"


def test_serve_takes_a_launch_line(result):
    line = CASES / "22-vllm-dense" / "serve.sh"
    plan = result("serve", line, "--cluster", "dgx-h100", "--input-len", 512, "--output-len", 128, "--concurrency", 8)["plan"]
    assert (plan["tp"], plan["max_batch"]) == (4, 192)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("vllm serve mistralai/Mistral-7B-v0.1 --quantization awq", "w4a16"),
        ("vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ", "w4a16"),
        ("python -m sglang.launch_server --model-path Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "w4a16"),
        ("python -m sglang.launch_server --model-path Qwen/Qwen2.5-7B-Instruct --quantization w8a8_int8", "int8"),
        ("trtllm-serve Qwen/Qwen2.5-7B-Instruct-AWQ", "w4a16"),
    ],
)
def test_a_launch_line_has_the_format_of_its_weights(result, tmp_path, line, name):
    file = tmp_path / "serve.sh"
    file.write_text(line)
    plan = result("serve", file, "--cluster", "dgx-a100", "--input-len", 512, "--output-len", 128, "--concurrency", 8)["plan"]
    assert plan["quantization"] == name


@pytest.mark.slow
def test_advice_is_in_the_options_of_the_framework(call, result, config):
    advice = result("advise", config, *PLACE)
    assert advice["best"]["step_time"] < advice["current"]["step_time"]
    assert {"option": "activation_checkpoint.mode", "before": "full", "after": "none"} in advice["options"]
    gains = [change["gain"] for change in advice["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert all(change["fits_probability"] > 0.9 for change in advice["changes"])
    _, out, _ = call("advise", config, *PLACE)
    assert "+ activation_checkpoint.mode: none" in out
    assert "Why it takes" in out


def test_advice_keeps_deepspeed_where_the_configuration_has_it(result, tmp_path):
    config = tmp_path / "lora.yaml"
    config.write_text(
        "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 8192\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nadapter: lora\n"
        "lora_r: 32\nlora_target_linear: true\ngradient_checkpointing: true\ndeepspeed: deepspeed_configs/zero2.json\n"
    )
    options = {change["option"]: change["after"] for change in result("advise", config, "--chip", "a100-sxm-80gb", "--chips", 4)["options"]}
    assert options["zero_optimization.stage"] == 3
    assert not any(option.startswith("fsdp") for option in options)


@pytest.mark.slow
def test_advice_on_what_does_not_fit_begins_with_what_does(result):
    advice = result("advise", CASES / "05-torchtitan-toml" / "launch.txt", "--cluster", "dgx-h100")
    assert not advice["current"]["fits"]
    assert 1 <= len(advice["remedies"]) <= 3
    assert advice["best"]["fits"]


def test_advice_names_no_value_that_the_framework_lacks(result, tmp_path):
    """torchtitan has a loss in chunks, and none that is fused with the output matrix."""
    config = tmp_path / "train.toml"
    config.write_text(
        'model = { name = "llama3", flavor = "8B" }\ncompile = { enable = true }\n'
        "training = { local_batch_size = 1, global_batch_size = 64, seq_len = 8192 }\n"
    )
    advice = result("advise", config, "--cluster", "dgx-h100", "--chips", 64)
    assert not [change for change in advice["changes"] if "loss" in change["changes"]]


def test_an_export_writes_all_of_its_files(call, config, tmp_path):
    code, out, _ = call("export", config, *PLACE, "--to", "nemo-automodel", "--out", tmp_path / "out.yaml")
    assert code == 0
    assert "out.sh" in out
    assert {"out.yaml", "out.sh"} <= {path.name for path in tmp_path.iterdir()}


def test_a_printed_file_can_be_copied(call, config, monkeypatch):
    """Its lines do not break at the width of the page."""
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = call("export", config, *PLACE, "--to", "torchtitan-python")
    assert code == 0
    text = out[out.index("plan.py:\n") + len("plan.py:\n") : out.index("\n\nplan.sh:")]
    assert ast.parse(text)
    assert any(len(line) > 100 for line in text.splitlines())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--to", "megatron"), "Megatron's distributed optimizer is ZeRO 1"),
        (("--to", "keras"), "is no framework that plans are written for"),
        (("--to", "nemo-automodel", "--out", "x.json"), "files that end in .yaml, .sh"),
        (("--to", "nemo-automodel", "--out", "nowhere/x.yaml"), "nowhere"),
    ],
)
def test_a_refused_export_writes_nothing(call, config, tmp_path, flags, sentence):
    before = set(tmp_path.iterdir())
    code, _, err = call("export", config, *PLACE, *flags)
    assert code == 2
    assert sentence in err
    assert set(tmp_path.iterdir()) == before


def test_an_export_does_not_overwrite_its_plan(call, tmp_path):
    job = ("--model", "qwen3-8b", "--cluster", "l40s-48gb", "--chips", 4, "--global-batch", 16, "--seq-len", 2048, "--profile", "trl")
    path = tmp_path / "lora.yaml"
    assert call("predict", *job, "--train", "lora:16", "--recompute", "full", "--save", path)[0] == 0
    plan = path.read_text()
    code, _, err = call("export", path, "--to", "trl", "--out", tmp_path / "lora")
    assert code == 2
    assert "would overwrite" in joined(err)
    assert path.read_text() == plan
    assert call("export", path, "--to", "trl", "--out", tmp_path / "run")[0] == 0
