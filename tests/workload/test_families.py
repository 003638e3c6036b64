"""The table of model families: every name in it is known, and its grammar means what `models.py` documents."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload import models as reader
from perfmodel.workload.config import FIELDS
from perfmodel.workload.config_fields import ConfigFields
from perfmodel.workload.family_rules import LAYERS, RULES
from perfmodel.workload.layer_specs import PARTS
from perfmodel.workload.models import FamilyTable, family_table, parts_of_family, read_family

TABLE = family_table()
ENTRIES = {**TABLE.blocks, **TABLE.families}
WORDS = {"about", "base", "check", "window", "adds", "layers", "classes", "text_of", "class_defaults"}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_names_known_fields_rules_and_bases(name):
    entry = ENTRIES[name]
    assert {field for field in entry if not field.startswith("_")} <= WORDS | set(FIELDS) | set(PARTS)
    assert set(entry.get("base", [])) <= set(ENTRIES)
    assert set(entry.get("adds", [])) <= set(RULES)
    assert entry.get("layers", next(iter(LAYERS))) in LAYERS


def test_every_rule_and_every_block_is_used_and_every_class_has_one_family():
    assert {rule for entry in ENTRIES.values() for rule in entry.get("adds", [])} == set(RULES)
    assert {entry["layers"] for entry in ENTRIES.values() if "layers" in entry} == set(LAYERS)
    bases = [base for entry in ENTRIES.values() for base in entry.get("base", [])]
    assert set(TABLE.blocks) <= set(bases)
    for about in ("classes", "text_of"):
        names = [name for entry in TABLE.families.values() for name in entry.get(about, ())]
        assert len(names) == len(set(names))
    assert TABLE.family_with("classes", "MixtralForCausalLM") == "mixtral"
    assert TABLE.family_with("text_of", "nothing") == ""


def test_parts_are_those_of_the_bases_and_of_the_family():
    assert set(parts_of_family("llama")) == set()
    assert set(parts_of_family("deepseek_v3")) == {"latent", "experts", "layers"}
    assert parts_of_family("glm_moe_dsa")["latent"]["index_top"] == "index_topk"


@pytest.fixture
def read(monkeypatch):
    def read_entry(entry, faults=(), **data):
        toys = {"toy": entry, "base": {"hidden_size": None, "vocab_size": 7}}
        monkeypatch.setattr(reader, "family_table", lambda: FamilyTable(families=toys, blocks={}, unsupported={}, variants={}))
        fields = ConfigFields(data=data, model_type="toy", defaults={"head_dim": 32})
        values = read_family(fields)
        assert tuple(fields.faults) == faults
        return values

    return read_entry


@pytest.mark.parametrize(
    ("spec", "data", "value"),
    [
        (None, {"hidden_size": 3}, 3),
        ("n_embd|width", {"width": 4}, 4),
        ("new or old", {"new": 5, "old": 6}, 5),
        ("new or old", {"old": 6}, 6),
        ("?size", {"size": None}, 0),
        ("inner.size", {"inner": {"size": 8}}, 8),
        ("size = 9", {}, 9),
        ("= 4 * _two + 1", {}, 9),
        ("= _seven // _two", {}, 3),
    ],
)
def test_sources_of_a_size(read, spec, data, value):
    assert read({"_two": "two = 2", "_seven": "seven = 7", "hidden_size": spec}, **data) == {"hidden_size": value}


def test_values_replace_those_of_the_base_and_are_constants_flags_or_activations(read):
    entry = {"vocab_size": 8, "base": ["base"], "norm": "rmsnorm", "gated_mlp": False, "mlp_bias": "b = true", "activation": "act = silu"}
    values = read(entry, hidden_size=3, act="gelu_new")
    assert values == {"hidden_size": 3, "vocab_size": 8, "norm": "rmsnorm", "gated_mlp": False, "mlp_bias": True, "activation": "gelu_tanh"}


def test_missing_sizes_and_forbidden_values_are_faults(read):
    missing = "width: is missing, and model_type=toy needs it; add it to the config"
    assert read({"hidden_size": "width"}, faults=(missing,)) == {"hidden_size": 1}
    fault = "alibi=False: other positions are not modelled yet; only alibi=true is"
    assert read({"check": {"alibi": [True, "other positions are"]}}, faults=(fault,), alibi=False) == {}


def test_a_quotient_comes_after_the_key_and_the_class_and_leaves_no_rest(read):
    entry = {"_a": "= 65", "_b": "= 4", "head_dim": "head_dim = _a / _b"}
    assert read(entry, head_dim=16) == {"head_dim": 16}
    assert read(entry) == {"head_dim": 32}
    with pytest.raises(InputError, match="must divide hidden_size=65"):
        read({**entry, "head_dim": "= _a / _b"})
