"""Modules that predict further tokens: counts of DeepSeek-V3 as published, the shared tables, and a search."""

import pytest

from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict, sweep_all
from tests.laws.test_batch_row_is_single_plan import assert_cells_equal_single_plans

SEQ = 4096


def test_deepseek_v3_counted_with_its_module():
    model = load_model("deepseek-v3")
    graph = build_graph(model, seq_len=SEQ, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
    assert model.num_parameters == 671_026_404_352
    assert graph.num_parameters == model.num_parameters + model.num_mtp_parameters
    assert round(model.num_mtp_parameters / 1e9, 2) == 11.61
    module = sum(operator.flops for operator in graph.operators if operator.name.startswith("mtp0."))
    assert round(module / SEQ / 1e9, 3) == 3.397
    assert round(3 * (graph.flops - module) / SEQ / 1e9, 2) == 250.45
    assert round(3 * graph.flops / SEQ / 1e9, 2) == 260.64  # what NVIDIA's published figures divide out to
    assert round(3 * sum(flops.at(1, causal=False) for flops in graph.flops_by_length) / SEQ / 1e9, 2) == 291.85


def small(**changes):
    return make_model(**(LLAMA_LIKE | {"num_mtp_layers": 1, "num_hidden_layers": 4} | changes))


def test_tables_are_the_models_own_and_read_by_both_ends():
    graph = build_graph(small(), seq_len=256, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
    layouts = {parameter.name: parameter for parameter in derive(graph, apply_rules(graph, rule_set_of("megatron-sp"))).parameters}
    assert layouts["embedding.weight"].regions == ("embedding", "head")  # summed over the first stage and the last
    assert layouts["lm_head.weight"].regions == ("head",)
    assert len(graph.consumers("lm_head.weight")) == 2


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_search_with_a_module(tied):
    state = sweep_all(estimator_of(make_job(small(tie_word_embeddings=tied), batch=8), chips=4, node=2))
    assert_cells_equal_single_plans(state.estimator, state, state.best.time.ids.tolist()[::17])


def test_a_module_costs_about_a_layer_and_a_head():
    """A step with a module against one with a layer more."""
    with_module, deeper = (
        predict(estimator_of(make_job(model, batch=64, seq_len=1024), chips=4, node=4), dp_shard=4, micro_batch=16)
        for model in (small(vocab_size=1024), small(num_mtp_layers=0, num_hidden_layers=5, vocab_size=1024))
    )
    assert deeper.step_time < with_module.step_time < 1.5 * deeper.step_time
    assert with_module.memory["weights"] > deeper.memory["weights"]
