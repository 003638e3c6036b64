"""Mamba-2 and gated delta networks: counts of published models, what is kept, how cp and tp cut them, predictions and searches."""

from functools import cache

import pytest

from perfmodel.cost.memory.live import kept_tensors
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.degrees import broken
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import RuleSet, apply_rules, rule_set_of
from perfmodel.workload.layer_specs import DeltaNet, LayerSpec, Mamba
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict, sweep_all
from tests.laws.test_batch_row_is_single_plan import assert_cells_equal_single_plans

SEQ = 4096


def layer_parameters(graph):
    """Return the parameters that a layer is the first to read."""
    return sum(tensor.num_elements for tensor in graph.parameters if graph.consumers(tensor.name)[0][0].layer == "layer")


@cache
def graph_of(name):
    return build_graph(load_model(name), seq_len=SEQ, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)


def flops_of(graph, operator):
    return graph.operator(operator).flops / SEQ


def test_a_mamba_layer_of_nemotron_h_8b():
    graph = graph_of("nemotron-h-8b")
    assert layer_parameters(graph) == 109_640_064
    assert graph.num_parameters == load_model("nemotron-h-8b").num_parameters
    heads, width, groups, state, chunk = 128, 64, 8, 128, 128
    assert flops_of(graph, "layer.scan") == chunk * groups * state + chunk * heads * width + 4 * heads * width * state
    derivation = derive(graph, apply_rules(graph, rule_set_of("ddp")))
    kept = {
        saved.tensor: saved.amount.base / SEQ for saved in kept_tensors(derivation, set(), set(), alone=set()) if saved.region == "layer"
    }
    inner = heads * width
    assert kept["layer.mixed.out"] == 2 * (2 * inner + 2 * groups * state + heads)  # all that the first product made
    assert kept["layer.scan.out"] == kept["layer.mamba_norm.out"] == 2 * inner
    assert not {"layer.conv.out", "layer.gate.out", "layer.steps.out"} & kept.keys()


def test_layers_without_a_mixer_or_a_feed_forward():
    graph = graph_of("nemotron-h-8b")
    names = {layer: [operator.name_in_layer for operator in graph.operators_of(layer)] for layer in ("dense_layer", "attention_layer")}
    assert names["dense_layer"] == ["block_input", "mlp_norm", "up_proj", "activation", "down_proj", "mlp_add", "block_output"]
    assert "o_proj" in names["attention_layer"]
    assert "up_proj" not in names["attention_layer"]


def test_a_gated_delta_layer_of_qwen3_next():
    graph, model = graph_of("qwen3-next-80b-a3b"), load_model("qwen3-next-80b-a3b")
    assert graph.num_parameters == model.num_parameters
    heads, d, chunk = 32, 128, 64
    inverse = 2 * 64 * 11  # of a triangle: Q^2 / 3 a token, with a contraction of whole entries
    assert flops_of(graph, "layer.scan") == heads * (5 * chunk * d + inverse + 6 * d * d)
    assert "attention_layer.attention_gate" in {operator.name for operator in graph.operators}
    derivation = derive(graph, apply_rules(graph, rule_set_of("ddp")))
    kept = {
        saved.tensor: saved.amount.base / SEQ for saved in kept_tensors(derivation, set(), set(), alone=set()) if saved.region == "layer"
    }
    assert kept["layer.in_proj_ba.out"] == 2 * 2 * heads  # strengths and decays, of a product of their own


def test_ranks_of_a_sequence_exchange_positions_for_groups():
    graph = graph_of("nemotron-h-8b")
    derivation = derive(graph, apply_rules(graph, rule_set_of("megatron-sp")))
    moved = {(row.tensor, row.kind) for row in derivation.traffic if row.region == "layer" and row.axes == {"cp"}}
    tensors = ("gate", "mixed", "steps", "mamba_norm")
    assert moved == {(f"layer.{name}.out", CollectiveKind.ALL_TO_ALL) for name in tensors}
    model = load_model("nemotron-h-8b")
    assert broken(rule_set_of("megatron-sp"), model, SEQ, cp=2, tp=4) is None
    fault = broken(rule_set_of("megatron-sp"), model, SEQ, cp=2, tp=8)
    assert fault is not None
    assert fault.reason == "tp*cp does not divide the groups of heads with a state=8"


def test_or_pass_on_their_states():
    """A rule set that cuts positions all the way: a rank sends the last positions of the convolution and its states."""
    shipped = rule_set_of("megatron-sp")
    rules = {**shipped.rules, "s_scan": ("cp",), "scan_groups": ("tp_kv", "tp_q")}
    graph = graph_of("nemotron-h-8b")
    derivation = derive(graph, apply_rules(graph, RuleSet(name="own", rules=rules, source="")))
    sent = [row for row in derivation.traffic if row.is_own and row.region == "layer"]
    assert {row.kind for row in sent} == {CollectiveKind.SEND_RECV}
    assert sorted({row.amount.base for row in sent}) == [3 * (8192 + 2048) * 2, 128 * 64 * 128 * 4]  # conv - 1 rows; H P N in float32
    assert len(sent) == 4  # forward and backward


def hybrid(**changes):
    state = Mamba(num_heads=16, head_dim=32, num_groups=4, state_size=16, conv_kernel=4, chunk_size=64)
    kinds = (
        LayerSpec(name="layer", count=3, mixer="mamba", feed_forward="none", turn="t"),
        LayerSpec(name="dense_layer", count=3, mixer="none", turn="t"),
        LayerSpec(name="attention_layer", count=2, feed_forward="none", turn="t"),
    )
    return make_model(**(LLAMA_LIKE | {"num_key_value_heads": 4, "mamba": state, "kinds": kinds} | changes))


def delta(**changes):
    state = DeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32, conv_kernel=4)
    kinds = (LayerSpec(name="layer", count=3, mixer="delta", turn="t"), LayerSpec(name="attention_layer", count=1, turn="t"))
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 4, "delta": state, "kinds": kinds, "attention_gate": True}
    return make_model(**(LLAMA_LIKE | sizes | changes))


@pytest.mark.parametrize("model", [hybrid(), delta()], ids=["mamba", "delta"])
def test_predictions(model):
    estimator = estimator_of(make_job(model), chips=8, node=8)
    assert estimator.programs.graph("flash").num_parameters == model.num_parameters
    one, tp, cp = (predict(estimator, zero=0, **knobs) for knobs in ({"dp_shard": 8}, {"tp": 4, "dp_shard": 2}, {"cp": 4, "dp_shard": 2}))
    assert one.hfu * one.step_time == pytest.approx(cp.hfu * cp.step_time, rel=1e-9)
    assert tp.memory["weights"] < one.memory["weights"] / 3
    assert 0 < one.mfu_causal < one.mfu_palm < 1
    recomputed = predict(estimator, dp_shard=8, zero=0, recompute="full")
    assert recomputed.memory["activations"] < one.memory["activations"]


@pytest.mark.parametrize("model", [hybrid(), pytest.param(delta(), marks=pytest.mark.slow)], ids=["mamba", "delta"])
def test_a_search(model):
    state = sweep_all(estimator_of(make_job(model, batch=8), chips=4, node=2))
    assert len(state.best.time.ids) > 500
    assert_cells_equal_single_plans(state.estimator, state, state.best.time.ids.tolist()[::83])


def test_tensor_parallelism_that_groups_do_not_divide_is_refused():
    with pytest.raises(InputError, match="the groups of heads with a state=4"):
        predict(estimator_of(make_job(hybrid(num_key_value_heads=8)), chips=8, node=8), tp=8)
