"""`perfmodel chips | clusters | models | profiles | calibrations`: what people read."""

import pytest

import perfmodel
from tests.cli.conftest import joined


def test_a_chip_is_listed_with_the_rate_that_one_trains_at_and_its_price_with_a_currency(call):
    rows = {line.split()[0]: line for line in call("chips")[1].splitlines() if line.strip()}
    assert "11.3 TFLOP/s fp32" in rows["gtx1080ti-11gb"]
    assert "989 TFLOP/s bf16" in rows["h100-sxm-80gb"]
    assert "125 TFLOP/s fp16" in rows["v100-sxm2-16gb"]
    assert "2.99 USD per hour, indicative, 2026-11-21" in call("chips", "h100-sxm-80gb")[1]


@pytest.mark.parametrize("verb", ["chips", "clusters", "models", "profiles", "engines", "calibrations"])
def test_sources_are_listed_on_request(call, verb):
    assert "\nsources\n" not in call(verb)[1]
    assert "\nsources\n[1] " in call(verb, "--sources")[1]


def test_models_show_what_a_token_runs_through(call, call_json):
    rows = {line.split()[0]: line.split() for line in call("models")[1].splitlines() if line.strip()}
    assert rows["mixtral-8x7b"][1:3] == ["46.7B", "12.9B"]
    assert rows["llama-3-8b"][2] == "all"
    assert "num_experts 8, top_k 2, width 14336" in call("models", "mixtral-8x7b")[1]
    model = call_json("models", "deepseek-v3")["models"][0]
    assert (model["num_active_parameters"], model["num_active_parameters_without_embedding"]) == (37_552_282_624, 36_625_603_584)


def test_templates_are_valid_and_can_be_used(call, call_json, tmp_path):
    (tmp_path / "mychip.yaml").write_text(call("chips", "--template")[1])
    text = call("clusters", "--template")[1].replace("chip: h100-sxm-80gb", "chip: mychip.yaml")
    (tmp_path / "mine.yaml").write_text(text)
    job = ["--model", "llama-3-8b", "--global-batch", "64", "--seq-len", "4096", "--dp-shard", "64"]
    assert call_json("predict", *job, "--cluster", "./mine.yaml")["plan"]["num_chips"] == 64
    assert call_json("predict", *job, "--chip", "./mychip.yaml", "--chips", "64")["fits"]
    assert "on 64 chips of mine.yaml\n" in call("predict", *job, "--cluster", "./mine.yaml")[1]
    assert perfmodel.load_cluster(tmp_path / "mine.yaml").chip.memory.usable > 79e9


def test_a_cluster_says_what_of_its_latency_is_used(call):
    assert "latency 15 us (24.1 us a hop of a ring; calibrated: h100)" in joined(call("clusters", "aws-p5")[1])


def test_more_chips_than_the_largest_job_are_predicted_with_a_warning(call_json):
    job = ["--model", "llama-3-8b", "--seq-len", "4096", "--cluster", "tpu-v5p", "--zero", "3"]
    few, many = (call_json("predict", *job, "--chips", n, "--global-batch", n)["warnings"] for n in (6144, 8960))
    assert few == ["profile=xla: not given, so assumed for tpu-v5p"]
    assert any(warning.startswith("chips=8960: the largest job of tpu-v5p is 6144 chips") for warning in many)


def test_engines_say_what_they_run_and_where_that_was_read(call, call_json):
    engines = {engine["name"]: engine for engine in call_json("engines")["engines"]}
    assert len(engines) == len(perfmodel.list_engines()) == 14
    assert all(engine["source"] and engine["version"] for engine in engines.values())
    assert engines["vllm"]["supports"]["decode_context_parallel"]
    assert "fp8" in engines["vllm"]["supports"]["formats"]
    assert not engines["gpt-fast"]["supports"]["launch_command"]
    _, text, _ = call("engines")
    assert max(map(len, text.splitlines())) <= 100
    assert "format fp8" in call("engines", "vllm")[1]
    code, _, error = call("engines", "vlm")
    assert code == 2
    assert "did you mean" in error
