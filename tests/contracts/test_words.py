"""The words that users and other programs rely on: verbs, flags, names of models and clusters."""

import pytest

import perfmodel
from perfmodel import cli

VERBS = (
    "predict",
    "search",
    "explain",
    "compare",
    "run",
    "audit",
    "calibrate",
    "validate",
    "pase-report",
    "import",
    "chips",
    "clusters",
    "models",
    "profiles",
    "demo",
)
MODELS = (
    "gpt2", "gpt3-175b", "llama-3-8b", "llama-3.1-8b", "llama-3-70b", "llama-3.1-405b", "megatron-22b", "megatron-530b", "megatron-1t",
)  # fmt: skip
CLUSTERS = ("dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200", "gb200-nvl72", "tpu-v5p", "localhost")
PLAN_FLAGS = (
    "--tp", "--pp", "--cp", "--dp-replicate", "--dp-shard", "--zero", "--micro-batch", "--virtual-stages", "--schedule", "--recompute",
    "--sequence-parallel", "--no-sequence-parallel", "--precision", "--optimizer", "--attention", "--profile",
)  # fmt: skip
JOB_FLAGS = (
    "--model",
    "--cluster",
    "--chips",
    "--global-batch",
    "--seq-len",
    "--tokens",
    "--memory-headroom",
    "--json",
    "--plot",
    "--save",
)
FLAGS = {
    "predict": (*PLAN_FLAGS, *JOB_FLAGS, "--calibration", "--order", "--interval"),
    "search": (*PLAN_FLAGS, *JOB_FLAGS, "--objective", "--top", "--max-tp", "--max-pp", "--max-dp-shard"),
    "explain": ("--why-not", "--json"),
    "compare": ("--json",),
    "run": ("--steps", "--shrink", "--json"),
    "audit": ("--rank", "--all-stages", "--json"),
    "calibrate": ("--save",),
    "validate": ("--out", "--by", "--plots", "--tier", "--skip-broken-nvlink", "--json"),
    "pase-report": ("--graph", "--devices", "--figure", "--plot", "--json"),
    "import": ("--inputs", "--save", "--search", "--json"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_help_and_its_flags(verb, capfd):
    assert cli.run([verb, "--help"]) == 0
    out = capfd.readouterr().out
    assert f"Usage: perfmodel {verb}" in out
    words = out.replace("/", " ").replace(",", " ").split()
    assert [flag for flag in FLAGS.get(verb, ()) if flag not in words] == []


def test_the_help_lists_every_verb(capfd):
    assert cli.run(["--help"]) == 0
    lines = [line.split()[0] for line in capfd.readouterr().out.splitlines() if line.startswith("  ")]
    assert set(VERBS) <= set(lines)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_name(name):
    assert perfmodel.load_model(name).name == name


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_has_its_name(name):
    assert perfmodel.load_cluster(name).name == name


def test_dgx_a100_is_the_80_gb_one():
    assert perfmodel.load_cluster("dgx-a100").chip.memory.capacity > 79e9
