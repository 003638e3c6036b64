"""`perfmodel shard | networks`, and `run` of what `shard` saves."""

import json
from pathlib import Path

import pytest

import perfmodel.workload.models
from perfmodel.foundation.units import format_time
from perfmodel.parallel.plan import plan_to_dict
from perfmodel.parallel.plan_file import plan_from_dict, read_plan
from perfmodel.verbs.networks import predict_network_plan
from tests.cli.conftest import joined

MODEL = Path(perfmodel.workload.models.__file__).parent / "models" / "gpt2.json"
SMALL = ("--size", "image=67", "--size", "hidden=256", "--batch", "8")


def test_a_network_has_its_best_plan_and_common_ones(call):
    code, out, _ = call("shard", "alexnet", "--cluster", "pase-1080ti", "--chips", "32")
    assert code == 0
    for words in ("each search proved", "data parallel", "one weird trick", "conv1 ", "fc6 ", "b 4x8", "no plan can take less than"):
        assert words in " ".join(out.split())


@pytest.mark.slow
def test_json_is_complete_and_adds_up(call_json):
    result = call_json("shard", "resnet50", "--cluster", "dgx-h100", "--chips", "16", "--precision", "bf16-mixed")
    best = result["best"]
    assert sum(best["parts"].values()) == pytest.approx(best["step_time"])
    assert sum(size for name, size in best["memory"].items() if name != "total") == pytest.approx(best["memory"]["total"])
    assert result["is_proved"] is True
    assert result["lower_bound"] <= best["step_time"]
    assert all(best["step_time"] <= other["step_time"] * (1 + 1e-9) for other in result["strategies"].values())
    assert len(best["plan"]["assignment"]["shardings"]) == result["num_operators"]


def test_a_saved_plan_reads_back_and_predicts_the_same(call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    result = call_json("shard", "alexnet", "--cluster", "pase-2080ti", "--chips", "8", *SMALL, "--save", str(path))
    plan = read_plan(path)
    assert plan_to_dict(plan) == result["best"]["plan"] | {"calibration": ""}  # the best known where the plan is read
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert predict_network_plan(path).step_time == pytest.approx(result["best"]["step_time"], rel=1e-12)


def test_a_saved_plan_holds_what_predicts_it_again(call, call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    job = ("alexnet", "--cluster", "dgx-h100", "--chips", "8", *SMALL, "--microbatches", "2", "--zero", "1", "--optimizer", "momentum")
    result = call_json("shard", *job, "--precision", "fp32", "--profile", "torch-fsdp2", "--calibration", "spec-sheet", "--save", str(path))
    again = call_json("predict", path)
    assert again["step_time"] == pytest.approx(result["best"]["step_time"], rel=1e-12)
    assert again["plan"] == result["best"]["plan"]
    assert call_json("predict", path, "--calibration", "h100")["step_time"] != pytest.approx(again["step_time"], rel=1e-3)
    code, out, _ = call("predict", path, "--cluster", "dgx-a100")
    assert code == 0
    assert "fp32, momentum, on 8 chips of dgx-a100" in joined(out)
    assert "ZeRO 1; micro-batch 4 (2 a step)" in joined(out)
    assert "framework torch-fsdp2" in joined(out)
    for verb, flags in (
        ("predict", ("--tp", 2)),
        ("predict", ("--network", "resnet50")),
        ("audit", ()),
    ):
        code, _, error = call(verb, path, *flags)
        assert code == 2
        assert error.count("\n") == 1
        assert "plan" in error
    assert call_json("explain", path)["step_time"] == again["step_time"]
    assert [row["step_time"] for row in call_json("compare", path, path)["plans"]] == [again["step_time"]] * 2


def test_every_zero_stage_is_searched_though_memory_does_not_bind(call, call_json):
    job = ("gpt2", "--cluster", "dgx-h100", "--chips", "8", "--batch", "64", "--size", "layers=2")
    result = call_json("shard", *job)
    stages = [call_json("shard", *job, "--zero", stage) for stage in (0, 1, 3)]
    assert result["best"]["step_time"] == min(one["best"]["step_time"] for one in stages)
    assert result["lower_bound"] == min(one["lower_bound"] for one in stages)
    assert result["zero_searched"] == [0, 1, 3]


def test_a_framework_without_a_fused_kernel_has_scores_as_tensors_and_the_plan_says_so(call, call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    job = ("gpt2", "--cluster", "dgx-a100", "--chips", "2", "--batch", "8", "--size", "layers=2", "--zero", "1", "--profile", "deepspeed")
    unfused, fused = call_json("shard", *job, "--save", str(path)), call_json("shard", *job, "--size", "fused_attention=true")
    assert any("softmax" in name for name in unfused["best"]["plan"]["assignment"]["shardings"])
    assert not any("softmax" in name for name in fused["best"]["plan"]["assignment"]["shardings"])
    assert unfused["best"]["memory"]["activations"] > fused["best"]["memory"]["activations"]
    assert call_json("predict", str(path))["step_time"] == unfused["best"]["step_time"]
    code, _, error = call("shard", *job[:5], "--size", "fused_attention=maybe")
    assert (code, "fused_attention=maybe" in error) == (2, True)


def test_a_config_json_is_sharded_as_the_model_and_the_plan_finds_it_again(call_json, tmp_path, monkeypatch):
    config, path = tmp_path / "mine.json", tmp_path / "plan.yaml"
    config.write_bytes(MODEL.read_bytes())
    monkeypatch.chdir(tmp_path)
    job = ("--cluster", "dgx-h100", "--chips", "2", "--batch", "8", "--size", "layers=2", "--zero", "1", "--profile", "megatron")
    mine, shipped = call_json("shard", "mine.json", *job, "--save", str(path)), call_json("shard", "gpt2", *job)
    assert mine["best"]["step_time"] == shipped["best"]["step_time"]
    # the framework's dropout is in it, as in `predict`
    assert mine["best"]["plan"]["job"]["model"]["network"] == str(config)
    assert mine["best"]["plan"]["job"]["model"]["sizes"] == {"dropout": True, "layers": 2}
    monkeypatch.chdir("/")
    assert call_json("predict", str(path))["step_time"] == mine["best"]["step_time"]


def test_a_plan_of_operators_that_the_network_no_longer_has_says_so(call, tmp_path):
    path = tmp_path / "plan.yaml"
    call("shard", "gpt2", "--cluster", "dgx-h100", "--chips", "2", "--batch", "8", "--size", "layers=1", "--zero", "1", "--save", str(path))
    path.write_text(path.read_text().replace(" token_embedding:", " embedding:"))
    code, _, error = call("predict", str(path))
    assert (code, error) == (
        2,
        "perfmodel: shardings=embedding: is no operator of gpt2; search and save the plan again, or remove the operator\n",
    )


@pytest.mark.slow
def test_a_time_limit_is_reported_with_the_gap(call, call_json):
    job = ("gpt2", "--cluster", "dgx-h100", "--chips", "16", "--time-limit", "0.001")
    result = call_json("shard", *job)
    assert result["cut_off"] == "time limit"
    assert result["zero_searched"] == [0]
    assert result["lower_bound"] <= result["best"]["step_time"]
    assert result["gap"] > 0 or result["is_proved"]
    _, out, _ = call("shard", *job)
    assert "cut off by the time limit" in joined(out)
    _, out, _ = call("shard", *job, "--stages", "2", "--microbatches", "4", "--batch", "64", "--size", "layers=2")
    assert "; cut off by the time limit" in joined(out)


def test_the_papers_cost_gives_the_papers_optimum(call, call_json):
    result = call_json("shard", "alexnet", "--chips", "8", "--cost", "pase")
    assert result["cost_flops"] == 97098296512
    code, out, _ = call("shard", "rnnlm", "--chips", "8", "--cost", "pase")
    assert code == 0
    assert "proved" in out


@pytest.mark.slow
def test_a_pipeline_has_stages_and_a_bound(call, call_json, tmp_path):
    job = ("gpt2", "--cluster", "dgx-h100", "--chips", "8", "--batch", "64", "--size", "layers=4", "--size", "seq_len=128")
    path = tmp_path / "plan.yaml"
    code, out, _ = call("shard", *job, "--stages", "2", "--microbatches", "8", "--zero", "1", "--save", str(path))
    assert code == 0
    assert "2 stages of 4 chips, 8 microbatches of 8; ZeRO 1" in out
    again = call_json("predict", path)
    assert f"step time  {format_time(again['step_time'])};" in out
    assert len(read_plan(path).cuts.stages) == 2
    result = call_json("shard", *job, "--stages", "auto")
    assert result["lower_bound"] <= result["step_time"]
    assert sum(result["parts"].values()) == pytest.approx(result["step_time"])
    code, _, error = call("run", str(path), "--strategies")
    assert code == 2
    assert "strategies=yes: are plans of one stage, this one has several; leave it out" in error


def test_an_operator_without_dims_stays_whole_and_a_module_that_computes_nothing_is_refused(call, tmp_path, monkeypatch):
    (tmp_path / "odd_nets.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Fourier(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.fft.fft(x, dim=1).real\n"
        "class First(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x[0]\n"
    )
    monkeypatch.chdir(tmp_path)
    job = ("--inputs", "x=float32[64,64]", "--cluster", "dgx-h100", "--chips", "8")
    code, out, _ = call("shard", "odd_nets:Fourier", *job)
    assert code == 0
    assert "aten.fft_fft.default (fft_fft) is not recognised: computed whole on every chip" in out
    for module in ("torch.nn:Identity", "odd_nets:First"):
        inputs = ("--inputs", "input=float32[64,64]", *job[2:]) if module == "torch.nn:Identity" else job
        code, _, error = call("shard", module, *inputs)
        assert code == 2
        assert f"network={module}: computes nothing: it returns what it is given" in error


def test_an_imported_module_is_searched_and_says_what_stays_whole(call, call_json, tmp_path, monkeypatch):
    (tmp_path / "shard_nets.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 256))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    job = ("shard_nets:net", "--inputs", "input=float32[32,3,16,16]", "--chips", "8")
    code, out, _ = call("shard", *job, "--cluster", "dgx-a100", "--save", "plan.yaml")
    assert code == 0
    assert "Not sharded:" in out
    assert "each search proved" in " ".join(out.split())
    assert "run it here with:\nperfmodel run plan.yaml --network shard_nets:net" in out
    for verb in ("predict", "run"):
        code, _, error = call(verb, "plan.yaml")
        assert code == 2
        assert "network=shard_nets:net: is Python code of your own" in error
        assert f"perfmodel {verb} PLAN --network shard_nets:net" in " ".join(error.split())
    again = call_json("predict", "plan.yaml", "--network", "shard_nets:net")
    assert f"step time  {format_time(again['step_time'])} for a batch of 32;" in out
    code, out, _ = call("shard", *job, "--cost", "pase")
    assert code == 0
    assert "by PaSE's cost function" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nope", "--cluster", "dgx-h100", "--chips", "8"), "network=nope: no network has this name"),
        (("alexnet", "--cluster", "dgx-h100"), "chips: is missing"),
        (("alexnet", "--chips", "8"), "cluster: is missing"),
        (("alexnet",), "or --chip with a chip; --chips: is missing"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "0"), "chips=0"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "7"), "chips=7: no dim of a product in alexnet divides by 7"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--size", "depth=3"), "depth=3: is no size of alexnet"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--size", "image=big"), "size=image=big: must be a name and whole numbers"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--cost", "flops"), "cost=flops: is not known"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--zero", "4"), "zero=4"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--precision", "fp4"), "precision=fp4"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--optimizer", "lamb"), "optimizer=lamb"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--time-limit", "0"), "time_limit=0: must be more than nothing"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--time-limit", "soon"), "time_limit='soon'"),
        (
            ("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--batch", "9", "--microbatches", "2"),
            "microbatches=2: must divide the batch",
        ),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--save", "plan.txt"), "save=plan.txt"),
        (("gpt2", "--cluster", "dgx-h100", "--chips", "8", "--batch", "8", "--stages", "3"), "stages=3: must divide the 8 chips"),
        (("gpt2", "--cluster", "dgx-h100", "--chips", "8", "--stages", "2"), "batch: is missing"),
        (("gpt2", "--cluster", "dgx-h100", "--chips", "8", "--batch", "8", "--stages", "two"), "stages=two"),
        (("llama-3-70b", "--cluster", "dgx-h100", "--chips", "8", "--batch", "8"), "no plan of the space needs less than"),
        (("nets:missing", "--inputs", "x=float32[2,2]", "--cluster", "dgx-h100", "--chips", "8"), "nets"),
        (("alexnet", "--chips", "8", "--cost", "pase", "--size", "image=64"), "size=image=64: the paper's graphs"),
        (("alexnet", "--chips", "8", "--cost", "pase", "--stages", "2"), "stages=2: the paper's cost"),
        (("alexnet", "--cluster", "dgx-h100", "--chips", "8", "--inputs", "x=float32[8]"), "alexnet is built in"),
    ],
)
def test_bad_input_gets_one_sentence(call, arguments, sentence):
    code, out, error = call("shard", *arguments)
    assert code == 2
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("kind: plan", "kind"),
        ("schema_version: 1", "schema_version"),
        ("global_batch: 8", "global_batch"),
        ("micro_batch: 8", "micro_batch"),
        ("network: alexnet", "network"),
        ("size: 2", "axes"),
    ],
)
def test_a_damaged_plan_file_is_refused(call, tmp_path, change, sentence):
    path = tmp_path / "plan.yaml"
    code, _, _ = call("shard", "alexnet", "--cluster", "pase-2080ti", "--chips", "8", *SMALL, "--save", str(path))
    assert code == 0
    text = path.read_text()
    assert change in text
    name = change.partition(":")[0]
    path.write_text(text.replace(change, f"{name}: {'other' if name != 'schema_version' else 9}", 1))
    code, _, error = call("run", str(path))
    assert code == 2
    assert sentence in error


def test_networks_are_listed_with_their_sizes(call, call_json):
    code, out, _ = call("networks")
    assert code == 0
    for name in (
        "alexnet",
        "inception3",
        "resnet50",
        "resnet101",
        "densenet121",
        "rnnlm",
        "transformer",
        "bert-large",
        "vit-large",
        "dlrm",
    ):
        assert name in out
    assert "llama-3-70b" in call_json("networks")["models"]


@pytest.mark.slow
def test_a_saved_plan_runs_on_this_machine_with_common_strategies(call, call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    call_json("shard", "alexnet", "--cluster", "localhost", "--chips", "2", *SMALL, "--save", str(path))
    code, out, _ = call("run", str(path), "--strategies", "--steps", "2", "--warmup", "1", "--calibration", "spec-sheet", "--json")
    assert code == 0
    result = json.loads(out)
    assert [plan["name"] for plan in result["plans"]] == ["this plan", "data parallel", "one weird trick"]
    for plan in result["plans"]:
        assert plan["step_time"] > 0
        assert plan["gradient_error"] < 1e-4
    assert Path(path).exists()


def test_a_network_is_charged_the_launches_of_its_kernels_and_no_constant_of_a_training_loop(call_json):
    """12.8 ms of any step, measured in loops of language models, were 40 % of AlexNet's on eight GTX 1080 Ti."""
    result = call_json("shard", "alexnet", "--cluster", "pase-1080ti", "--chips", 8)
    parts = result["best"]["parts"]
    assert parts["host"] < 0.05 * sum(parts.values())


def test_a_network_on_one_chip_lists_its_operators(call):
    code, out, err = call("shard", "resnet50", "--cluster", "v100-sxm2-32gb", "--chips", 1, "--batch", 32)
    assert (code, err) == (0, "")
    assert "whole" in out
