"""Latent attention against DeepSeek-V3's published shape, integer by integer, and through prediction and search."""

from dataclasses import replace
from functools import partial

import pytest

from perfmodel.cost.compute import attention_time
from perfmodel.cost.estimate import evaluate_plan
from perfmodel.cost.memory.live import kept_tensors
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.rewrites import with_behaviour
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.workload.layer_specs import LatentAttention
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Pass
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict, profile_of, sweep_all
from tests.cost.machines import make_machine

SEQ = 4096
SMALL = LatentAttention(query_rank=96, key_value_rank=64, nope_head_dim=32, rope_head_dim=16, value_head_dim=24)


def v3_dense(**latent):
    """The dense layers of DeepSeek-V3."""
    widths = {"query_rank": 1536, "key_value_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128}
    sizes = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 64}
    others = {"intermediate_size": 18432, "vocab_size": 129280, "latent": LatentAttention(**(widths | latent))}
    return make_model(**(LLAMA_LIKE | sizes | others))


def layer_parameters(graph):
    """Return the parameters that a layer is the first to read."""
    return sum(tensor.num_elements for tensor in graph.parameters if graph.consumers(tensor.name)[0][0].layer == "layer")


def graph_of(model, attention="flash", seq_len=SEQ):
    return build_graph(model, seq_len=seq_len, attention=attention, dropout=False, activation_bytes=2.0, parameter_bytes=2.0)


def test_parameters_of_a_layer_are_the_published_ones():
    graph = graph_of(v3_dense())
    assert layer_parameters(graph) == 583_483_392
    mla = layer_parameters(graph) - 3 * 7168 * 18432 - 2 * 7168
    assert mla == 187_107_328 == 11_010_048 + 37_748_736 + 4_128_768 + 16_777_216 + 117_440_512 + 2_048


def test_without_a_latent_of_the_queries_they_are_made_of_the_hidden_state():
    graph = graph_of(v3_dense(query_rank=0))
    assert layer_parameters(graph) == 583_483_392 - 11_010_048 - 37_748_736 - 1536 + 7168 * 128 * 192


def test_flops_of_a_token_with_half_the_square_of_scores():
    graph = graph_of(v3_dense())
    layer = sum(operator.flops for operator in graph.operators_of("layer"))
    assert layer / SEQ == 1_334_706_176  # 1.3347 GF
    core = graph.operator("attention").flops / SEQ
    assert core == SEQ * 128 * (128 + 64 + 128)  # causal: s n (p + o + v)
    assert sum(flops.at(1, causal=False) for flops in graph.flops_by_length) - graph.flops == 61 * SEQ * core
    unfused = sum(operator.flops for operator in graph_of(v3_dense(), "unfused").operators_of("layer"))
    assert unfused / SEQ == layer / SEQ + core


def test_bytes_that_a_token_keeps():
    graph = graph_of(v3_dense())
    derivation = with_behaviour(derive(graph, apply_rules(graph, rule_set_of("ddp"))), profile_of("megatron"))
    kept = {saved.tensor: saved.amount.base / SEQ for saved in kept_tensors(derivation, set(), set(), alone=set())}
    norms = [name for name in kept if name.endswith("norm") and kept[name] == 4.0]
    assert kept["q_a_proj.out"] + kept["q_a_norm.out"] + kept["latent.out"] + kept["kv_a_norm.out"] == 8_320
    assert kept["q_rotary.out"] + kept["keys.out"] + kept["values.out"] == 131_072
    assert kept["attention.out"] + kept["attention"] == 33_280
    assert len(norms) == 5  # with that of the head
    assert not {"q_b_proj.out", "kv_b_proj.out", "rope_key.out"} & kept.keys()


def test_bytes_that_a_token_keeps_of_a_layer_with_experts():
    """The whole table: 572,032 with what norms and the router keep of each token besides."""
    graph = graph_of(load_model("deepseek-v3"))
    derivation = with_behaviour(derive(graph, apply_rules(graph, rule_set_of("ddp"))), profile_of("megatron"))
    kept = kept_tensors(derivation, set(), set(), alone=set())
    statistics, chosen = 4 * 4, 8 * 4  # of four norms in float32; the eight weights of its experts
    assert sum(saved.amount.base for saved in kept if saved.region == "layer") / SEQ == 572_032 + statistics + chosen


def test_tensor_parallel_ranks_gather_latents_and_hold_whole_down_projections():
    graph = graph_of(v3_dense())
    derivation = derive(graph, apply_rules(graph, rule_set_of("megatron-sp")))
    tp = {"tp_kv", "tp_q"}
    gathered = [row for row in derivation.traffic if row.region == "layer" and row.phase is Pass.FORWARD and row.kind == "all_gather"]
    latents = [row.elements.base / SEQ for row in gathered if row.axes == tp and row.operator in ("q_b_proj", "kv_b_proj", "keys")]
    assert latents == [1536, 512, 64]  # 2,112 a token in the place of h = 7,168
    cut = {parameter.name: parameter.row_axes | parameter.column_axes for parameter in derivation.parameters}
    names = ("q_a_proj", "kv_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    assert [cut[f"{name}.weight"] for name in names] == [set(), set(), tp, {"tp_kv"}, tp]
    on = {parameter.name: parameter.gradient_axes for parameter in derivation.parameters}
    assert on["kv_a_proj.weight"] == on["kv_b_proj.weight"] | tp  # each rank's own tokens


def small_job(**changes):
    model = make_model(**(LLAMA_LIKE | {"num_key_value_heads": 8, "num_hidden_layers": 4, "latent": SMALL} | changes))
    return make_job(model, batch=8)


def test_step_of_eight_tensor_parallel_ranks():
    estimator = estimator_of(small_job(), chips=8, node=8)
    one, eight = predict(estimator, dp_shard=8, zero=0), predict(estimator, tp=8, zero=0)
    # whole down-projections: 8 ranks hold more than an eighth of the weights
    down = 4 * (512 * 96 + 512 * 80 + 96 + 64 + 2 * 512) * 2 + 512 * 2
    assert eight.memory["weights"] == pytest.approx((one.memory["weights"] - down) / 8 + down)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["megatron", "torch-fsdp2"])
def test_a_row_of_a_search_is_the_single_prediction(profile):
    estimator = estimator_of(small_job(num_hidden_layers=3), chips=4, node=2, profile=profile)
    state = sweep_all(estimator)
    times = dict(zip(state.best.time.ids.tolist(), state.best.time.values.tolist(), strict=True))
    assert len(times) > 200
    for plan_id in list(times)[::7]:
        assert evaluate_plan(estimator, state.plan(plan_id)).step_time == times[plan_id]


@pytest.mark.parametrize("is_backward, width", [(False, 160), (True, 166.4)])
def test_scores_and_values_of_other_widths_take_what_their_products_take(is_backward, width):
    evaluate = partial(attention_time, is_backward=is_backward, machine=make_machine())
    shape = {"batch": 1, "heads": 128, "kv_heads": 128, "query_length": SEQ, "key_length": SEQ, "causal_fraction": 0.5, "itemsize": 2.0}
    same = evaluate(**shape, head_dim=128)
    assert evaluate(**shape, head_dim=128, value_head_dim=128) == same
    wider = evaluate(**shape, head_dim=192, value_head_dim=128)
    assert wider == pytest.approx(evaluate(**shape, head_dim=width), rel=0.02)
    assert wider > same


def test_key_value_heads_other_than_heads_are_refused():
    with pytest.raises(InputError, match="num_key_value_heads=2: must equal num_attention_heads=8"):
        small_job(num_key_value_heads=2)


def test_an_indexer_scores_all_keys_and_attends_to_the_best():
    """GLM-5: scores of s n d a query, half of the square; then no more than 2,048 keys."""
    model = load_model("glm-5")
    graph = graph_of(model)
    assert graph.num_parameters == model.num_parameters + model.num_mtp_parameters
    assert graph.operator("layer.index").flops / SEQ == SEQ * 32 * 128
    seen = 2048 - 2048**2 / (2 * SEQ)  # keys of a query on average, of which there are no 2,048 before the first
    assert graph.operator("layer.attention").flops / SEQ == 2 * seen * 64 * (192 + 64 + 256)
    derivation = derive(graph, apply_rules(graph, rule_set_of("megatron-sp")))
    index = [row for row in derivation.traffic if row.region == "layer" and row.operator == "layer.index" and row.phase is Pass.FORWARD]
    assert sorted(row.elements.base / SEQ for row in index) == [32, 128]  # one key for all heads, and the heads' weights
    kept = {
        saved.tensor: saved.amount.base / SEQ for saved in kept_tensors(derivation, set(), set(), alone=set()) if saved.region == "layer"
    }
    assert kept["layer.index.out"] == 4 * 2048  # which keys, for attention's backward


def test_an_indexer_through_a_prediction():
    latent = replace(SMALL, index_heads=4, index_head_dim=32, index_top=64)
    with_indexer, without = (predict(estimator_of(small_job(latent=spec), chips=8), tp=2, cp=2, dp_shard=2) for spec in (latent, SMALL))
    assert with_indexer.step_time != without.step_time
    assert with_indexer.memory["weights"] > without.memory["weights"]
