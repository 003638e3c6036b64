"""Predictions of one process share estimators and compiled programs, and are those of a fresh process to the bit."""

import random

import pytest

import perfmodel
from perfmodel.cost import programs
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.profile import load_profile, profile_text
from perfmodel.parallel.request import Request
from perfmodel.verbs.requests import setting_of_request

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


def forget():
    perfmodel.Session.current().clear()


def figures(prediction):
    return prediction.step_time, prediction.parts, prediction.memory, prediction.fits_probability


@pytest.mark.slow
def test_predictions_are_those_of_a_fresh_process():
    drawn = random.Random(7)
    calls = [JOB | {name: drawn.choice(values) for name, values in VALUES.items()} for _ in range(16)]
    shared = [figures(perfmodel.predict(**call)) for call in [*calls, *calls]]
    for call, *both in zip(calls, shared, shared[len(calls) :], strict=False):
        forget()
        alone = figures(perfmodel.predict(**call))
        assert both == [alone, alone], call


def test_a_second_prediction_of_the_job_compiles_nothing(monkeypatch):
    forget()
    perfmodel.predict(**JOB, tp=2)
    monkeypatch.setattr(programs, "compile_program", None)
    perfmodel.predict(**JOB, tp=4, micro_batch=2)
    perfmodel.predict(**JOB | {"global_batch": 256, "chips": 128}, tp=2)


def test_few_jobs_are_kept():
    for seq_len in range(64, 64 + 40):
        perfmodel.predict(**JOB | {"model": "gpt2", "chips": 8, "seq_len": seq_len})
    info = perfmodel.Session.current().cache_info()
    for kept in (info["perfmodel.cost.programs.compiled_for"], info["perfmodel.cost.resolve.kept_estimator"]):
        assert kept.entries <= kept.max_entries <= 64


def test_few_programs_of_a_job_are_kept(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 2)
    forget()
    calls = [JOB | {"attention": kernel, "recompute": again} for kernel in ("flash", "unfused") for again in ("none", "selective", "full")]
    times = [perfmodel.predict(**call).step_time for call in [*calls, *calls]]
    assert times[: len(calls)] == times[len(calls) :]
    assert 1 <= len(setting_of_request(Request(**JOB)).estimator.programs.compiled.programs) <= 2


def test_a_batch_of_a_list_has_the_recipe_of_its_release():
    call = dict(model="qwen3-235b-a22b", cluster="gb300-nvl72", chips=64, seq_len=4096, profile="nemo@26.02.01", ep=64)
    alone = [figures(perfmodel.predict(**call, global_batch=batch)) for batch in (1024, 8192)]
    assert [figures(prediction) for prediction in perfmodel.predict(**call, global_batch=[1024, 8192])] == alone


HARDWARE = resource_dir("hardware_specs")
EDITED = {
    "cluster": ((HARDWARE / "clusters" / "dgx-h100.yaml").read_text(), "bandwidth: 50 GB/s", "bandwidth: 10 GB/s"),
    "chip": ((HARDWARE / "chips" / "h100-sxm-80gb.yaml").read_text(), "bandwidth: 3.35 TB/s", "bandwidth: 1.35 TB/s"),
    "calibration": ((HARDWARE / "calibrations" / "h100.yaml").read_text(), "floor_time: 2.481 us", "floor_time: 9.481 us"),
    "profile": (profile_text(load_profile("megatron").having(reserve_factor=1.25)), "reserve_factor: 1.25", "reserve_factor: 1.75"),
}


@pytest.mark.parametrize("kind", EDITED)
def test_an_edited_file_is_read_again(tmp_path, kind):
    """The file has the same size and is edited at once, so its time of change does not separate the two contents."""
    text, old, new = EDITED[kind]
    assert old in text
    path = tmp_path / "edited.yaml"
    versions = []
    for content in (text, text.replace(old, new), text):
        path.write_text(content)
        versions.append(figures(perfmodel.predict(**JOB | {"cluster" if kind == "chip" else kind: path}, tp=2)))
    assert versions[0] == versions[2] != versions[1]


@pytest.mark.slow
def test_a_search_after_a_prediction_finds_the_same():
    forget()
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
    assert [figures(prediction) for prediction in listed] == [figures(prediction) for prediction in alone]
    assert [prediction.plan for prediction in listed] == [prediction.plan for prediction in alone]
