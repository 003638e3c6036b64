"""Tensors of layers of every make against counts worked out by hand and published ones."""

import json
from math import prod

import pytest

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import PARTS, LayerSpec, kinds_of_layers, kinds_with_layers, layer_order, part_from_plain, part_to_plain
from perfmodel.workload.models import load_model


def sizes(model, kind=None):
    return {shape.name: shape.num_elements for shape in model.layer_shapes(kind)}


def test_latent_attention_has_the_tensors_of_deepseek_v3():
    """arXiv 2412.19437, section 4.2: latents of 1536 and 512, heads of 128 + 64, 128 of them."""
    shapes = dict(shape[:2] for shape in load_model("deepseek-v3").layer_shapes())
    assert {name: prod(shape) for name, shape in shapes.items() if name.startswith(("q_", "kv_", "o_"))} == {
        "q_a_proj.weight": 11_010_048,
        "q_a_norm.weight": 1536,
        "q_b_proj.weight": 37_748_736,
        "kv_a_proj.weight": 4_128_768,
        "kv_a_norm.weight": 512,
        "kv_b_proj.weight": 16_777_216,
        "o_proj.weight": 117_440_512,
    }
    assert shapes["kv_a_proj.weight"] == (512 + 64, 7168)
    assert shapes["experts_up.weight"] == (256, 2, 2048, 7168)  # gate and up
    assert shapes["experts_down.weight"] == (256, 7168, 2048)
    assert (shapes["router.weight"], shapes["shared_gate_proj.weight"]) == ((256, 7168), (2048, 7168))


def test_layers_of_deepseek_v3_add_up():
    model = load_model("deepseek-v3")
    dense, experts = model.layer_kinds
    attention = sum(size for name, size in sizes(model, experts).items() if name.startswith(("q_", "kv_", "o_")))
    assert attention == 187_107_328
    assert sum(sizes(model, dense).values()) == 583_483_392
    # 256 less than counts that hold the bias by which DeepSeek balances the load: a buffer
    assert model.num_layer_parameters == sum(sizes(model, experts).values()) == 11_507_286_272 - 256
    assert model.num_parameters == 671_026_404_352
    assert model.num_mtp_parameters == 11_507_286_016 + 2 * 7168 * 7168 + 3 * 7168
    assert round(model.num_active_mtp_parameters + 2 * 129_280 * 7168, -7) == 2_540_000_000  # with table and head, which are shared


def test_layer_of_mixtral_adds_up():
    num_elements = sizes(load_model("mixtral-8x7b"))
    assert sum(num_elements[f"{name}_proj.weight"] for name in "qkvo") == 41_943_040
    assert sum(size for name, size in num_elements.items() if name.startswith("experts_")) == 8 * 176_160_768
    assert num_elements["router.weight"] == 32_768


def test_queries_without_a_latent_are_made_of_the_hidden_state():
    num_elements = sizes(load_model("deepseek-v2-lite"))
    assert num_elements["q_proj.weight"] == 2048 * 16 * 192
    assert "q_a_proj.weight" not in num_elements


def test_shared_expert_of_qwen2_has_a_gate_of_one_row():
    shapes = dict(shape[:2] for shape in load_model("qwen2-57b-a14b").layer_shapes())
    assert (shapes["shared_gate.weight"], shapes["shared_down_proj.weight"]) == ((1, 3584), (3584, 20480))


def test_every_product_of_gpt_oss_has_a_bias_and_every_head_a_sink():
    shapes = dict(shape[:2] for shape in load_model("gpt-oss-20b").layer_shapes())
    assert shapes["sinks"] == (64,)
    assert shapes["experts_up.bias"] == (32, 2, 2880)
    assert shapes["router.bias"] == (32,)
    assert {f"{name}.bias" for name in ("q_proj", "o_proj", "experts_down")} < set(shapes)


def test_indexer_of_glm_5():
    shapes = dict(shape[:2] for shape in load_model("glm-5").layer_shapes())
    assert {name: shape for name, shape in shapes.items() if name.startswith("index")} == {
        "index_q_proj.weight": (32 * 128, 2048),
        "index_k_proj.weight": (128, 6144),
        "index_k_norm.weight": (128,),
        "index_k_norm.bias": (128,),
        "index_weights_proj.weight": (32, 6144),
    }


def test_layers_of_nemotron_h():
    """The Mamba layer as transformers 5.23 counts it; every layer has one norm."""
    model = load_model("nemotron-h-8b")
    mamba, mlp, attention = model.layer_kinds
    assert [(kind.mixer, kind.feed_forward, kind.count) for kind in model.layer_kinds] == [
        ("mamba", "none", 24),
        ("none", "dense", 24),
        ("attention", "none", 4),
    ]
    assert sum(sizes(model, mamba).values()) == 109_640_064
    assert sizes(model, mlp) == {"mlp_norm.weight": 4096, "up_proj.weight": 21504 * 4096, "down_proj.weight": 21504 * 4096}
    assert set(sizes(model, attention)) == {"attention_norm.weight", *(f"{name}_proj.weight" for name in "qkvo")}


def test_layers_of_qwen3_next():
    model = load_model("qwen3-next-80b-a3b")
    delta, attention = (dict(shape[:2] for shape in model.layer_shapes(kind)) for kind in model.layer_kinds)
    assert delta["in_proj_qkvz.weight"] == (2 * 16 * 128 + 2 * 32 * 128, 2048)
    assert delta["in_proj_ba.weight"] == (64, 2048)
    assert delta["conv.weight"] == (2 * 16 * 128 + 32 * 128, 4)
    assert (delta["dt_bias"], delta["A_log"], delta["delta_norm.weight"], delta["out_proj.weight"]) == ((32,), (32,), (128,), (2048, 4096))
    assert attention["q_gate_proj.weight"] == attention["q_proj.weight"] == (16 * 256, 2048)
    assert layer_order(model.layer_kinds)[:8] == ["layer", "layer", "layer", "attention_layer"] * 2


def test_layers_of_llama_4_maverick_take_turns():
    model = load_model("llama-4-maverick")
    assert layer_order(model.layer_kinds)[:4] == ["dense_layer", "layer"] * 2
    assert (model.attention.attention_chunk, model.attention.full_attention_every, model.positions.no_rotary_every) == (8192, 4, 4)


@pytest.mark.parametrize(
    "name", ["nemotron-h-8b", "qwen3-next-80b-a3b", "gpt-oss-20b", "llama-4-maverick", "deepseek-v2", "mixtral-8x7b", "deepseek-v3"]
)
def test_listed_parameters_add_up_to_the_count(name):
    model = load_model(name)
    shapes = model.parameter_shapes()
    assert sum(shape.num_elements for shape in shapes) == model.num_parameters
    assert len({shape.name for shape in shapes}) == len(shapes)


def test_first_layers_are_the_dense_ones():
    names = {shape.name for shape in load_model("deepseek-v3").parameter_shapes()}
    assert "layers.2.gate_proj.weight" in names
    assert "layers.3.experts_up.weight" in names
    assert "layers.3.gate_proj.weight" not in names


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "mixtral-8x7b"])
def test_a_file_gives_the_records_back(name):
    model = load_model(name)
    held = {field: value for field, value in model.values.items() if field in (*PARTS, "kinds") and value}
    assert held
    written = json.loads(json.dumps({field: part_to_plain(value) for field, value in held.items()}))
    read = {field: part_from_plain(field, value) for field, value in written.items()}
    assert TransformerConfig.of(**model.values | read) == model


# --- kinds --------------------------------------------------------------------------------------------------------

D, E = ("attention", "dense"), ("attention", "experts")
LINEAR = ("delta", "experts")
M, A, F = ("mamba", "none"), ("attention", "none"), ("none", "dense")


@pytest.mark.parametrize(
    "layers, kinds",
    [
        ([D] * 4, {"layer": (4, "")}),
        ([D, E, E, E], {"dense_layer": (1, ""), "layer": (3, "")}),
        ([D, E] * 3, {"dense_layer": (3, "layers"), "layer": (3, "layers")}),
        ([LINEAR, LINEAR, LINEAR, E] * 2, {"layer": (6, "layers"), "attention_layer": (2, "layers")}),
        ([M, F, M, F, M, A, F], {"layer": (3, "layers"), "dense_layer": (3, "layers"), "attention_layer": (1, "layers")}),
        ([F, D, E, D, E], {"none": None}),
    ],
)
def test_kinds_are_counted_and_named(layers, kinds):
    counted = {kind.name: (kind.count, kind.turn) for kind in kinds_of_layers(layers)}
    if "none" in kinds:  # one at the head that never comes again stands alone
        assert list(counted.values()) == [(1, ""), (2, "layers"), (2, "layers")]
    else:
        assert counted == kinds


def test_layers_in_turn_come_as_their_shares():
    kinds = kinds_of_layers([LINEAR, LINEAR, LINEAR, E] * 2)
    assert layer_order(kinds) == ["layer", "layer", "layer", "attention_layer"] * 2


@pytest.mark.parametrize(
    "counts, num_layers, expected",
    [
        ((3, 58), 61, {"dense": 3, "layer": 58}),
        ((3, 58), 4, {"dense": 3, "layer": 1}),
        ((3, 58), 2, {"dense": 2}),
        ((3, 58), 100, {"dense": 3, "layer": 97}),
    ],
)
def test_leading_kinds_stay_as_far_as_they_go(counts, num_layers, expected):
    kinds = [LayerSpec(name=name, count=count) for name, count in zip(("dense", "layer"), counts, strict=True)]
    assert {kind.name: kind.count for kind in kinds_with_layers(kinds, num_layers)} == expected


@pytest.mark.parametrize("num_layers, expected", [(4, (3, 1)), (2, (1, 1)), (1, (1,)), (10, (8, 2)), (96, (72, 24))])
def test_kinds_in_turn_keep_their_shares(num_layers, expected):
    kinds = [LayerSpec(name="layer", count=36, turn="t"), LayerSpec(name="full", count=12, turn="t")]
    assert tuple(kind.count for kind in kinds_with_layers(kinds, num_layers)) == expected


def test_fewer_layers_of_a_model_with_kinds():
    model = load_model("deepseek-v2").with_layers(4)
    assert [(kind.name, kind.count) for kind in model.layer_kinds] == [("dense_layer", 1), ("layer", 3)]
    assert model.num_hidden_layers == 4
