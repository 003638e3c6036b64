"""A plan that says every operator's sharding by itself is the plan of the rule set that says the same, to the bit."""

from dataclasses import replace

import pytest

import perfmodel
from perfmodel.parallel.algebra.rules import RuleSet, load_rule_set
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph

JOB = {"cluster": "dgx-h100", "chips": 64, "global_batch": 128, "seq_len": 4096}


def written_out(name, model, attention="flash"):
    """The rule set as a map of every operator's own dims, with no rule for all but the batch."""
    rules = load_rule_set(name)
    graphs = [
        build_graph(load_model(model), seq_len=4096, attention=kernel, dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
        for kernel in ("flash", "unfused")
    ]
    by_operator = {
        op.name: {name: rules.cut(op.name, name) for name in map(op.logical_name, op.dims)} for graph in graphs for op in graph.operators
    }
    return RuleSet(name=f"{name}-by-operator", rules={"batch": rules.rules["batch"]}, source="", operators=by_operator)


def facts(prediction):
    kept = ("step_time", "parts", "memory", "memory_moment", "mfu_palm", "hfu", "verdict", "not_runnable")
    return {name: getattr(prediction, name) for name in kept}


@pytest.mark.parametrize(
    "knobs",
    [
        {"tp": 4},
        {"tp": 8, "pp": 4, "micro_batch": 2, "recompute": "full"},
        {"tp": 2, "cp": 2, "dp_shard": 16, "zero": 3},
        {"tp": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 4, "zero": 1},
        {"tp": 8, "attention": "unfused", "recompute": "selective", "optimizer": "sgd", "precision": "fp32"},
        {"cp": 8, "pp": 2, "schedule": "gpipe", "zero": 2, "dp_shard": 4, "precision": "bf16", "optimizer": "momentum"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("rules", "profile"), [("megatron", "megatron"), ("megatron-sp", "torch-fsdp2"), ("megatron-sp", "nanotron"), ("ulysses", "deepspeed")]
)
def test_every_operator_by_itself_is_the_rule_set(knobs, rules, profile):
    if rules == "ulysses" and "tp" in knobs:
        knobs = {name: value for name, value in knobs.items() if name != "tp"} | {"cp": 4}
    uniform = perfmodel.predict(model="llama-3-8b", **JOB, profile=profile, rules=rules, **knobs)
    by_operator = perfmodel.predict(model="llama-3-8b", **JOB, profile=profile, rules=written_out(rules, "llama-3-8b"), **knobs)
    assert facts(by_operator) == facts(uniform)


def test_one_operator_may_differ(tmp_path):
    """The feed-forward whole on every rank, everything else as Megatron has it: more work, fewer collectives; the file says it all."""
    megatron = load_rule_set("megatron")
    unsharded = {name: {"ffn": ()} for name in ("gate_proj", "up_proj", "activation", "gate_product", "down_proj")}
    mine = replace(megatron, name="whole-ffn", operators=unsharded)
    before = perfmodel.predict(model="llama-3-8b", **JOB, profile="megatron", rules="megatron", tp=4)
    after = perfmodel.predict(model="llama-3-8b", **JOB, profile="megatron", rules=mine, tp=4)
    assert after.parts["forward"] > 1.5 * before.parts["forward"]
    assert after.parts["tensor_parallel_communication"] < 0.75 * before.parts["tensor_parallel_communication"]
    assert after.memory["weights"] > 2 * before.memory["weights"]
    path = tmp_path / "plan.yaml"
    perfmodel.write_plan(after.plan, path)
    assert perfmodel.read_plan(path) == after.plan
    assert facts(perfmodel.predict(path)) == facts(after)


def test_faults_of_an_operators_own_map_are_reported_at_once(tmp_path):
    path = tmp_path / "mine.yaml"
    operators = "{up_prjo: {ffn: [tp]}, down_proj: {vocab_in: [tp]}, gate_proj: {ffn: [tq]}}"
    path.write_text(f"rules: {{batch: [dp_replicate, dp_shard]}}\noperators: {operators}\n")
    with pytest.raises(perfmodel.InputError, match=r"operators.gate_proj.ffn.0='tq': must be one of dp_replicate, .*did you mean 'tp_q'"):
        load_rule_set(path)
    path.write_text(path.read_text().replace("tq", "tp"))
    with pytest.raises(perfmodel.InputError) as error:
        load_rule_set(path)
    assert "up_prjo: no operator of a model; did you mean 'up_proj'" in str(error.value)
    assert "down_proj.vocab_in: down_proj has no such dim; it has" in str(error.value)


def test_operators_of_all_kinds_of_layers_are_known(tmp_path):
    path = tmp_path / "mine.yaml"
    operators = "{q_a_proj: {s_res: [cp]}, in_proj: {state_groups: [tp]}, experts_up: {experts: []}, index: {s_query: [cp]}}"
    path.write_text(f"rules: {{batch: [dp_replicate, dp_shard]}}\noperators: {operators}\n")
    assert set(load_rule_set(path).operators) == {"q_a_proj", "in_proj", "experts_up", "index"}
