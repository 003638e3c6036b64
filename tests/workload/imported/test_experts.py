"""Imported decoders with experts and latents, in each way to run them: the models that config.json files of their sizes are."""

import json
from functools import cache, partial

import pytest
import torch
from torch import nn

import perfmodel
from perfmodel.cost.serving.boundness import operator_rows
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.memory import cache_shape
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.workload.imported.decoder import UNBOUNDED, decoder_of
from perfmodel.workload.imported.graph import ImportedKind, graph_to_dict
from perfmodel.workload.models import load_model, read_config
from perfmodel.workload.quantization import QUANTIZATIONS
from tests.marks import NIGHTLY
from tests.workload.imported.decoders import (
    LOOPS,
    STACKED,
    ByHand,
    Forward,
    Latent,
    LatentByHand,
    Layer,
    Mixer,
    Mixture,
    Net,
    added,
    all_at_once,
    all_in_turn,
    best_one,
    by_one_hot,
    by_taken_weights,
    causal,
    imported,
    in_groups,
    softmax_after,
    window,
)
from tests.workload.imported.hugging_face import Qwen3Moe

H, V, LAYERS, TOKENS = 64, 500, 2, 64
MIXTRAL = dict(
    model_type="mixtral", num_hidden_layers=LAYERS, hidden_size=H, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
    intermediate_size=32, vocab_size=V, max_position_embeddings=UNBOUNDED, num_local_experts=8, num_experts_per_tok=2,
    hidden_act="silu", sliding_window=None,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN = dict(
    model_type="qwen2_moe", qkv_bias=False, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=48, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
LATENT = dict(
    model_type="deepseek_v3", num_hidden_layers=LAYERS, hidden_size=H, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96,
    vocab_size=V, max_position_embeddings=UNBOUNDED, hidden_act="silu", tie_word_embeddings=False, q_lora_rank=24, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2, num_nextn_predict_layers=0,
)  # fmt: skip


def decoder(mixer, *feeds, layers=LAYERS):
    """Layers with these feed-forwards, the last of them for all that follow."""
    layer_feeds = [feeds[min(number, len(feeds) - 1)] for number in range(layers)]
    return lambda: Net([Layer(H, mixer(), feed()) for feed in layer_feeds], h=H, vocab=V)


def plain():
    return Mixer(H, 8, 2, 16)


def latent(**how):
    return Latent(H, 4, 24, 16, 8, 4, 8, **how)


def mixture(run, **how):
    return lambda: Mixture(H, 32, 8, 2, run, **how)


def rows_of(model, phase):
    """(name, FLOP, bytes) of each operator of a step, and the bytes of a token in the cache."""
    estimator = ServingEstimator(
        model=model, cluster=load_cluster("dgx-h100"), calibration=SPEC_SHEET, engine=load_engine("vllm"),
        quantization=QUANTIZATIONS["bf16"], cache=Dtype.BF16,
    )  # fmt: skip
    costs = estimator.times([ServingLayout(tp=1)])
    rows = [(row.name, row.flops, row.bytes) for row in operator_rows(costs, phase=phase, sequences=4, cached=512)]
    return rows, cache_shape(model).tokens_bytes(1, tp=1, kv_heads=model.num_key_value_heads, cache_bytes=2.0)


def assert_same(model, config):
    """The model of a config.json, field by field, and all that follows from it."""
    known = read_config(config, name=model.name)
    differing = {
        name: (value, known.values[name])
        for name, value in model.values.items()
        if value != known.values[name] and name not in ("architecture", "source")
    }
    assert differing == {}
    assert model.num_parameters == known.num_parameters
    for phase in ("prefill", "decode"):
        assert rows_of(model, phase) == rows_of(known, phase)


@cache
def run_by(run):
    """The imported graph of a model whose experts run this way."""
    return imported(decoder(plain, mixture(run)))


@pytest.mark.parametrize("run", [*LOOPS, *STACKED], ids=lambda run: run.__name__)
@pytest.mark.slow
def test_a_mixtral_is_itself_however_its_experts_run(run):
    graph = run_by(run)
    model = decoder_of(graph)
    assert_same(model, MIXTRAL)
    assert model.num_parameters == graph.num_parameters
    assert graph.unrecognised() == ()


@pytest.mark.parametrize("run", [by_one_hot, all_at_once], ids=lambda run: run.__name__)
@pytest.mark.slow
def test_shared_experts_are_distinguished_from_chosen_ones(run):
    graph = imported(decoder(plain, mixture(run, shared=48, gate=True)))
    model = decoder_of(graph)
    assert_same(model, {**MIXTRAL, **QWEN})
    assert model.num_parameters == graph.num_parameters


@pytest.mark.slow
def test_a_shared_expert_as_wide_as_the_others_is_one_more():
    model = decoder_of(imported(decoder(plain, mixture(by_one_hot, shared=32))))
    assert (model.parts.experts.num_experts, model.parts.experts.width, model.parts.experts.shared_width) == (8, 32, 32)
    assert not model.parts.experts.shared_gate


@pytest.mark.parametrize("run", [by_one_hot, all_at_once, by_taken_weights], ids=lambda run: run.__name__)
@pytest.mark.slow
def test_a_deepseek_with_latents_a_dense_layer_and_groups(run):
    graph = imported(decoder(latent, lambda: Forward(H, 96), mixture(run, shared=64, route=in_groups)))
    model = decoder_of(graph)
    assert_same(model, LATENT)
    assert model.num_parameters == graph.num_parameters


@pytest.mark.parametrize(
    ("how", "config"),
    [
        ({}, {}),
        (dict(apart=True), {}),
        (dict(query_rank=0), dict(q_lora_rank=None)),
        (dict(make=LatentByHand), {}),
    ],
    ids=["one product makes latent and positions", "two make them", "queries without a latent", "two products and a softmax"],
)
def test_latent_attention_by_what_its_products_make(how, config):
    widths = dict(h=H, n=4, query_rank=24, rank=16, nope=8, rope=4, value=8) | how
    make = widths.pop("make", Latent)
    graph = imported(decoder(lambda: make(**widths), lambda: Forward(H, 96)))
    model = decoder_of(graph)
    assert_same(model, {**LATENT, "model_type": "deepseek_v3", **config, "first_k_dense_replace": LAYERS})
    assert model.num_parameters == graph.num_parameters


@pytest.mark.slow
def test_one_expert_a_token_scores_after_the_choice_and_biases():
    one = decoder_of(imported(decoder(plain, mixture(by_one_hot, route=best_one)))).parts.experts
    assert (one.top_k, one.num_experts) == (1, 8)
    graph = imported(decoder(plain, mixture(all_at_once, route=softmax_after, bias=True)))
    biased = decoder_of(graph)
    experts = biased.parts.experts
    assert (experts.bias, experts.router_bias, experts.score, experts.top_k) == (True, True, "softmax", 2)
    assert biased.num_parameters == graph.num_parameters


@pytest.mark.parametrize("run", [*LOOPS[:2], *STACKED[2:]], ids=lambda run: run.__name__)
@pytest.mark.slow
def test_experts_that_run_what_was_chosen_have_the_work_of_the_choices(run):
    """Where torch knows sizes by values alone (how many tokens chose an expert) the shares are even: 2 FLOP a weight that a token meets."""
    graph = run_by(run)
    model = decoder_of(graph)
    norms = (2 * LAYERS + 1) * H
    products = [vertex for vertex in graph.vertices if vertex.kind is ImportedKind.MATMUL]
    combined = LAYERS * 2 * TOKENS * 2 * H if run is by_taken_weights else 0  # which torch counts as a product too
    assert sum(product.flops for product in products) - combined == 2 * TOKENS * (model.num_active_parameters_without_embedding - norms)


@pytest.mark.parametrize("eager", [False, True], ids=["fused", "eager"])
@pytest.mark.slow
def test_a_qwen3_as_hugging_face_writes_it(eager):
    graph = imported(lambda: Qwen3Moe(LAYERS, V, H, 8, 2, 16, 32, 8, 2, eager=eager))
    model = decoder_of(graph)
    qwen3 = {key: value for key, value in QWEN.items() if key not in ("qkv_bias", "shared_expert_intermediate_size")}
    assert_same(model, {**MIXTRAL, **qwen3, "model_type": "qwen3_moe", "attention_bias": False})
    assert model.num_parameters == graph.num_parameters


def gpt_oss(model):
    """Windows in every other layer, sinks, biases everywhere."""
    experts, h = model.parts.experts, model.hidden_size
    widths = (h, model.num_attention_heads, model.num_key_value_heads, model.head_dim)
    how = dict(bias=True, sinks=True, put=added)
    layers = [
        Layer(
            h,
            ByHand(*widths, mask=window(model.attention.sliding_window) if number % 2 == 0 else causal, **how),
            Mixture(h, experts.width, experts.num_experts, experts.top_k, all_at_once, route=softmax_after, bias=True),
        )
        for number in range(model.num_hidden_layers)
    ]
    return Net(layers, h=h, vocab=model.vocab_size)


def deepseek_v2_lite(model, run=all_at_once):
    """Latents of keys and values alone, one dense layer, shared experts."""
    experts, latents, h = model.parts.experts, model.parts.latent, model.hidden_size
    widths = (latents.key_value_rank, latents.nope_head_dim, latents.rope_head_dim, latents.value_head_dim)
    layers = [
        Layer(
            h,
            Latent(h, model.num_attention_heads, latents.query_rank, *widths),
            Mixture(h, experts.width, experts.num_experts, experts.top_k, run, shared=experts.shared_width)
            if number
            else Forward(h, model.intermediate_size),
        )
        for number in range(model.num_hidden_layers)
    ]
    return Net(layers, h=h, vocab=model.vocab_size)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("gpt-oss-20b", gpt_oss, marks=NIGHTLY),
        ("deepseek-v2-lite", deepseek_v2_lite),
        pytest.param("deepseek-v2-lite", partial(deepseek_v2_lite, run=by_one_hot), marks=NIGHTLY, id="1,664 experts in loops"),
    ],
)
@pytest.mark.slow
def test_models_that_ship_come_out_as_themselves_at_full_size(name, make):
    known = load_model(name)
    graph = imported(lambda: make(known), "int64[1,256]")
    model = decoder_of(graph)
    assert model.num_parameters == graph.num_parameters == known.num_parameters
    of_file = {field: known.values[field] for field in ("name", "architecture", "max_position_embeddings", "source")}
    assert model.having(**of_file) == known
    words = dict(cluster="dgx-h100", chips=2, tp=2, input_len=1024, output_len=256, concurrency=16, quantization="bf16")
    one, other = perfmodel.serve(model=graph, **words), perfmodel.serve(model=name, **words)
    assert (one.ttft, one.tpot, one.max_sequences, one.memory) == (other.ttft, other.tpot, other.max_sequences, other.memory)


@pytest.mark.slow
def test_it_is_served_as_its_config_is_by_its_file_too(tmp_path):
    words = dict(cluster="dgx-h100", chips=4, tp=2, ep=2, input_len=512, output_len=64, concurrency=8)
    config, saved = tmp_path / "config.json", tmp_path / "graph.json"
    config.write_text(json.dumps(LATENT))
    graph = imported(decoder(latent, lambda: Forward(H, 96), mixture(by_one_hot, shared=64, route=in_groups)))
    saved.write_text(json.dumps(graph_to_dict(graph)))
    known = perfmodel.serve(model=str(config), **words, quantization="bf16")
    summary = "a latent of 16 and 4 with positions, a feed-forward of width 96, 2 of 8 experts of width 32 and a shared one of 64"
    for model in (graph, str(saved)):
        served = perfmodel.serve(model=model, **words, quantization="bf16")
        assert any(summary in note for note in served.notes)
        assert (served.ttft, served.tpot, served.max_sequences, served.memory) == (
            known.ttft,
            known.tpot,
            known.max_sequences,
            known.memory,
        )


# --- what is refused --------------------------------------------------------------------------------------------------------------


def softly(m, x, weights, chosen):
    """Every expert, weighted by what the router says: nothing is chosen."""
    return sum(expert(x) * weights[:, number : number + 1] for number, expert in enumerate(m.experts))


def by_threshold(scores, k):
    """Choose the experts above the mean: their number is not in the graph."""
    full = torch.softmax(scores, -1)
    return torch.where(full > full.mean(-1, keepdim=True), full, 0.0), None


class Plain(nn.Module):
    """Experts without gates and a shared expert with one."""

    def __init__(self):
        super().__init__()
        self.mixture = Mixture(H, 32, 8, 2, all_in_turn, shared=48)
        self.mixture.experts = nn.ModuleList(Forward(H, 32, form="plain") for _ in range(8))

    def forward(self, x):
        return self.mixture(x)


class TooFew(Plain):
    def __init__(self):
        super().__init__()
        self.mixture = Mixture(H, 32, 8, 2, by_one_hot)
        self.mixture.experts = self.mixture.experts[:5]


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (
            lambda: Mixture(H, 32, 8, 2, softly, route=by_threshold),
            r"topk, argmax.: give the model's config.json, which says num_experts_per_tok",
        ),
        (Plain, "chooses among experts that are gated, or have biases, unlike the shared expert"),
        (TooFew, "chooses among 8 experts, and the layer has feed-forwards: 5 of width 32"),
    ],
    ids=["no choice in the graph", "unlike shared ones", "experts that lie elsewhere"],
)
@pytest.mark.slow
def test_what_the_module_does_not_say_is_refused_in_a_sentence(feed, message):
    with pytest.raises(InputError, match=message) as raised:
        decoder_of(imported(decoder(plain, feed)))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("mixers", "feeds", "message"),
    [
        ((latent, lambda: Latent(H, 4, 0, 16, 8, 4, 8)), (lambda: Forward(H, 96),), "unlike the first .query_rank 0, not 24"),
        ((plain, latent), (lambda: Forward(H, 96),), "unlike the first .*latent in one of them"),
        ((plain,), (mixture(all_in_turn), lambda: Mixture(H, 32, 8, 3, all_in_turn)), "unlike the first .top_k 3, not 2"),
    ],
    ids=["another latent", "a latent in one", "another choice"],
)
def test_layers_that_differ_are_refused_by_what_differs(mixers, feeds, message):
    layers = [Layer(H, mixers[min(number, len(mixers) - 1)](), feeds[min(number, len(feeds) - 1)]()) for number in range(2)]
    with pytest.raises(InputError, match=message):
        decoder_of(imported(lambda: Net(layers)))


def test_sizes_that_nothing_says_are_refused():
    class Unknown(nn.Module):
        def forward(self, x):
            return x[x > 0]

    with pytest.raises(InputError, match="depends on values"):
        imported(Unknown, "float32[8,8]")
