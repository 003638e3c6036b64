"""Graphs of serving steps: operators that read and write a cache, and what counts their rows."""

from math import prod

import pytest

from perfmodel.workload.kinds.cache import state_bytes, state_shapes
from perfmodel.workload.models import load_model
from perfmodel.workload.step_graph import LAST, step_graph
from perfmodel.workload.work import CacheAttention, RoutedExperts, Stream
from tests.execute.jobs import tiny


def test_rows_with_logits_are_counted_apart():
    graph = step_graph(tiny("llama"), takes_prompts=True, element_bytes=2.0)
    assert {op.roles.per_sample for op in graph.operators_of("head")} == {(LAST,)}
    assert {op.roles.per_sample for op in graph.operators_of("layer")} == {("b",)}
    (gathered,) = graph.operator(graph.loss).traffic
    assert gathered.over == ("v",)


@pytest.mark.parametrize(("name", "mixer"), [("nemotron-h-8b", "mamba"), ("qwen3-next-80b-a3b", "delta")])
@pytest.mark.parametrize("takes_prompts", [False, True])
def test_states_are_read_and_written_once(name, mixer, takes_prompts):
    """Sequences that decode take them one token further; the scan is of prompts."""
    model = load_model(name)
    graph = step_graph(model, takes_prompts=takes_prompts, element_bytes=2.0)
    update = next(op for op in graph.operators if op.kind == "state_update")
    (stream,) = update.forward
    assert isinstance(stream, Stream)
    assert update.size(("m",)) * stream.elements[-1][0] == prod(state_shapes(model, mixer)[1])
    moved = sum(size.itemsize * size.extent[-1][0] * update.size(("m",)) for size in stream.accesses)
    assert moved == 2 * state_bytes(model, mixer)
    scans = [op for op in graph.operators if op.kind.endswith("_scan")]
    assert all(bool(op.forward) is takes_prompts for op in scans)


def test_attention_sees_a_window_or_what_an_indexer_chooses():
    def attention(model):
        graph = step_graph(model, takes_prompts=False, element_bytes=2.0)
        return next(work for op in graph.operators for work in op.forward if isinstance(work, CacheAttention))

    assert (attention(tiny("llama")).window, attention(tiny("gemma2")).window, attention(tiny("gemma2")).windowed) == (0, 8, 0.5)
    sparse = attention(load_model("deepseek-v3.2"))
    assert (sparse.window, sparse.windowed, sparse.index, sparse.latent) == (2048, 1.0, (64, 128), (512, 64))
    assert (sparse.head_dim, sparse.value_head_dim) == (576, 512)


def test_experts_are_one_call_with_all_their_weights():
    model = tiny("gpt-oss")
    graph = step_graph(model, takes_prompts=False, element_bytes=2.0)
    op = next(op for op in graph.operators if op.kind == "routed_experts")
    (work,) = op.forward
    assert isinstance(work, RoutedExperts)
    assert (work.num_experts, work.top_k, work.width, work.matrices) == (8, 2, 24, 2)
    assert graph.num_parameters == model.num_parameters
