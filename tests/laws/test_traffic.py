"""Known forms of parallelism fall out of the algebra: their collectives and bytes, with no code of their own."""

import pytest

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import RuleSet, apply_rules, load_rule_set
from perfmodel.parallel.algebra.sharding import gradient_layout, output_layout, redistribute
from perfmodel.workload.graph import TensorRole
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Pass
from tests.laws.volumes import amount_bytes, derivation_of, group_size, layer_traffic, total_wire_bytes, totals
from tests.parallel.small_graphs import SIZE, operator, small_graph

TP8 = {"tp_kv": 8}
SERIAL_MODELS = ["gpt3-175b", "llama-3-8b", "llama-3-70b", "gpt2", "gemma-2-9b", "opt-13b", "qwen2.5-7b", "mistral-7b"]


def residual_bytes(model: str, seq_len: int = 2048) -> float:
    """2bsh: the residual stream of one sequence in bf16."""
    return 2.0 * seq_len * load_model(model).hidden_size


# --- tensor and sequence parallelism ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SERIAL_MODELS)
@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("dropout", [True, False])
def test_megatron_is_two_all_reduces_each_way_and_layer(model, attention, dropout):
    """Shoeybi et al. 2019: each of 2bsh bytes."""
    derivation = derivation_of(model, "megatron", attention=attention, dropout=dropout)
    for phase in (Pass.FORWARD, Pass.BACKWARD):
        sent = layer_traffic(derivation, phase, TP8)
        assert [(kind, num_bytes) for kind, _, num_bytes in sent] == [("all_reduce", residual_bytes(model))] * 2


@pytest.mark.parametrize("model", SERIAL_MODELS)
def test_sequence_parallel_is_reduce_scatter_and_all_gather(model):
    """Korthikanti et al. 2022: two of each, forward and backward, each of 2bsh bytes."""
    derivation = derivation_of(model, "megatron-sp", dropout=True)
    for phase in (Pass.FORWARD, Pass.BACKWARD):
        sent = layer_traffic(derivation, phase, TP8)
        assert sorted((kind, num_bytes) for kind, _, num_bytes in sent) == [
            *[("all_gather", residual_bytes(model))] * 2,
            *[("reduce_scatter", residual_bytes(model))] * 2,
        ]


@pytest.mark.parametrize("model", [*SERIAL_MODELS, "falcon-7b", "gpt-neox-20b"])
@pytest.mark.parametrize("sizes", [{"tp_kv": 2}, {"tp_kv": 8}, {"tp_kv": 4, "tp_q": 4}, {"tp_kv": 2, "cp": 4}, {"tp_q": 8}], ids=str)
def test_sequence_parallel_sends_the_same_bytes(model, sizes):
    one, other = (derivation_of(model, rules) for rules in ("megatron", "megatron-sp"))
    assert total_wire_bytes(one, sizes) == pytest.approx(total_wire_bytes(other, sizes), rel=1e-12)


@pytest.mark.parametrize("rules", ["megatron", "megatron-sp", "ulysses", "ddp"])
def test_one_chip_sends_nothing(rules):
    derivation = derivation_of("llama-3-8b", rules)
    assert totals(derivation, {}) == {}
    assert total_wire_bytes(derivation, {}) == 0


def test_plain_data_parallelism_sends_no_activations():
    derivation = derivation_of("llama-3-8b", "ddp")
    assert derivation.traffic == ()
    assert {parameter.gradient_axes for parameter in derivation.parameters} == {frozenset(("dp_replicate", "dp_shard"))}


def test_norm_and_bias_gradients_are_partial_on_tp_under_sequence_parallelism_only():
    for rules, axes in (("megatron", set()), ("megatron-sp", {"tp_kv", "tp_q"})):
        parameters = {p.name: p for p in derivation_of("gpt2", rules).parameters}
        for name in (
            "attention_norm.weight",
            "mlp_norm.bias",
            "o_proj.bias",
            "down_proj.bias",
            "final_norm.weight",
            "position_embedding.weight",
        ):
            assert parameters[name].gradient_axes & {"tp_kv", "tp_q"} == axes, name
        for name in ("q_proj.weight", "q_proj.bias", "up_proj.bias", "down_proj.weight", "embedding.weight"):
            assert parameters[name].gradient_axes == {"dp_replicate", "dp_shard", "cp"}, name


# --- parallel blocks, tied embeddings -------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "backward"), [("falcon-7b", 1), ("gpt-neox-20b", 2)])
def test_a_parallel_block_reduces_attention_and_mlp_together(model, backward):
    """Two partial sums are added before they are reduced: one all-reduce forward. With one norm for both also one backward."""
    derivation = derivation_of(model, "megatron")
    sizes = {"tp_q": 8} if model == "falcon-7b" else TP8
    size = residual_bytes(model)
    assert [(kind, b) for kind, _, b in layer_traffic(derivation, Pass.FORWARD, sizes)] == [("all_reduce", size)]
    assert [(kind, b) for kind, _, b in layer_traffic(derivation, Pass.BACKWARD, sizes)] == [("all_reduce", size)] * backward


def test_a_partial_sum_that_another_operator_reads_is_not_carried():
    first = operator("p[b,f] = x[b,h] * w[f,h]")
    second = operator("q[b,f] = x[b,h] * u[f,h]")
    total = operator("y[b,f] = p[b,f] + q[b,f]")
    row = {"h": ("tp_kv",)}
    shardings = {"p": row, "q": row, "y": {}, "z": {}}
    alone = derive(small_graph(first, second, total), {k: shardings[k] for k in "pqy"})
    assert [(t.kind, t.tensor) for t in alone.traffic] == [(CollectiveKind.ALL_REDUCE, "p")]
    other = operator("z[b,f] = p[b,f]")
    read = derive(small_graph(first, second, total, other), shardings)
    assert [(t.kind, t.tensor) for t in read.traffic] == [(CollectiveKind.ALL_REDUCE, "p"), (CollectiveKind.ALL_REDUCE, "q")]


def test_tied_embeddings_are_one_parameter_with_two_uses():
    derivation = derivation_of("gpt2", "megatron")
    tied = [p for p in derivation.parameters if len(p.regions) > 1]
    assert [(p.name, p.regions) for p in tied] == [("embedding.weight", ("embedding", "head"))]
    assert tied[0].row_axes == {"tp_kv", "tp_q"}


# --- context parallelism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_context_parallel_gathers_keys_and_values(attention):
    """Forward all-gather of k and v, backward reduce-scatter of their gradients; all weights are partial on cp."""
    derivation = derivation_of("llama-3-8b", "megatron", attention=attention)
    kv_bytes = 2.0 * 2048 * 8 * 128
    for phase, kind in ((Pass.FORWARD, "all_gather"), (Pass.BACKWARD, "reduce_scatter")):
        assert sorted(layer_traffic(derivation, phase, {"cp": 4})) == [(kind, "k_rotary.out", kv_bytes), (kind, "v_proj.out", kv_bytes)]
    assert all("cp" in parameter.gradient_axes for parameter in derivation.parameters)


def test_ulysses_is_four_all_to_alls_each_way():
    """q, k, v and the output; of the local buffer (Jacobs et al. 2023)."""
    derivation = derivation_of("llama-3-8b", "ulysses")
    query, key = (2.0 * 2048 * heads * 128 / 4 for heads in (32, 8))
    for phase in (Pass.FORWARD, Pass.BACKWARD):
        sent = layer_traffic(derivation, phase, {"cp": 4})
        assert {kind for kind, _, _ in sent} == {"all_to_all"}
        assert sorted(num_bytes for _, _, num_bytes in sent) == [key, key, query, query]
    assert totals(derivation, {"cp": 4}).keys() == {"all_to_all"}


# --- grouped queries ------------------------------------------------------------------------------------------------

TP16 = {"tp_kv": 8, "tp_q": 2}


def test_grouped_queries_in_weight_form_send_no_activations():
    """tp 16, 8 key-value heads: the weights of k and v are partial on the second half of tp, reduced once a step."""
    derivation = derivation_of("llama-3-8b", "megatron")
    for phase in (Pass.FORWARD, Pass.BACKWARD):
        assert [kind for kind, _, _ in layer_traffic(derivation, phase, TP16)] == ["all_reduce"] * 2
    parameters = {p.name: p for p in derivation.parameters}
    for name in ("k_proj.weight", "v_proj.weight"):
        assert parameters[name].gradient_axes == {"dp_replicate", "dp_shard", "cp", "tp_q"}
        assert parameters[name].row_axes == {"tp_kv"}
    assert parameters["q_proj.weight"].row_axes == {"tp_kv", "tp_q"}


def test_grouped_queries_in_activation_form_reduce_key_and_value_gradients():
    """Each of bs(g/tp_kv)d elements, every microbatch; still one reduction of bsh for q, k and v together."""
    derivation = derivation_of("llama-3-8b", "megatron", weight_form_kv=False)
    assert [kind for kind, _, _ in layer_traffic(derivation, Pass.FORWARD, TP16)] == ["all_reduce"] * 2
    backward = {tensor: num_bytes for kind, tensor, num_bytes in layer_traffic(derivation, Pass.BACKWARD, TP16) if kind == "all_reduce"}
    one = 2.0 * 2048 * (8 / 8) * 128
    size = residual_bytes("llama-3-8b")
    assert backward == {"k_rotary.out": one, "v_proj.out": one, "attention_norm.out": size, "mlp_norm.out": size}
    assert {p.name: p for p in derivation.parameters}["k_proj.weight"].gradient_axes == {"dp_replicate", "dp_shard", "cp"}


def test_below_the_key_value_heads_both_forms_are_equal():
    forms = [derivation_of("llama-3-8b", "megatron-sp", weight_form_kv=form) for form in (True, False)]
    assert totals(forms[0], TP8) == totals(forms[1], TP8)


# --- other shardings ------------------------------------------------------------------------------------------------


def test_one_weird_trick():
    """Krizhevsky 2014: batch-cut layers before, a fully connected layer cut by its outputs over the same chips: all-gather into
    it, reduce-scatter back, and its weights need no reduction."""
    convolution = operator("a[b,c] = x[b,h] * k[c,h]")
    connected = operator("y[b,n] = a[b,c] * w[n,c]")
    derivation = derive(small_graph(convolution, connected), {"a": {"b": ("dp_shard",)}, "y": {"n": ("dp_shard",)}})
    assert [(t.kind, t.phase, t.amount.base, t.amount.axes) for t in derivation.traffic] == [
        (CollectiveKind.ALL_GATHER, Pass.FORWARD, 2.0 * SIZE * SIZE, frozenset()),
        (CollectiveKind.REDUCE_SCATTER, Pass.BACKWARD, 2.0 * SIZE * SIZE, frozenset()),
    ]
    assert {p.name: p.gradient_axes for p in derivation.parameters} == {"k": {"dp_shard"}, "w": frozenset()}


def test_a_free_slice_is_paid_backward():
    written = operator("a[b,h] = x[b,h] * k[h,b]")
    read = operator("y[b,h] = a[b,h]")
    derivation = derive(small_graph(written, read), {"a": {}, "y": {"b": ("cp",)}})
    assert [(t.kind, t.phase) for t in derivation.traffic] == [(CollectiveKind.ALL_GATHER, Pass.BACKWARD)]


def test_one_tensor_in_two_layouts_is_reduced_once():
    """Partial, needed cut and whole: reduce-scatter, then all-gather from the shard."""
    partial = operator("a[b,f] = x[b,h] * k[f,h]")
    cut = operator("y[b,f] = a[b,f]")
    unsharded = operator("z[b,f] = a[b,f]")
    derivation = derive(small_graph(partial, cut, unsharded), {"a": {"h": ("tp_kv",)}, "y": {"b": ("tp_kv",)}, "z": {}})
    forward = [(t.kind, t.amount.base, t.amount.axes) for t in derivation.traffic if t.phase is Pass.FORWARD]
    size = 2.0 * SIZE * SIZE
    assert forward == [(CollectiveKind.REDUCE_SCATTER, size, frozenset()), (CollectiveKind.ALL_GATHER, size, frozenset())]


def test_hidden_cut_everywhere_reduces_statistics_in_every_norm():
    """A rule set that is not shipped: partial projections become all-reduces, norms send one fp32 number a row each way."""
    derivation = derivation_of(
        "llama-3-8b", RuleSet(name="hidden", rules={"batch": ("dp_replicate", "dp_shard"), "hidden": ("tp_kv",)}, source="")
    )
    norms = [t for t in derivation.traffic if t.tensor.endswith("norm.out") and t.kind is CollectiveKind.ALL_REDUCE]
    assert {(t.phase, amount_bytes(t.amount, {"tp_kv": 8})) for t in norms} == {(Pass.FORWARD, 4.0 * 2048), (Pass.BACKWARD, 4.0 * 2048)}
    assert {p.gradient_axes for p in derivation.parameters if "norm" in p.name} == {frozenset(("dp_replicate", "dp_shard"))}


def test_the_pipeline_boundary_has_the_residual_layout():
    """Whole over tp, so tp equal copies would be sent; cut over tp under sequence parallelism. Never partial."""
    for rules, cut in (("megatron", ("cp",)), ("megatron-sp", ("cp", "tp_kv", "tp_q"))):
        derivation = derivation_of("llama-3-8b", rules)
        boundary = derivation.left[derivation.graph.boundary]
        assert boundary.cuts == (("dp_replicate", "dp_shard"), cut, ())
        assert boundary.partial == frozenset()
        assert derivation.left["block_output.out"] == boundary


# --- Llama-3-8B, fp32, one sequence of 8192: torch's counts of the same plans --------------------------------------------


def residual_stream_only(traffic) -> bool:
    return traffic.tensor != "loss"


def test_llama_tensor_parallel_counts():
    """130 all-reduces of bsh: 2 + 2 in each of 32 layers, the embedding and the head's input; and 3 of bs in the loss."""
    derivation = derivation_of("llama-3-8b", "megatron", seq_len=8192, itemsize=4.0)
    count, num_bytes = totals(derivation, TP8, residual_stream_only)["all_reduce"]
    assert (count, round(num_bytes / 1e9, 2)) == (130, 17.45)
    assert totals(derivation, TP8, lambda t: t.tensor == "loss") == {"all_reduce": (3, 3 * 8192 * 4.0)}


def test_llama_sequence_parallel_counts():
    derivation = derivation_of("llama-3-8b", "megatron-sp", seq_len=8192, itemsize=4.0)
    sent = totals(derivation, TP8, residual_stream_only)
    assert {kind: (count, round(b / 1e9, 2)) for kind, (count, b) in sent.items()} == {
        "reduce_scatter": (130, 17.45),
        "all_gather": (130, 17.45),
    }
    assert sum((32 if "layer" in p.regions else 1) for p in derivation.parameters if "tp_kv" in p.gradient_axes) == 65


def test_reducing_each_consumers_gradient_alone_gives_torchs_count():
    """Without adding gradients first there are 5 backward all-reduces a layer, not 2: torch's 226, 30.333 GB."""
    derivation = derivation_of("llama-3-8b", "megatron", seq_len=8192, itemsize=4.0)
    graph, shardings = derivation.graph, derivation.shardings
    count = totals(derivation, TP8, lambda t: t.phase is Pass.FORWARD and residual_stream_only(t))["all_reduce"][0]
    for producer in graph.operators:
        goal = output_layout(producer, shardings[producer.name]).resolved()
        for reader, i in graph.consumers(producer.output.tensor):
            steps = redistribute(gradient_layout(shardings[reader.name], reader.inputs[i]), goal)
            due = [step for step in steps if group_size(step.axes, TP8) > 1]
            count += len(due) * (32 if reader.layer == "layer" else 1)
    assert count == 226
    assert round(count * 8192 * 4096 * 4 / 1e9, 3) == 30.333


def test_every_operator_with_a_gradient_is_reached():
    """Indices have none: no traffic is derived for them."""
    derivation = derivation_of("gpt2", "megatron-sp")
    tensors = derivation.graph.tensors
    assert all(tensors[t.tensor].role is TensorRole.ACTIVATION for t in derivation.traffic)


@pytest.mark.parametrize("rules", ["megatron", "megatron-sp", "ulysses", "ddp"])
@pytest.mark.parametrize("model", ["gpt2", "falcon-7b", "gemma-2-9b", "llama-3-8b"])
def test_parameters_are_the_models(rules, model):
    """Every stored matrix, once, whatever the sharding."""
    config = load_model(model)
    graph = build_graph(config, seq_len=1024, attention="flash", dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    parameters = derive(graph, apply_rules(graph, load_rule_set(rules))).parameters
    assert sum(p.num_elements * (config.num_hidden_layers if "layer" in p.regions else 1) for p in parameters) == config.num_parameters


@pytest.mark.parametrize("axis", ["cp", "tp_kv", "tp_q", "tp_kv tp_q", "cp tp_kv tp_q"])
@pytest.mark.parametrize("rules", ["megatron", "megatron-sp", "ulysses"])
def test_an_axis_of_size_one_might_as_well_not_be_in_the_rules(rules, axis):
    """Which is why no formula has a case for it."""
    full = load_rule_set(rules)
    struck = RuleSet(name="", rules={k: tuple(a for a in axes if a not in axis.split()) for k, axes in full.rules.items()}, source="")
    sizes = {name: size for name, size in {"cp": 2, "tp_kv": 4, "tp_q": 2}.items() if name not in axis.split()}
    one, other = derivation_of("llama-3-8b", full), derivation_of("llama-3-8b", struck)
    assert totals(one, sizes) == totals(other, sizes)
    for mine, theirs in zip(one.parameters, other.parameters, strict=True):
        assert mine.gradient_axes - set(axis.split()) == theirs.gradient_axes
