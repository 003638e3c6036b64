"""Rule sets: read, refused, applied."""

import pytest

from perfmodel.errors import InputError
from perfmodel.parallel.rules import RuleSet, apply_rules, list_rule_sets, load_rule_set, rule_set_from_dict
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from tests.parallel.small_graphs import operator


def graph(name: str = "llama-3-8b", **changes):
    settings = {"seq_len": 1024, "attention": "flash", "dropout": True, "activation_bytes": 2.0, "parameter_bytes": 2.0}
    return build_graph(load_model(name), **{**settings, **changes})


@pytest.mark.parametrize("name", list_rule_sets())
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2", "falcon-7b", "gemma-2-9b", "gpt-neox-20b"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_every_rule_set_shards_every_operator(name, model, attention):
    rules = load_rule_set(name)
    assert rules.name == name
    assert rules.source
    shardings = apply_rules(graph(model, attention=attention), rules)
    assert {"q_proj", "attention_norm", "lm_head", "cross_entropy"} <= shardings.keys()
    assert shardings["q_proj"]["b"] == ("dp_replicate", "dp_shard")


def test_whole_axes_are_spelled_out_outermost_first():
    rules = rule_set_from_dict({"name": "one", "source": "here", "rules": {"s_res": ["cp", "tp"]}})
    assert rules.rules == {"s_res": ("cp", "tp_kv", "tp_q")}


def test_a_rule_speaks_of_an_operators_dim_not_of_a_tensor():
    """The same residual stream is cut at a norm and whole at a projection (R16)."""
    shardings = apply_rules(graph(), load_rule_set("megatron-sp"))
    assert shardings["attention_norm"]["s"] == ("cp", "tp_kv", "tp_q")
    assert shardings["q_proj"]["s"] == ("cp",)


def test_a_name_without_a_rule_is_not_cut():
    assert RuleSet(name="none", rules={}, source="").sharding(operator("y[b,f] = x[b,h] * w[f,h]")) == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "must be a mapping"),
        ({"name": "x"}, "must be a mapping"),
        ({"rules": []}, "must be a mapping"),
        ({"rules": {}, "extra": 1}, "unknown field 'extra'"),
        ({"rules": {"batchs": ["tp"]}}, "unknown dim 'batchs'; did you mean 'batch'"),
        ({"rules": {"batch": "tp"}}, "must be a list of axes"),
        ({"rules": {"batch": ["dp"]}}, "axis 'dp' is not known"),
        ({"rules": {"batch": ["pp"]}}, "axis 'pp' is not known"),
        ({"rules": {"batch": [["tp"]]}}, "is not known"),
        ({"rules": {"batch": [3]}}, "axis 3 is not known"),
        ({"rules": {"batch": [None]}}, "axis None is not known"),
        ({"rules": {"ffn": ["tp", "tp_q"]}}, "may occur once"),
        ({"rules": {7: ["tp"]}}, "unknown dim 7"),
    ],
    ids=str,
)
def test_bad_rules_are_refused(data, words):
    with pytest.raises(InputError, match=words):
        rule_set_from_dict(data)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"batch": ["cp"], "s": ["cp"]}, "axis cp cuts both"),
        ({"s_query": ["cp"], "s_key": ["cp"]}, "axis cp cuts both"),
        ({"s_key": ["cp"]}, "needs its rows whole"),
        ({"head_dim": ["tp"]}, "needs its rows whole"),
        ({"hidden": ["tp"], "ffn": ["tp"]}, "axis tp_kv cuts both"),
    ],
    ids=str,
)
def test_rules_that_no_operator_can_follow(rules, words):
    with pytest.raises(InputError, match=words):
        apply_rules(graph(), rule_set_from_dict({"rules": rules}))


def test_keys_may_not_be_cut_in_unfused_attention_either():
    with pytest.raises(InputError, match="softmax"):
        apply_rules(graph(attention="unfused"), rule_set_from_dict({"rules": {"s_key": ["cp"]}}))


def test_loading_says_what_there_is(tmp_path):
    with pytest.raises(InputError, match=r"rule_set=megatronn: not known; did you mean 'megatron'"):
        load_rule_set("megatronn")
    with pytest.raises(InputError, match="not known"):
        load_rule_set(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_rule_set(_folder(tmp_path / "folder.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("rules: [", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: not valid YAML"):
        load_rule_set(broken)


def test_a_rule_set_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nsource: here\nrules:\n  ffn: [tp]\n", encoding="utf-8")
    assert load_rule_set(path).rules == {"ffn": ("tp_kv", "tp_q")}


def _folder(path):
    path.mkdir()
    return path
