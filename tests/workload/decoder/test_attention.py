"""Attention with chunks, sinks and a gate: parameters, work and what is kept, counted by hand."""

import pytest

from perfmodel.cost.memory.live import kept_tensors
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.workload.transformer import build_graph
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict

SEQ = 256
SIZES = {"hidden": 512, "heads": 8, "head_dim": 64}


def graph_of(attention="flash", **changes):
    model = make_model(**(LLAMA_LIKE | changes))
    graph = build_graph(model, seq_len=SEQ, attention=attention, dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
    assert graph.num_parameters == model.num_parameters
    return graph


def kept_of(graph, rules="ddp"):
    derivation = derive(graph, apply_rules(graph, rule_set_of(rules)))
    return {saved.tensor: saved.amount.base / SEQ for saved in kept_tensors(derivation, set(), set(), alone=set())}


def test_chunks_count_half_of_their_own_squares():
    causal, chunked = graph_of().operator("attention"), graph_of(attention_chunk=64).operator("attention")
    assert causal.flops == 4 * 8 * SEQ * SEQ * 64 / 2
    assert chunked.flops == 4 * 8 * (SEQ / 64) * (64 * 64 / 2) * 64
    every_fourth = graph_of(attention_chunk=64, full_attention_every=4).operator("attention")
    assert every_fourth.flops == 0.75 * chunked.flops + 0.25 * causal.flops
    assert graph_of(attention_chunk=SEQ).operator("attention").flops == causal.flops


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_sinks_are_a_number_for_each_head(attention):
    plain, sinks = graph_of(attention), graph_of(attention, attention_sinks=True)
    assert sinks.num_parameters - plain.num_parameters == 8 * 8  # layers, heads
    assert sinks.flops == plain.flops
    derivation = derive(sinks, apply_rules(sinks, rule_set_of("megatron-sp")))
    layout = next(parameter for parameter in derivation.parameters if parameter.name == "sinks")
    assert layout.row_axes == {"tp_kv", "tp_q"}  # with their heads
    assert layout.gradient_axes == {"dp_replicate", "dp_shard", "cp"}
    assert kept_of(sinks) == kept_of(plain)


def test_a_gate_is_one_more_product_and_keeps_two_more_tensors():
    plain, gated = graph_of(), graph_of(attention_gate=True)
    width = 8 * 64
    assert gated.num_parameters - plain.num_parameters == 8 * 512 * width
    assert gated.flops - plain.flops == 8 * 2 * SEQ * 512 * width
    more = {name: size for name, size in kept_of(gated).items() if name not in kept_of(plain)}
    assert more == {"q_gate_proj.out": 2 * width, "attention_gate.out": 2 * width}


def test_windows_of_a_prediction():
    """Sequences of chunks take less than whole ones, and attention that ranks share is balanced from either end."""
    model = make_model(**(LLAMA_LIKE | {"attention_chunk": 64, "attention_sinks": True, "attention_gate": True}))
    shared = predict(estimator_of(make_job(model), chips=4), cp=2, dp_shard=2)
    unchunked = predict(estimator_of(make_job(make_model(**(LLAMA_LIKE | {"attention_gate": True}))), chips=4), cp=2, dp_shard=2)
    assert shared.hfu * shared.step_time < unchunked.hfu * unchunked.step_time
    assert shared.mfu_causal < shared.mfu_palm


def test_flops_of_a_model_are_those_of_its_graph():
    """The FLOP counted by parameters equal those of the graph where both exist."""
    estimator = estimator_of(make_job(make_model(**LLAMA_LIKE)), chips=4)
    prediction = predict(estimator, dp_shard=4)
    counted = 3.0 * sum(flops.at(estimator.job.seq_len) for flops in estimator.programs.graph("flash").flops_by_length)
    per_token = prediction.mfu_causal * prediction.peak_flop_rate / prediction.tokens_per_second_per_chip
    vectors = 6.0 * (8 * 2 + 1) * 512  # weights of norms are counted as parameters alone
    assert counted / estimator.job.seq_len == pytest.approx(per_token - vectors, rel=1e-12)
