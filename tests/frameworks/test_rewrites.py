"""Rewrites of operators by frameworks: in a decoder, in a network, in an imported module."""

from dataclasses import replace

import pytest
from torch import nn

from perfmodel import import_graph
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.rewrites import all_fused, with_behaviour
from perfmodel.parallel.algebra.derive import ShardedGraph, derive
from perfmodel.parallel.algebra.rules import apply_rules, load_rule_set
from perfmodel.workload.graph import Operator
from perfmodel.workload.imported.network import network_of
from perfmodel.workload.models import load_model
from perfmodel.workload.networks import load_network
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.unroll import unrolled

PLAIN = load_profile("torch-fsdp2").having(
    fuses_elementwise=False,
    fused_cross_entropy=False,
    softmax_keeps_float32=False,
    rms_norm_traffic=1.0,
    rotary_traffic=1.0,
)


def derivation_of(name: str = "gpt2", rules: str = "ddp", *, activation_bytes: float = 2.0) -> ShardedGraph:
    sizes = {"seq_len": 128, "dropout": True, "activation_bytes": activation_bytes, "parameter_bytes": 2.0}
    graph = build_graph(load_model(name), attention="unfused", **sizes)
    return derive(graph, apply_rules(graph, load_rule_set(rules)))


def run(derivation: ShardedGraph, **behaviours) -> ShardedGraph:
    return with_behaviour(derivation, PLAIN.having(**behaviours))


def operator(derivation: ShardedGraph, name: str) -> Operator:
    return derivation.graph.operator(name)


def test_a_bias_is_added_by_the_product_before_it_unless_a_sum_comes_between():
    assert operator(run(derivation_of()), "down_proj_bias").forward == ()
    assert operator(run(derivation_of(rules="megatron")), "down_proj_bias").forward != ()
    assert operator(run(derivation_of(rules="megatron")), "up_proj_bias").forward == ()


def test_a_bias_after_a_sum_is_added_by_the_product_on_a_group_of_one_rank():
    (work,) = operator(run(derivation_of(rules="megatron")), "down_proj_bias").forward
    assert work.only_across == {"tp_kv", "tp_q"}
    (chain,) = operator(run(derivation_of(rules="megatron"), fuses_elementwise=True), "down_proj_bias").forward
    assert not chain.only_across


def test_a_fused_chain_neither_writes_nor_keeps_what_lies_inside():
    """gpt2: dropout and the residual sum are one kernel; a SwiGLU's product takes the activation from registers."""
    plain, fused = (run(derivation_of(), fuses_elementwise=fuses) for fuses in (False, True))
    assert {name for name, tensor in fused.graph.tensors.items() if not tensor.is_stored} == {
        "embedding_add.out",
        "attention_dropout.out",
        "mlp_dropout.out",
    }
    assert len(operator(plain, "mlp_add").forward[0].accesses) == 3
    assert [data.of for data in operator(fused, "mlp_add").forward[0].accesses] == [0, 2]
    assert operator(fused, "mlp_dropout").saved == operator(plain, "mlp_dropout").saved
    plain, fused = (run(derivation_of("llama-3-8b"), fuses_elementwise=fuses) for fuses in (False, True))
    assert operator(plain, "gate_product").kept == ("activation.out", "up_proj.out")
    assert operator(fused, "gate_product").kept == ("up_proj.out",)
    assert operator(plain, "q_rotary").scratch
    assert not operator(fused, "q_rotary").scratch


@pytest.mark.parametrize(("itemsize", "bytes_kept"), [(2.0, 4.0), (4.0, 0.0)])
def test_a_softmax_in_float32_is_kept_with_its_cast(itemsize, bytes_kept):
    (kept,) = operator(run(derivation_of(activation_bytes=itemsize), softmax_keeps_float32=True), "softmax").saved
    assert (kept.itemsize, kept.of) == (bytes_kept, None if bytes_kept else 1)


def test_a_fused_loss_leaves_its_gradient_in_the_logits():
    apart, fused = (run(derivation_of(), fused_cross_entropy=fuses) for fuses in (False, True))
    assert [data.itemsize for data in operator(apart, "cross_entropy").saved] == [4.0]
    assert operator(fused, "cross_entropy").saved == ()
    assert [data.itemsize for data in operator(fused, "lm_head").saved] == [0.0, 2.0]


def test_more_traffic_is_more_bytes_of_every_access():
    norm = run(derivation_of("llama-3-8b"), rms_norm_traffic=2.0, rotary_traffic=3.0)
    assert {data.itemsize for data in operator(norm, "attention_norm").forward[0].accesses} == {4.0}
    assert {data.itemsize for data in operator(norm, "q_rotary").forward[0].accesses} == {6.0}
    assert operator(norm, "activation").forward == operator(run(derivation_of("llama-3-8b")), "activation").forward


def test_weights_gradients_are_added_in_place_but_for_tables():
    fused = run(derivation_of(), fuses_gradient_accumulation=True)
    assert {op.name for op in fused.graph.operators if op.makes_weight_gradients} == {"token_embedding", "position_embedding"}


# --- any graph ------------------------------------------------------------------------------------------------------


def without_names(op: Operator) -> tuple:
    return op.kind, op.forward, op.backward, op.saved, op.scratch, op.makes_weight_gradients


@pytest.mark.parametrize("rules", ["ddp", "megatron"])
@pytest.mark.parametrize("profile", ["megatron", "deepspeed", "nanotron", "torch-fsdp2"])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "falcon-7b", "gemma-2-9b"])
def test_layers_written_out_are_run_as_the_folded_layer(name, profile, rules):
    """Rewritten and written out is written out and rewritten."""
    sizes = {"seq_len": 128, "dropout": True, "activation_bytes": 2.0, "parameter_bytes": 2.0}
    folded = build_graph(load_model(name), attention="unfused", **sizes)
    flat, rule_set, behaviours = unrolled(folded, batch=2, layers=3), load_rule_set(rules), load_profile(profile)
    expected = unrolled(with_behaviour(derive(folded, apply_rules(folded, rule_set)), behaviours).graph, batch=2, layers=3)
    graph = with_behaviour(derive(flat, apply_rules(flat, rule_set)), behaviours).graph
    assert [op.name for op in graph.operators] == [op.name for op in expected.operators]
    for ours, theirs in zip(graph.operators, expected.operators, strict=True):
        assert without_names(ours) == without_names(theirs), ours.name
    assert {name for name, tensor in graph.tensors.items() if not tensor.is_stored} == {
        name for name, tensor in expected.tensors.items() if not tensor.is_stored
    }


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, images):
        return nn.functional.relu(self.convolution(images)).flatten(1)


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.linear = Block(), nn.Linear(32, 10)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.linear(self.block(images)), labels)


def test_networks_and_imported_modules_have_the_same_behaviours():
    network = load_network("bert-large", batch=2, seq_len=8, layers=1, hidden=16, heads=2, intermediate=32, vocabulary=20, positions=8)
    module = network_of(import_graph(Convolved, "float32[4,3,4,4] int64[4]")).network
    for graph, biases, losses in (
        (network, {"layer0.up_proj_bias", "decoder_bias"}, {"loss"}),
        (module, {"linear.bias"}, {"cross_entropy_loss"}),
    ):
        sized = replace(graph, compute_bytes=2.0, tensors={name: replace(tensor, itemsize=2.0) for name, tensor in graph.tensors.items()})
        unsharded = derive(sized, {op.name: {} for op in sized.operators})
        workload = run(unsharded, fuses_elementwise=True, fused_cross_entropy=True, fuses_gradient_accumulation=True)
        epilogues = {op.name for op in workload.graph.operators if op.backward and not op.forward}
        assert biases <= epilogues
        assert {op.name for op in workload.graph.operators if op.kind == "cross_entropy" and not op.saved} == losses
        assert {op.kind for op in workload.graph.operators if op.makes_weight_gradients} <= {"embedding"}
    # of the module: where a reduction comes between, bias and relu are one kernel
    apart = all_fused(sized, PLAIN.having(fuses_elementwise=True)).apart
    assert apart.operator("conv2d.bias").forward
    assert not apart.tensors["conv2d"].is_stored


def experts_of(name: str, dispatcher: str, **behaviours) -> dict[str, Operator]:
    graph = build_graph(
        load_model(name), seq_len=128, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0, dispatcher=dispatcher
    )
    workload = with_behaviour(
        derive(graph, apply_rules(graph, load_rule_set("megatron-sp"))), load_profile("megatron").having(**behaviours)
    )
    return {op.name: op for op in workload.graph.operators if op.layer == "layer"}


def test_kernels_of_an_exchange_put_rows_in_order_where_they_send_tokens_once():
    apart, inside = (experts_of("qwen3-30b-a3b", "flex", permutes_in_exchange=behaviour) for behaviour in (False, True))
    assert apart["sort"].forward
    assert apart["unsort"].backward
    assert [*inside["sort"].forward, *inside["sort"].backward, *inside["unsort"].forward, *inside["unsort"].backward] == []
    assert experts_of("qwen3-30b-a3b", "alltoall", permutes_in_exchange=True)["sort"].forward


def test_fused_experts_run_their_activation_and_biases_as_part_of_the_products():
    apart, fused = (experts_of("gpt-oss-120b", "alltoall", fuses_experts=behaviour) for behaviour in (False, True))
    assert apart["experts_activation"].forward
    assert [*fused["experts_activation"].forward, *fused["experts_activation"].backward] == []
    assert not fused["experts_down_bias"].forward


def test_megatron_adds_biases_of_experts_in_pieces():
    [work] = experts_of("gpt-oss-120b", "alltoall")["experts_down_bias"].forward
    assert [data.itemsize for data in work.accesses] == [28.0]
    [work] = experts_of("gpt-oss-120b", "alltoall", adds_expert_bias_apart=False)["experts_down_bias"].forward
    assert sum(data.itemsize or 2.0 for data in work.accesses) < 8.0
