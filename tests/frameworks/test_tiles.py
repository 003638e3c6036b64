"""Losses and feed-forwards in pieces: what they keep, what lives at once, and what is computed again."""

import pytest

from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.rewrites import with_behaviour
from perfmodel.frameworks.tiles import CHUNK_TOKENS, logit_share
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, load_rule_set
from perfmodel.workload.graph import Graph
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import flops_of

TORCH = load_profile("torch-fsdp2")
SEQ_LEN = 2**18


def plain_graph() -> Graph:
    return build_graph(load_model("llama-3.1-8b"), seq_len=SEQ_LEN, attention="flash", dropout=False, activation_bytes=2, parameter_bytes=2)


def run(**behaviours: object) -> Graph:
    graph = plain_graph()
    return with_behaviour(derive(graph, apply_rules(graph, load_rule_set("ddp"))), TORCH.having(**behaviours)).graph


def backward_flops(graph: Graph, name: str) -> float:
    return sum(flops_of(work).at(1) for work in graph.operator(name).backward)


def test_a_chunked_loss_keeps_no_logits_and_computes_them_again():
    unchunked, chunked = run(), run(loss_form="chunked")
    assert unchunked.operator("cross_entropy").saved
    assert not chunked.operator("cross_entropy").saved
    assert chunked.tensors["logits"].itemsize == pytest.approx(2 * CHUNK_TOKENS / SEQ_LEN)
    assert chunked.operator("lm_head").saved == tuple(data for data in unchunked.operator("lm_head").saved if data.of == 0)
    assert backward_flops(chunked, "lm_head") == pytest.approx(1.5 * backward_flops(unchunked, "lm_head"))


def test_a_fused_loss_has_pieces_as_large_as_the_hidden_states_and_computes_nothing_again():
    """128,256 entries over 4,096: 32 pieces."""
    unfused, fused = run(), run(loss_form="fused")
    assert logit_share(plain_graph(), TORCH.having(loss_form="fused")) == 1 / 32
    assert backward_flops(fused, "lm_head") == backward_flops(unfused, "lm_head")


def test_a_tiled_feed_forward_runs_once_more_and_nothing_of_its_width_lies_whole():
    untiled, tiled = run(), run(tiles_mlp=True)
    tiles = SEQ_LEN // 4096
    for name in ("gate_proj.out", "up_proj.out", "activation.out", "gate_product.out"):
        assert tiled.tensors[name].itemsize == pytest.approx(2 / tiles), name
    assert tiled.tensors["down_proj.out"].itemsize == 2
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert backward_flops(tiled, name) == pytest.approx(1.5 * backward_flops(untiled, name)), name
    assert backward_flops(tiled, "o_proj") == backward_flops(untiled, "o_proj")
