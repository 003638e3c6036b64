"""An engine's rewrites of the graph of a step: calls of several products, kernels in that of a neighbour, biases inside products."""

import pytest

from perfmodel.frameworks.rewrites import with_engine
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.workload.step_graph import step_graph
from perfmodel.workload.work import Product, Stream
from tests.execute.jobs import tiny


def rewritten(name, *, fuses=True, low_parts=()):
    graph = step_graph(tiny(name), takes_prompts=False, element_bytes=2.0)
    return with_engine(derive(graph, apply_rules(graph, rule_set_of("megatron"))), fuses=fuses, low_parts=low_parts).graph


def works(graph, kind):
    return [(op.name, work) for op in graph.operators for work in op.forward if isinstance(work, kind)]


def test_products_of_one_tensor_are_one_call():
    calls = {name: work.call for name, work in works(rewritten("llama"), Product)}
    assert calls["q_proj"] == calls["k_proj"] == calls["v_proj"] != calls["o_proj"]
    assert calls["gate_proj"] == calls["up_proj"] != calls["down_proj"]
    assert not any(work.call for _, work in works(rewritten("llama", fuses=False), Product))


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ("llama", {"k_rotary", "attention_add", "gate_product", "mlp_add"}),
        ("qwen3", {"k_norm", "k_rotary", "attention_add", "gate_product", "mlp_add"}),
        ("gpt2", {"attention_add", "mlp_add"}),
        ("falcon", {"k_rotary", "parallel_add", "block_add"}),
    ],
)
def test_kernels_that_a_neighbour_launches(model, fused):
    assert {name for name, work in works(rewritten(model), Stream) if work.is_fused} == fused
    assert not any(work.is_fused for _, work in works(rewritten(model, fuses=False), Stream))


def test_biases_are_added_by_the_product_before_them():
    graph = rewritten("gpt2")
    biases = [op for op in graph.operators if op.settings.get("function") == "bias"]
    assert biases
    assert not any(op.forward for op in biases)


def test_a_format_of_weights_is_one_of_parts():
    low = {name for name, work in works(rewritten("mixtral", low_parts={"attention"}), Product) if work.is_low}
    assert low == {"q_proj", "k_proj", "v_proj", "o_proj"}
