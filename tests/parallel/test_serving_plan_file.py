"""Plan files of services: they are read back as the request that reproduces the plan, and faults are named."""

from dataclasses import replace

import pytest
import yaml

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan_file import is_serving_plan, read_plan, read_serving_plan, serving_plan_to_dict, write_plan
from perfmodel.parallel.request import Service
from perfmodel.verbs.overrides import with_plan

LOAD = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 4, "input_len": 512, "output_len": "64:128"}
SERVICES = {
    "replicas": {"concurrency": 16, "tp": 2, "max_batch": 32},
    "rate": {"rate": 3.0, "prefix_hit": 0.25, "quantization": "fp8", "kv_precision": "fp8", "engine": "sglang"},
    "experts": {"model": "deepseek-v3", "cluster": "hgx-h200", "chips": 8, "concurrency": 8, "attention_dp": 2, "tp": 4, "ep": 8},
    "drafts": {"model": "llama-3-70b", "concurrency": 4, "draft_tokens": 3, "acceptance": 0.6, "draft_model": "llama-3-8b"},
    "pools": {"concurrency": 8, "workers": "1x2:1x2,pp=2", "max_tokens": 4096},
    "no load": {"calibration": "spec-sheet"},
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_saved_plan_is_predicted_as_before(name, tmp_path):
    before = perfmodel.serve(**{**LOAD, **SERVICES[name]})
    write_plan(before.plan, tmp_path / "plan.yaml")
    assert is_serving_plan(tmp_path / "plan.yaml")
    after = perfmodel.serve_plan(tmp_path / "plan.yaml")
    assert after.plan == before.plan
    assert replace(after, notes=()) == replace(before, notes=())
    assert perfmodel.serve_plan(before.plan).plan == before.plan


def test_given_words_replace_those_of_the_plan():
    words = {"model": "llama-3-8b", "chips": 8, "concurrency": 16, "quantization": "fp8", "tp": 2, "replicas": 4, "max_batch": 64}
    plan = Service().having(words)

    def kept(*, is_searched=False, **given):
        return with_plan(Service().having(given), plan, is_searched=is_searched).given()

    assert kept() == words
    assert kept(rate=2.0) == plan.having({"concurrency": None, "rate": 2.0}).given()
    assert kept(tp=4) == plan.having({"tp": 4, "replicas": None}).given()
    assert kept(chips=16) == plan.having({"chips": 16, "replicas": None}).given()
    assert kept(workers="1x4:1x4") == plan.having({"tp": None, "replicas": None, "workers": "1x4:1x4"}).given()
    assert kept(model="gpt2") == plan.having({"model": "gpt2", "quantization": None}).given()
    assert kept(is_searched=True) == {"model": "llama-3-8b", "chips": 8, "concurrency": 16, "quantization": "fp8"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 2}, "schema_version=2: this perfmodel reads version 1"),
        ({"enginee": "vllm"}, "enginee: unknown field; did you mean 'engine'?"),
        ({"job": {"model": "llama-3-8b", "input_len": 0, "output_len": 8}}, "job.input_len"),
        ({"job": {"model": "llama-3-8b", "input_len": 8}}, "job.output_len: required field is missing"),
        ({"layout": {"tp": 2, "zp": 4}}, "layout.zp: unknown field"),
        ({"num_chips": "many"}, "num_chips=many"),
    ],
)
def test_faults_are_named(change, sentence, tmp_path):
    content = serving_plan_to_dict(perfmodel.serve(**LOAD).plan)
    (tmp_path / "plan.yaml").write_text(yaml.dump(content | change))
    with pytest.raises(InputError) as refusal:
        read_serving_plan(tmp_path / "plan.yaml")
    assert sentence in str(refusal.value)


def test_verbs_of_training_plans_name_the_verb_of_services(tmp_path):
    write_plan(perfmodel.serve(**LOAD).plan, tmp_path / "plan.yaml")
    with pytest.raises(InputError, match="is a plan of a service; give it to `perfmodel serve`"):
        read_plan(tmp_path / "plan.yaml")
