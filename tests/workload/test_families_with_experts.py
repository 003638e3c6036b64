"""Configs of families with experts, latent attention or several kinds of layers: what each key means, and what is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import family_table, load_model, read_config
from perfmodel.workload.networks.language_model import transformer_network

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
MIXTRAL = {**BASE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN2 = {**BASE, "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48}
QWEN3 = {**BASE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {
    **BASE,
    **LATENT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
GLM4 = {**{key: value for key, value in DEEPSEEK.items() if key not in LATENT}, "model_type": "glm4_moe", "head_dim": 16}
GLM5 = {**DEEPSEEK, "model_type": "glm_moe_dsa", "index_n_heads": 2, "index_head_dim": 8, "index_topk": 16}
GPT_OSS = {**MIXTRAL, "model_type": "gpt_oss", "sliding_window": 8, "head_dim": 16}
LLAMA4 = {**MIXTRAL, "model_type": "llama4_text", "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "attention_chunk_size": 16}
DBRX = {
    "model_type": "dbrx",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 32,
    "vocab_size": 128,
    "attn_config": {"kv_n_heads": 2},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}
GROK = {**BASE, "model_type": "grok-1", "num_experts": 8, "num_experts_per_tok": 2}
ERNIE = {
    **BASE,
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
MINIMAX = {**MIXTRAL, "model_type": "minimax_m2", "head_dim": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN_NEXT = {**QWEN3, **LINEAR, "model_type": "qwen3_next", "shared_expert_intermediate_size": 16, "head_dim": 16}
NEMOTRON = {
    **BASE,
    "model_type": "nemotron_h",
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "M-M*E",
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48,
}
SMALL = [MIXTRAL, QWEN2, QWEN3, DEEPSEEK, GLM4, GLM5, GPT_OSS, LLAMA4, DBRX, GROK, ERNIE, MINIMAX, QWEN_NEXT, NEMOTRON]


def kinds(model):
    return [(kind.name, kind.count) for kind in model.layer_kinds]


def test_mixtral_has_experts_everywhere():
    model = read_config(MIXTRAL)
    assert kinds(model) == [("layer", 4)]
    experts = model.parts.experts
    assert (experts.num_experts, experts.top_k, experts.width, model.attention.sliding_window) == (8, 2, 96, 0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, [("layer", 4)]),
        ({"decoder_sparse_step": 2}, [("dense_layer", 2), ("layer", 2)]),
        ({"mlp_only_layers": [0]}, [("dense_layer", 1), ("layer", 3)]),
        ({"mlp_only_layers": [0, 1, 2, 3]}, [("layer", 4)]),
    ],
)
def test_layers_without_experts_of_qwen(changes, expected):
    model = read_config({**QWEN3, **changes})
    assert kinds(model) == expected
    assert (model.parts.experts is None) == (len(changes.get("mlp_only_layers", [])) == 4)


def test_absent_width_of_an_expert_is_the_dense_one():
    config = {key: value for key, value in QWEN3.items() if key != "moe_intermediate_size"}
    assert read_config(config).parts.experts.width == 96
    assert read_config(QWEN3).parts.experts.width == 16


def test_qwen2_always_has_a_gated_shared_expert():
    model = read_config(QWEN2)
    assert (model.parts.experts.shared_width, model.parts.experts.shared_gate, model.biases.qkv_bias) == (48, True, True)


def test_keys_of_deepseek():
    model = read_config({**DEEPSEEK, "num_nextn_predict_layers": 1, "head_dim": 4})
    assert kinds(model) == [("dense_layer", 1), ("layer", 3)]
    assert (model.head_dim, model.parts.latent.score_head_dim, model.parts.latent.value_head_dim) == (12, 12, 8)
    experts = model.parts.experts
    assert (experts.shared_width, experts.score, experts.num_groups, experts.top_groups) == (32, "sigmoid", 4, 2)
    assert model.num_mtp_layers == 1
    assert model.num_mtp_parameters > 0


def test_absent_keys_of_deepseek_are_those_of_one_group_without_further_tokens():
    config = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group", "q_lora_rank", "num_key_value_heads")}
    model = read_config({**config, "model_type": "deepseek_v2"})
    assert (model.parts.experts.num_groups, model.parts.experts.score, model.num_mtp_layers) == (1, "softmax", 0)
    assert (model.parts.latent.query_rank, model.num_key_value_heads) == (0, 4)


def test_greedy_choice_ignores_groups():
    assert read_config({**DEEPSEEK, "topk_method": "greedy"}).parts.experts.num_groups == 1


def test_glm_4_5_has_biases_of_queries_keys_and_values_alone():
    model = read_config({**GLM4, "attention_bias": True, "use_qk_norm": True})
    assert (model.biases.qkv_bias, model.biases.attention_output_bias, model.norms.qk_norm, model.parts.latent) == (True, False, True, None)
    assert not read_config(GLM4).biases.qkv_bias


def test_glm_5_has_an_indexer():
    latent = read_config(GLM5).parts.latent
    assert (latent.index_heads, latent.index_head_dim, latent.index_top) == (2, 8, 16)


def test_dense_layers_may_be_listed():
    words = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 1}
    assert kinds(read_config({**GLM5, **words})) == [("dense_layer", 2), ("layer", 2)]


def test_gpt_oss_has_windows_in_every_second_layer():
    model = read_config(GPT_OSS)
    attention, biases, experts = model.attention, model.biases, model.parts.experts
    assert (attention.sliding_window, attention.full_attention_every, attention.attention_sinks) == (8, 2, True)
    assert model.parts.kinds == ()
    assert (biases.qkv_bias, biases.attention_output_bias, experts.bias, experts.router_bias) == (True,) * 4
    listed = read_config({**GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 2})
    assert listed == model


@pytest.mark.parametrize(
    "changes, expected, every, chunk",
    [
        ({}, [("layer", 4)], 4, 16),
        ({"interleave_moe_layer_step": 2}, [("dense_layer", 2), ("layer", 2)], 4, 16),
        ({"moe_layers": [1, 2, 3]}, [("dense_layer", 1), ("layer", 3)], 4, 16),
        ({"attention_chunk_size": None}, [("layer", 4)], 0, 0),
        ({"no_rope_layers": []}, [("layer", 4)], 4, 16),
        ({"no_rope_layers": [1, 0, 1, 0]}, [("layer", 4)], 2, 16),
        ({"layer_types": ["full_attention"] * 4}, [("layer", 4)], 0, 0),
        ({"layer_types": ["chunked_attention"] * 4}, [("layer", 4)], 0, 16),
    ],
)
def test_layers_of_llama_4(changes, expected, every, chunk):
    model = read_config({**LLAMA4, **changes})
    assert kinds(model) == expected
    assert (model.attention.full_attention_every, model.attention.attention_chunk) == (every, chunk)
    assert (model.parts.experts.shared_width, model.parts.experts.width) == (96, 96)
    assert model.intermediate_size == (96 if len(expected) == 1 else 128)


def test_norm_of_queries_and_keys_of_llama_4_has_no_weight():
    model = read_config(LLAMA4)
    assert (model.norms.qk_norm, model.norms.qk_norm_scope) == (True, "bare")
    assert not any("q_norm" in shape.name for shape in model.layer_shapes())
    norms = [
        operator for operator in transformer_network(model, batch=1, seq_len=32).operators if operator.name.endswith(("q_norm", "k_norm"))
    ]
    assert [len(norm.inputs) for norm in norms] == [1] * 8
    assert not read_config({**LLAMA4, "use_qk_norm": False}).norms.qk_norm


def test_text_half_of_llama_4_takes_the_defaults_of_its_class():
    model = read_config({"model_type": "llama4", "text_config": {"num_local_experts": 128, "interleave_moe_layer_step": 2}})
    assert (model.origin.architecture, model.num_hidden_layers) == ("llama4_text", 48)
    assert (model.parts.experts.num_experts, model.attention.attention_chunk) == (128, 8192)
    assert model.num_parameters == load_model("llama-4-maverick").num_parameters


def test_dbrx_and_grok_have_names_of_their_own():
    dbrx, grok = read_config(DBRX), read_config(GROK)
    assert (dbrx.num_key_value_heads, dbrx.norms.norm, dbrx.biases.norm_bias, dbrx.parts.experts.top_k) == (2, "layernorm", False, 2)
    assert (grok.tie_word_embeddings, grok.norms.sandwich_norm) == (True, True)
    assert (grok.mlp.activation, grok.parts.experts.num_experts) == ("gelu", 8)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, [("dense_layer", 1), ("layer", 3)]),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, [("dense_layer", 2), ("layer", 2)]),
        ({"moe_layer_end_index": 2}, [("dense_layer", 2), ("layer", 2)]),
    ],
)
def test_layers_of_ernie(changes, expected):
    model = read_config({**ERNIE, **changes})
    assert kinds(model) == expected
    assert (model.parts.experts.width, model.parts.experts.shared_width, model.tie_word_embeddings) == (16, 32, True)


def test_minimax_norms_queries_over_all_heads():
    model = read_config({**MINIMAX, "num_mtp_modules": 3, "use_mtp": True})
    assert (model.norms.qk_norm_scope, model.parts.experts.score, model.num_mtp_layers) == ("all", "sigmoid", 3)
    assert read_config({**MINIMAX, "num_mtp_modules": 3, "use_mtp": False}).num_mtp_layers == 0


def test_qwen3_next_mixes_in_turn():
    model = read_config(QWEN_NEXT)
    assert kinds(model) == [("layer", 3), ("attention_layer", 1)]
    deep = read_config({**QWEN_NEXT, "num_hidden_layers": 8})
    assert {kind.turn for kind in deep.layer_kinds} == {"layers"}
    assert (model.attention.attention_gate, model.norms.qk_norm) == (True, True)
    assert (model.parts.delta.conv_kernel, model.parts.experts.shared_gate) == (4, True)
    assert kinds(read_config({**QWEN_NEXT, "full_attention_interval": 2})) == [("layer", 2), ("attention_layer", 2)]


def test_layers_of_nemotron_h_are_letters_or_words():
    model = read_config(NEMOTRON)
    assert kinds(model) == [("layer", 2), ("dense_layer", 1), ("attention_layer", 1), ("experts_layer", 1)]
    assert (model.positions.position, model.mlp.gated_mlp) == ("none", False)
    assert (model.parts.experts.gated, model.parts.experts.shared_width) == (False, 48)
    words = {key: value for key, value in NEMOTRON.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    assert read_config({**words, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe"]}) == model
    assert read_config({**NEMOTRON, "hybrid_override_pattern": "M-M*-"}).parts.experts is None


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config["model_type"])
def test_small_configs_hold_together(config):
    model = read_config(config)
    assert sum(shape.num_elements for shape in model.parameter_shapes()) == model.num_parameters
    assert model.num_active_parameters < model.num_parameters
    assert model.with_layers(8).num_hidden_layers == sum(kind.count for kind in model.with_layers(8).layer_kinds) == 8


@pytest.mark.parametrize(
    "config, words",
    [
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok=9: must be at most the number of experts, 8"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts: is missing, and model_type=mixtral needs it"),
        ({**MIXTRAL, "num_local_experts": 0}, "num_experts=0: must be a whole number of at least 1"),
        ({**MIXTRAL, "kv_lora_rank": 16}, "kv_lora_rank=16: model_type=mixtral has no such key"),
        ({**QWEN3, "mlp_only_layers": [4]}, "mlp_only_layers=list of 1: must list numbers of layers from 0 to 3"),
        ({**QWEN2, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size: is missing"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads=2: contradicts kv_lora_rank"),
        ({**DEEPSEEK, "n_group": 3}, "n_group=3: must divide the 8 experts"),
        ({**DEEPSEEK, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok=3: must be at most the experts of topk_group"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq=2: experts in every n-th layer are not modelled yet"),
        ({**DEEPSEEK, "scoring_func": "sqrtsoftplus"}, 'scoring_func="sqrtsoftplus": is not modelled; known are softmax, sigmoid'),
        ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank: is missing"),
        ({**DEEPSEEK, "kv_lora_rank": 0}, "key_value_rank=0: must be a whole number of at least 1"),
        ({**GLM5, "index_topk": None}, "index_topk: is missing"),
        ({**DEEPSEEK, "index_topk": 16}, "index_topk=16: an indexer of keys is not modelled yet"),
        ({**GLM5, "indexer_types": ["full", "shared", "full", "full"]}, "indexer_types=list of 4: layers that share an indexer"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 4}, "layer_types=list of 4: must list chunked_attention or full_attention"),
        ({**LLAMA4, "moe_layers": [4]}, "moe_layers=list of 1: must list numbers of layers from 0 to 3"),
        ({**DBRX, "ffn_config": {}}, "ffn_hidden_size: is missing, and model_type=dbrx needs it"),
        ({**MINIMAX, "attn_type_list": [0, 1, 1, 1]}, "attn_type_list=list of 4: lightning attention is not modelled yet"),
        ({**QWEN_NEXT, "linear_num_key_heads": 3}, "linear_num_key_heads=3: must divide linear_num_value_heads=4"),
        ({**QWEN_NEXT, "layer_types": ["linear_attention"]}, "layer_types=list of 1: must have one entry for each of the 4 layers"),
        ({**NEMOTRON, "hybrid_override_pattern": "MXM"}, "hybrid_override_pattern=MXM: must have a letter for each layer: M * - E"),
        ({**NEMOTRON, "num_hidden_layers": 4}, "num_hidden_layers=4: contradicts the 5 letters of hybrid_override_pattern"),
        ({**NEMOTRON, "moe_latent_size": 32}, "moe_latent_size=32: experts behind a projection of the hidden state are not modelled yet"),
        ({**NEMOTRON, "num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: modules of several layers"),
        ({"model_type": "longcat_flash"}, "experts that do nothing (zero_expert_num)"),
        ({"model_type": "kimi_linear"}, "Kimi delta attention (linear_attn_config)"),
        ({"model_type": "bailing_moe"}, "num_shared_experts"),
        ({"model_type": "falcon_h1"}, "Mamba-2 layers in another arrangement"),
        ({**DEEPSEEK, "mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=list of 2: must have one entry for each of the 4 layers"),
    ],
)
def test_bad_config_is_refused_in_one_sentence(config, words):
    with pytest.raises(InputError) as caught:
        read_config(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_reported_at_once():
    with pytest.raises(InputError) as caught:
        read_config({**DEEPSEEK, "num_key_value_heads": 2, "n_group": 3, "attention_bias": "no", "v_head_dim": None})
    assert all(
        word in caught.value.full for word in ("num_key_value_heads=2", "n_group=3", 'attention_bias="no"', "v_head_dim: is missing")
    )


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers(-1, 5) | st.text(max_size=3))
)
KEYS = sorted({key for config in SMALL for key in config} - {"model_type"} | {"layer_types", "moe_layers", "mlp_only_layers", "topk_group"})


@given(st.sampled_from(SMALL), st.sampled_from(KEYS), ODD | st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3))
def test_one_damaged_key_is_read_or_refused(config, key, value):
    try:
        model = read_config({**config, key: value})
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert model.num_parameters >= model.num_active_parameters > 0
        assert sum(kind.count for kind in model.layer_kinds) == model.num_hidden_layers


def test_the_files_page_names_every_family():
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    of_perfmodel = {"megatron"}  # ours, for shipped models
    named = {family for family in family_table().families if re.search(rf"[ ,]{re.escape(family.removesuffix('_text'))}(_text)?\b", page)}
    assert {family for family in set(family_table().families) - named - of_perfmodel if "_vl_" not in family} == set()
