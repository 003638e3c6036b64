"""Configurations of frameworks are read as the job and the plan that an expert reads in them."""

import json
from pathlib import Path

import pytest

from perfmodel.configs.read import read_setup
from perfmodel.verbs.configs import start_from

CASES = Path(__file__).parents[1] / "golden" / "configs"
TRAINING = sorted(path for path in CASES.glob("*/expected.json") if "serve" not in json.loads(path.read_text()))


def launched(folder: Path) -> Path:
    """The file that a user would give: the launch line where there is one."""
    names = sorted(path for path in folder.iterdir() if path.name != "expected.json")
    return next((path for path in names if path.suffix in (".sh", ".txt")), names[0])


def expected(folder: Path) -> dict:
    return json.loads((folder / "expected.json").read_text())


#: Field of expected.json -> fact.
FACTS = {
    "num_chips": "chips", "sequence_length": "seq_len", "global_batch": "global_batch", "micro_batch": "micro_batch", "tp": "tp",
    "pp": "pp", "cp": "cp", "ep": "ep", "etp": "etp", "zero_stage": "zero", "recompute": "recompute", "dp": "dp",
    "gradient_accumulation": "accumulation",
}  # fmt: skip
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


@pytest.mark.parametrize("folder", [path.parent for path in TRAINING], ids=lambda folder: folder.name)
def test_a_configuration_says_what_an_expert_reads_in_it(folder):
    wanted, setup = expected(folder), read_setup(launched(folder))
    found = {name: setup.facts.get(fact) for name, fact in FACTS.items()}
    assert found == {name: wanted.get(name, found[name]) if wanted.get(name) != "unknown" else None for name in FACTS}
    for name in SIZES:
        if name in (wanted.get("model") or {}):
            assert setup.facts[f"model.{name}"] == wanted["model"][name], name
    if wanted["pp"] > 1:
        assert (setup.facts.get("virtual_stages") or 1) == wanted["virtual_stages"]


@pytest.mark.parametrize("folder", [path.parent for path in TRAINING], ids=lambda folder: folder.name)
def test_a_configuration_is_a_plan_on_a_cluster(folder):
    from perfmodel.parallel.request import Request

    wanted = expected(folder)
    plan = start_from(launched(folder), Request(cluster="dgx-h100")).plan
    assert plan.num_chips == wanted["num_chips"]
    assert plan.micro_batch == wanted["micro_batch"]
    assert plan.num_microbatches == wanted["gradient_accumulation"]
    assert int(plan.zero) == wanted["zero_stage"]
