"""Rule sets: read, refused, applied."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.degrees import admits, broken
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rule_faults import faults_of
from perfmodel.parallel.algebra.rules import RuleSet, apply_rules, list_rule_sets, load_rule_set, rule_set_from_dict
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
        ({"name": "x"}, "rules: required field is missing"),
        ({"rules": []}, "must be a mapping"),
        ({"rules": {}, "extra": 1}, "extra: unknown field"),
        ({"rules": {"batchs": ["tp"]}}, "rules.batchs: unknown name; did you mean 'batch'"),
        ({"rules": {"batch": "tp"}}, "rules.batch='tp': must be a list"),
        ({"rules": {"batch": ["dp"]}}, "rules.batch.0='dp': must be one of dp_replicate, dp_shard, cp, tp"),
        ({"rules": {"batch": ["pp"]}}, "rules.batch.0='pp': must be one of dp_replicate"),
        ({"rules": {"batch": [["tp"]]}}, "rules.batch.0=.*must be one of dp_replicate"),
        ({"rules": {"batch": [3]}}, "rules.batch.0=3: must be one of dp_replicate"),
        ({"rules": {"batch": [None]}}, "rules.batch.0=None: must be one of dp_replicate"),
        ({"rules": {"ffn": ["tp", "tp_q"]}}, "may occur once"),
        ({"rules": {7: ["tp"]}}, "rules.7: unknown name; use one of batch, "),
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
    shardings = apply_rules(graph(), rule_set_from_dict({"rules": rules}))
    with pytest.raises(InputError, match=words):
        derive(graph(), shardings)


def test_keys_may_not_be_cut_in_unfused_attention_either():
    shardings = apply_rules(graph(attention="unfused"), rule_set_from_dict({"rules": {"s_key": ["cp"]}}))
    with pytest.raises(InputError, match="softmax"):
        derive(graph(attention="unfused"), shardings)


def test_loading_says_what_there_is(tmp_path):
    with pytest.raises(InputError, match=r"rules=megatronn: not known; did you mean .megatron."):
        load_rule_set("megatronn")
    with pytest.raises(InputError, match="no such file"):
        load_rule_set(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_rule_set(_folder(tmp_path / "folder.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("rules: [", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: not valid YAML"):
        load_rule_set(broken)


def test_a_user_defined_rule_set(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("source: here\nrules:\n  batch: [dp_replicate, dp_shard]\n  ffn: [tp]\n", encoding="utf-8")
    mine = load_rule_set(path)
    assert (mine.name, mine.source, mine.rules["ffn"]) == ("mine", "here", ("tp_kv", "tp_q"))
    assert rule_set_from_dict(mine.to_dict()) == mine
    assert mine.to_dict()["rules"]["ffn"] == ["tp"]


BATCH = "  batch: [dp_replicate, dp_shard]\n"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            "names: x\nrules:\n  batchs: [dp]\n  fnn: [tp]\n  ffn: [tpp]\n  s: cp\n",
            ["names: unknown field; did you mean 'name'", "rules.fnn: unknown name; did you mean 'ffn'?", "did you mean 'batch'",
             "rules.ffn.0='tpp': must be one of dp_replicate, dp_shard, cp, tp, ", "did you mean 'tp' ", "rules.s='cp': must be a list"],
        ),
        ("name: megatron\nrules:\n" + BATCH, ["name=megatron: is that of a shipped rule set with other rules"]),
        ("name: two words\nrules:\n" + BATCH, ["name='two words': must be letters, digits"]),
        (
            "rules:\n  s_key: [cp]\n  s_query: [cp]\n  head_dim: [tp]\n",
            ["batch: must be cut by the two data axes", "s_key: cannot be cut (a softmax needs all of them)",
             "head_dim: cannot be cut (a part of it leaves partial scores)", "cp: cuts s_query and s_key, which one operator has"],
        ),
        ("rules:\n" + BATCH + "  hidden: [tp]\n  ffn: [tp]\n", ["tp: cuts ffn and hidden, which one operator has"]),
        ("rules:\n  batch: [dp_replicate, dp_shard, cp]\n  s: [cp]\n", ["batch: must be cut", "cp: cuts batch and s"]),
        ("rules:\n" + BATCH + "  attn_kv_heads: [tp_kv]\n  attn_q_per_kv: [tp_q]\n", ["copies (kv_copies) must be cut as they are read"]),
    ],
)  # fmt: skip
def test_a_file_says_all_its_faults_at_once(tmp_path, text, sentences):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_rule_set(path)
    assert not [sentence for sentence in sentences if sentence not in refused.value.full], refused.value.full


def test_no_shipped_rule_set_has_a_fault():
    assert [fault for name in list_rule_sets() for fault in faults_of(load_rule_set(name))] == []


# --- which degrees they admit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "admitted"),
    [
        ("megatron", {(1, 1), (1, 2), (1, 8), (1, 16), (2, 1), (2, 8), (16, 1), (16, 2), (16, 16)}),
        ("ddp", {(1, 1)}),
        ("ulysses", {(1, 1), (2, 1), (8, 1)}),  # eight key-value heads
    ],
)
def test_degrees_follow_from_what_is_cut(name, admitted):
    """Pairs are (cp, tp): an unused axis has one rank, and degrees divide what they cut. Llama 3 8B has 32 heads, 8 for keys and values."""
    tried = {(cp, tp) for cp in (1, 2, 8, 16, 3) for tp in (1, 2, 8, 16, 3)}
    degrees = {(cp, tp) for cp, tp in tried if admits(load_rule_set(name), load_model("llama-3-8b"), 8192, cp=cp, tp=tp)}
    assert degrees & admitted == admitted
    assert degrees == admitted or name == "megatron"
    assert not any(3 in pair for pair in degrees)


def test_axes_that_cut_one_dim_divide_it_together():
    rules = rule_set_from_dict({"rules": {"attn_kv_heads": ["tp_kv", "cp"], "s": ["cp"], "ffn": ["tp"]}})
    model = load_model("llama-3-8b")
    assert admits(rules, model, 8192, cp=2, tp=4)
    assert not admits(rules, model, 8192, cp=4, tp=4)
    condition = broken(rules, model, 8192, cp=4, tp=4)
    assert condition is not None
    assert condition.reason == "tp*cp does not divide num_key_value_heads=8"


def _folder(path):
    path.mkdir()
    return path
