"""Launches of a layer by the host, and by CUDA graphs."""

import pytest

from perfmodel.cost.program import graph_launches, graph_parts
from perfmodel.frameworks.options import GRAPH_SCOPES
from perfmodel.frameworks.profile import load_profile
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph


def graph_of(name):
    return build_graph(load_model(name), seq_len=128, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)


def test_parts_of_a_layer_are_those_of_megatrons_scopes():
    graph = graph_of("qwen3-30b-a3b")
    parts = graph_parts(graph)
    assert {parts[name] for name in ("attention_norm", "q_proj", "attention", "o_proj", "attention_add")} == {"attn"}
    assert {parts[name] for name in ("mlp_norm", "router", "route")} == {"moe_router"}
    assert parts.keys().isdisjoint(("experts_up", "experts_down", "mlp_add", "lm_head", "token_embedding"))
    assert graph_parts(graph_of("llama-3-8b"))["down_proj"] == "mlp"


@pytest.mark.parametrize(
    ("scope", "share"), [((), 1.0), (("moe_router",), 0.9), (("attn", "moe_router"), 0.45), (GRAPH_SCOPES, 0.45)], ids=str
)
def test_what_a_graph_launches_takes_the_host_next_to_nothing(scope, share):
    profile, graph = load_profile("megatron"), graph_of("qwen3-30b-a3b")
    ungraphed = graph_launches(graph, profile)
    assert graph_launches(graph, profile.having(graph_scope=scope)) <= share * ungraphed
