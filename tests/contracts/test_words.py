"""The words that users and other programs rely on: verbs, flags, names of models and clusters."""

import pytest

import perfmodel
from perfmodel.cli import app as cli
from perfmodel.cli.examples import EXAMPLES

VERBS = (
    "predict",
    "search",
    "limits",
    "explain",
    "compare",
    "run",
    "audit",
    "calibrate",
    "fit",
    "validate",
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
SYNONYMS = ("--dp", "--fsdp", "--gpus", "--nodes", "--mbs", "--gbs", "--seq", "--batch-tokens", "--csv")
FLAGS = {
    "predict": (*PLAN_FLAGS, *JOB_FLAGS, *SYNONYMS, "--calibration", "--order", "--interval"),
    "search": (*PLAN_FLAGS, *JOB_FLAGS, *SYNONYMS, "--objective", "--top", "--risk", "--max-tp", "--max-pp", "--max-dp-shard"),
    "limits": (*PLAN_FLAGS, "--model", "--cluster", "--chips", "--global-batch", "--seq-len", "--memory-headroom", "--json"),
    "explain": ("--why-not", "--trust", "--json"),
    "compare": ("--json",),
    "run": ("--steps", "--shrink", "--json"),
    "audit": ("--rank", "--all-stages", "--json"),
    "calibrate": ("--save",),
    "fit": ("--plan", "--save", "--profile", "--json", "--model", "--chips", "--tp"),
    "validate": ("--out", "--by", "--plots", "--tier", "--skip-broken-nvlink", "--json"),
    "import": ("--inputs", "--save", "--search", "--json"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_help_and_its_flags(verb, capfd):
    assert cli.run([verb, "--help"]) == 0
    out = capfd.readouterr().out
    assert f"Usage: perfmodel {verb}" in out
    words = out.replace("/", " ").replace(",", " ").split()
    assert [flag for flag in FLAGS.get(verb, ()) if flag not in words] == []


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_has_two_examples_with_its_own_flags(verb, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([verb, "--help"]) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.partition("Examples:")[2].splitlines())) <= 80
    shell = " ".join(out.replace("\\\n", "").split())
    examples = EXAMPLES[verb]
    known = set(out.partition("Examples:")[0].replace(",", " ").split())
    for line in examples:
        assert f"perfmodel {line}" in shell
        assert line.split()[0] == verb
        assert {word for word in line.split() if word.startswith("--")} <= known


def test_the_help_says_defaults_and_words(capfd):
    assert cli.run(["predict", "--help"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    for piece in ("micro-batch 1, recompute none, schedule 1f1b", "profile: the assumed framework", "prior: ", "based on: "):
        assert piece in out


def test_a_flag_of_one_value_is_not_given_twice(capfd):
    for flags in (["--fsdp", "2", "--fsdp", "4"], ["--order", "tp-pp", "--order=pp-tp"], ["--sequence-parallel", "--no-sequence-parallel"]):
        assert cli.run(["predict", *flags]) == 2
        assert "takes one value and is given 2 times" in capfd.readouterr().err


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
