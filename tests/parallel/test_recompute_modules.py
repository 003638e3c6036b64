"""Parts of layers that run again, by name."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.choices import MODULES
from perfmodel.parallel.plan_file import read_plan, write_plan
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph

JOB = {"model": "deepseek-v2-lite", "cluster": "dgx-h100", "chips": 16, "global_batch": 32, "seq_len": 4096, "profile": "megatron"}
PLAN = JOB | {"pp": 2, "ep": 8, "zero": 1}


def activations(**knobs):
    prediction = perfmodel.predict(**PLAN | knobs)
    return prediction.memory["activations"], prediction.step_time


def test_modules_are_operators_of_layers():
    names = set()
    for model in ("deepseek-v3", "llama-3-8b"):
        graph = build_graph(load_model(model), seq_len=64, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
        names |= {op.name_in_layer for op in graph.operators} | {op.group for op in graph.operators}
    assert {operator for operators in MODULES.values() for operator in operators} <= names


def test_each_frees_memory_and_takes_time():
    kept, time = activations()
    for modules in ("layernorm", "mla_up_proj", "moe_act", "moe"):
        freed, longer = activations(recompute_modules=modules)
        assert freed < kept
        assert longer > time
    both, _ = activations(recompute_modules="moe_act,layernorm")
    assert both < activations(recompute_modules="moe_act")[0]


def test_what_of_a_layer_they_free():
    """moe_act: k f B a token. Layers of the first stage of two, with three microbatches of 1f1b under way at most two."""
    model = load_model("deepseek-v2-lite")
    kept, _ = activations()
    freed, _ = activations(recompute_modules="moe_act")
    layers = model.num_hidden_layers // 2
    layer_bytes = 4096 * model.parts.experts.top_k * model.parts.experts.width * 2.0
    assert (kept - freed) / layer_bytes == pytest.approx(2 * layers, abs=2 * 2.0)


def test_they_are_in_the_plan_and_its_file(tmp_path):
    plan = perfmodel.predict(**PLAN, recompute_modules=["moe_act", "layernorm"]).plan
    assert plan.recompute_operators == (*MODULES["layernorm"], *MODULES["moe_act"])
    write_plan(plan, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert again == plan
    assert perfmodel.predict(tmp_path / "plan.yaml").step_time == perfmodel.predict(**PLAN, recompute_modules="moe_act,layernorm").step_time


def test_a_search_has_them_too():
    search = perfmodel.find_plans(**JOB, recompute_modules="moe_act", pp=1, tp=1, cp=1, top=2)
    assert {plan.plan.recompute_operators for plan in search.plans} == {MODULES["moe_act"]}


@pytest.mark.parametrize(
    "knobs, sentence",
    [
        ({"recompute_modules": "moe_acts"}, "'moe_acts': is no module.*did you mean 'moe_act'"),
        ({"recompute_modules": "moe", "recompute": "full"}, "recompute=full: recompute_modules say"),
        ({"recompute_modules": "moe", "model": "llama-3-8b", "ep": 1}, "recompute_modules=moe_act: no layer of llama-3-8b has it"),
        ({"recompute_modules": 3}, "recompute_modules=3: must name modules"),
    ],
)
def test_what_is_no_module_is_refused(knobs, sentence):
    with pytest.raises(InputError, match=sentence):
        perfmodel.predict(**PLAN | knobs)
