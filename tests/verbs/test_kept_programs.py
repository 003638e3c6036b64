"""Predictions of one process share compiled programs, and are those of a fresh process to the bit."""

import json
import random

import perfmodel
from perfmodel.cost import estimate
from perfmodel.cost.estimate import compiled_for

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=128, seq_len=8192)
VALUES = dict(
    tp=(1, 2, 4),
    pp=(1, 2),
    micro_batch=(1, 2),
    global_batch=(128, 256),
    seq_len=(2048, 8192),
    zero=(0, 1),
    profile=("megatron", "torchtitan", "generic+compile"),
    precision=("bf16-mixed", "fp8-delayed"),
    recompute=("none", "selective", "full"),
    cluster=("dgx-h100", "dgx-b200"),
    train=("full", "lora:16"),
    optimizer=("adamw", "adamw-8bit"),
)


def figures(found):
    return found.step_time, found.parts, found.memory, found.fits_probability


def test_predictions_are_those_of_a_fresh_process():
    drawn = random.Random(7)
    calls = [JOB | {name: drawn.choice(values) for name, values in VALUES.items()} for _ in range(40)]
    shared = [figures(perfmodel.predict(**call)) for call in [*calls, *calls]]
    for call, *both in zip(calls, shared, shared[len(calls) :], strict=False):
        compiled_for.cache_clear()
        alone = figures(perfmodel.predict(**call))
        assert both == [alone, alone], call


def test_a_second_prediction_of_the_job_compiles_nothing(monkeypatch):
    compiled_for.cache_clear()
    perfmodel.predict(**JOB, tp=2)
    monkeypatch.setattr(estimate, "compile_program", None)
    perfmodel.predict(**JOB, tp=4, micro_batch=2)
    perfmodel.predict(**JOB | {"global_batch": 256, "chips": 128}, tp=2)


def test_few_jobs_are_kept():
    for seq_len in range(1024, 1024 + 40):
        perfmodel.predict(**JOB | {"model": "gpt2", "chips": 8, "seq_len": seq_len % 512 + 64})
    kept = compiled_for.cache_info()
    assert kept.currsize <= kept.maxsize <= 64


def test_an_edited_config_is_read_again(tmp_path):
    config = dict(model_type="llama", hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=16)
    config |= dict(num_hidden_layers=8, vocab_size=32000, max_position_embeddings=8192)
    path = tmp_path / "config.json"
    times = []
    for layers in (8, 16):
        path.write_text(json.dumps(config | {"num_hidden_layers": layers}))
        times.append(perfmodel.predict(**JOB | {"model": str(path)}).step_time)
    assert times[1] > times[0] * 1.5


def test_a_search_after_a_prediction_finds_the_same():
    compiled_for.cache_clear()
    first = perfmodel.find_plans(**JOB, profile="megatron", top=3)
    perfmodel.predict(**JOB, profile="megatron", tp=8)
    again = perfmodel.find_plans(**JOB, profile="megatron", top=3)
    assert [figures(plan) for plan in again.plans] == [figures(plan) for plan in first.plans]
    assert again.rejected == first.rejected


def test_rows_of_a_list_are_the_predictions_by_themselves():
    batches = [64, 128, 192]
    listed = perfmodel.predict(**JOB | {"global_batch": batches, "chips": [32, 64]}, tp=[2, 4], profile="megatron")
    alone = [
        perfmodel.predict(**JOB | {"global_batch": batch, "chips": chips}, tp=tp, profile="megatron")
        for chips in (32, 64)
        for batch in batches
        for tp in (2, 4)
    ]
    assert [figures(each) for each in listed] == [figures(each) for each in alone]
    assert [each.plan for each in listed] == [each.plan for each in alone]
