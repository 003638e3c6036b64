"""Configs of families with experts, latent attention or several kinds of layers: what each key means, and what is refused."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.huggingface import read_config
from perfmodel.workload.layer_specs import not_built
from perfmodel.workload.models import load_model

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


def kinds(model):
    return [(kind.name, kind.count) for kind in model.layer_kinds]


def test_mixtral_has_experts_everywhere():
    model = read_config(MIXTRAL)
    assert kinds(model) == [("layer", 4)]
    assert (model.experts.num_experts, model.experts.top_k, model.experts.width, model.sliding_window) == (8, 2, 96, 0)


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
    assert (model.experts is None) == (len(changes.get("mlp_only_layers", [])) == 4)


def test_absent_width_of_an_expert_is_the_dense_one():
    config = {key: value for key, value in QWEN3.items() if key != "moe_intermediate_size"}
    assert read_config(config).experts.width == 96
    assert read_config(QWEN3).experts.width == 16


def test_qwen2_always_has_a_gated_shared_expert():
    model = read_config(QWEN2)
    assert (model.experts.shared_width, model.experts.shared_gate, model.qkv_bias) == (48, True, True)


def test_keys_of_deepseek():
    model = read_config({**DEEPSEEK, "num_nextn_predict_layers": 1, "head_dim": 4})
    assert kinds(model) == [("dense_layer", 1), ("layer", 3)]
    assert (model.head_dim, model.latent.score_head_dim, model.latent.value_head_dim) == (12, 12, 8)
    assert (model.experts.shared_width, model.experts.score, model.experts.num_groups, model.experts.top_groups) == (32, "sigmoid", 4, 2)
    assert model.num_mtp_layers == 1
    assert model.num_mtp_parameters > 0


def test_absent_keys_of_deepseek_are_those_of_one_group_without_further_tokens():
    config = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group", "q_lora_rank", "num_key_value_heads")}
    model = read_config({**config, "model_type": "deepseek_v2"})
    assert (model.experts.num_groups, model.experts.score, model.num_mtp_layers) == (1, "softmax", 0)
    assert (model.latent.query_rank, model.num_key_value_heads) == (0, 4)


def test_greedy_choice_ignores_groups():
    assert read_config({**DEEPSEEK, "topk_method": "greedy"}).experts.num_groups == 1


@pytest.mark.parametrize(
    "config, words",
    [
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok=9: must be at most the number of experts, 8"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts: is missing, and model_type=mixtral needs it"),
        ({**MIXTRAL, "num_local_experts": 0}, "num_experts=0: must be a whole number of at least 1"),
        ({**MIXTRAL, "kv_lora_rank": 16}, "model_type=mixtral: needs multi-head latent attention"),
        ({**QWEN3, "mlp_only_layers": [4]}, "mlp_only_layers=list of 1: must list numbers of layers from 0 to 3"),
        ({**QWEN2, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size: is missing"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads=2: contradicts kv_lora_rank"),
        ({**DEEPSEEK, "n_group": 3}, "n_group=3: must divide the 8 experts"),
        ({**DEEPSEEK, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok=3: must be at most the experts of topk_group"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq=2: experts in every so many layers are not modelled yet"),
        ({**DEEPSEEK, "scoring_func": "sqrtsoftplus"}, 'scoring_func="sqrtsoftplus": is not modelled; known are softmax, sigmoid'),
        ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank: is missing"),
        ({**DEEPSEEK, "kv_lora_rank": 0}, "key_value_rank=0: must be a whole number of at least 1"),
        ({**DEEPSEEK, "mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=list of 2: must have one entry for each of the 4 layers"),
    ],
)
def test_bad_config_is_refused_in_one_sentence(config, words):
    with pytest.raises(InputError) as caught:
        read_config(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(InputError) as caught:
        read_config({**DEEPSEEK, "num_key_value_heads": 2, "n_group": 3, "attention_bias": "no", "v_head_dim": None})
    assert all(
        word in str(caught.value) for word in ("num_key_value_heads=2", "n_group=3", 'attention_bias="no"', "v_head_dim: is missing")
    )


def test_what_cannot_be_predicted_yet_is_named():
    assert not_built(load_model("llama-3-8b")) == ""
    assert "several kinds of layers" in not_built(TransformerConfig.with_layers(read_config({**QWEN3, "decoder_sparse_step": 2}), 8))
