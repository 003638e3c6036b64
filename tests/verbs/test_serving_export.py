"""Serving plans as scripts and manifests: the options are those of the launch line, and scripts are read back as the same plan."""

import json
import shlex

import pytest

import perfmodel
from perfmodel.configs.write import load_launchers
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.request import Service
from perfmodel.report.serving import serving_object
from perfmodel.verbs.configs import served_from
from perfmodel.verbs.exporting import export_service, is_service, write_export
from tests.configs.launch_schemas import check, documents_of

JOB = {"input_len": 1024, "output_len": 512, "concurrency": 32}
SERVICES = {
    "dense": {"model": "llama-3.3-70b", "cluster": "dgx-h100", "chips": 16, "tp": 4, "kv_precision": "fp8", "quantization": "fp8"},
    "wide": {
        "model": "deepseek-v3", "cluster": "hgx-h200", "chips": 16, "tp": 1, "attention_dp": 8, "ep": 8, "max_batch": 64, "draft_tokens": 1,
    },
    "pools": {"model": "llama-3.3-70b", "cluster": "dgx-h100", "chips": 16, "workers": "2x4,tp=4:1x8,tp=8", "max_tokens": 4096},
    "two-nodes": {"model": "deepseek-v3", "cluster": "hgx-h200", "chips": 32, "tp": 1, "attention_dp": 16, "ep": 16},
}  # fmt: skip
MANIFESTS = ("kserve", "llm-d", "dynamo")


@pytest.fixture(scope="module")
def served():
    predictions = {}

    def prediction(name, engine="vllm"):
        if (name, engine) not in predictions:
            predictions[name, engine] = perfmodel.serve(**JOB, **SERVICES[name], engine=engine)
        return predictions[name, engine]

    return prediction


def options_of(script):
    words = shlex.split(script.splitlines()[-1])
    return words[3:] if words[0] == "vllm" else words[5:]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("name", ["dense", "wide", "pools"])
def test_scripts_are_read_back_as_the_same_plan(served, name, engine, tmp_path):
    prediction = served(name, engine)
    exported = export_service(prediction, to=engine)
    write_export(exported, tmp_path)
    pools = prediction.plan.pools
    plans = {"": prediction.plan.layout} if pools is None else {".prefill": pools.prefill, ".decode": pools.decode}
    for ending, plan in plans.items():
        again, _ = served_from(tmp_path / f"serve{ending}.sh", Service())
        for degree in ("tp", "pp", "attention_dp", "ep"):
            assert (getattr(again.knobs, degree) or 1) == getattr(plan, degree), degree
        assert again.knobs.max_batch == plan.max_batch or not plan.max_batch
        assert again.knobs.max_tokens == plan.max_tokens or not plan.max_tokens
        assert str(again.request.kv_precision or "bf16") == str(prediction.job.kv_precision)


@pytest.mark.parametrize("to", MANIFESTS)
@pytest.mark.parametrize("name", ["dense", "wide", "pools"])
def test_manifests_are_what_their_schemas_take(served, name, to):
    exported = export_service(served(name), to=to, stem="My_service")
    (document,) = documents_of(exported)
    check(document, to)
    assert "predicted for vllm" in exported.files[exported.script]


@pytest.mark.parametrize("name", ["dense", "wide", "pools"])
def test_manifests_have_the_options_of_the_launch_lines(served, name):
    prediction = served(name)
    lines = [options_of(text) for text in export_service(prediction, to="vllm").files.values()]
    roles = ["decode"] if len(lines) == 1 else ["prefill", "decode"]
    (service,), (values,), (graph,) = (documents_of(export_service(prediction, to=to)) for to in MANIFESTS)
    for role, options in zip(roles, lines, strict=True):
        pod = service["spec"] if role == "decode" else service["spec"]["prefill"]
        assert shlex.split(pod["template"]["containers"][0]["env"][0]["value"]) == options
        assert values[role]["containers"][0]["args"][1:-2] == options
        worker = graph["spec"]["services"]["worker" if len(lines) == 1 else role]
        args = worker["extraPodSpec"]["mainContainer"]["args"]
        assert args[2 : 2 + len(options)] == options
        assert args[2 + len(options) :] == ([] if len(lines) == 1 else ["--disaggregation-mode", role])
        assert pod["replicas"] == values[role]["replicas"] == worker["replicas"]


def test_pools_have_their_replicas_chips_and_ports(served):
    (values,) = documents_of(export_service(served("pools"), to="llm-d"))
    assert {role: values[role]["replicas"] for role in ("prefill", "decode")} == {"prefill": 2, "decode": 1}
    assert {role: values[role]["containers"][0]["args"][-1] for role in ("prefill", "decode")} == {"prefill": "8000", "decode": "8200"}
    assert values["decode"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    (values,) = documents_of(export_service(served("dense"), to="llm-d"))
    assert values["prefill"] == {"create": False}
    assert values["routing"]["proxy"]["enabled"] is False


def test_dynamo_joins_the_nodes_of_a_worker(served):
    (graph,) = documents_of(export_service(served("two-nodes"), to="dynamo"))
    check(graph, "dynamo")
    worker = graph["spec"]["services"]["worker"]
    assert worker["multinode"] == {"nodeCount": 2}
    assert worker["resources"]["limits"] == {"gpu": "8"}
    assert "--data-parallel-address" not in worker["extraPodSpec"]["mainContainer"]["args"]


def test_dynamo_starts_workers_of_sglang(served):
    (graph,) = documents_of(export_service(served("pools", "sglang"), to="dynamo"))
    check(graph, "dynamo")
    args = graph["spec"]["services"]["prefill"]["extraPodSpec"]["mainContainer"]["args"]
    assert args[args.index("--disaggregation-mode") + 1] == "prefill"
    assert args[args.index("--tp-size") + 1] == "4"


@pytest.mark.parametrize(
    ("name", "engine", "to", "sentence"),
    [
        ("two-nodes", "vllm", "kserve", "a replica of 16 chips spans nodes"),
        ("two-nodes", "vllm", "llm-d", "a replica of 16 chips spans nodes"),
        ("dense", "sglang", "kserve", "starts vllm, and the plan is of sglang; use --to sglang"),
        ("dense", "tensorrt-llm", "dynamo", "starts vllm and sglang, and the plan is of tensorrt-llm"),
        ("dense", "vllm", "nomad", "use one of dynamo, kserve, llm-d"),
    ],
)
def test_what_a_target_cannot_express_is_refused(served, name, engine, to, sentence):
    with pytest.raises(InputError, match=sentence):
        export_service(served(name, engine), to=to)


def test_a_file_of_serve_gives_the_same_files(served, tmp_path):
    path, prediction = tmp_path / "served.json", served("pools")
    path.write_text(json.dumps(serving_object(prediction) | {"launch": []}))
    assert is_service(path)
    assert export_service(path, to="dynamo") == export_service(prediction, to="dynamo")
    path.write_text(json.dumps({"best": serving_object(prediction), "launch": []}))
    assert export_service(path, to="kserve") == export_service(prediction, to="kserve")


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"launch": [], "plan": {"model": "llama-3-8b"}}', '{"launch": [], "best": 3}'])
def test_a_file_without_a_plan_is_refused(content, tmp_path):
    path = tmp_path / "served.json"
    path.write_text(content)
    with pytest.raises(InputError, match="has no serving plan"):
        export_service(path, to="vllm")


def test_a_plan_that_does_not_fit_is_refused():
    prediction = perfmodel.serve(model="deepseek-v3", cluster="dgx-h100", chips=8, tp=8, input_len=1024, output_len=512)
    with pytest.raises(InputError, match="does not fit"):
        export_service(prediction, to="vllm")


def test_every_target_of_serving_names_its_source():
    assert all(launcher.source for launcher in load_launchers().values() if launcher.engines)
