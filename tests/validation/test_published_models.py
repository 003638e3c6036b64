import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.validation.expert_cases import assumed_layers, expert_layers
from perfmodel.validation.published_models import config_from_case
from perfmodel.workload.models import load_model
from perfmodel.workload.truncation import layers_text
from tests.validation.published_cases import MODEL as LLAMA_3_8B

GPT_22B = {
    **LLAMA_3_8B,
    "name": "GPT-22B",
    "num_hidden_layers": 48,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 24576,
    "gated_mlp": False,
    "vocab_size": 51200,
    "tie_word_embeddings": True,
}


def test_gated_case_is_a_llama():
    assert config_from_case(LLAMA_3_8B).num_parameters == load_model("llama-3-8b").num_parameters
    assert config_from_case(LLAMA_3_8B).dropout == 0.0


def test_other_case_is_a_gpt_with_positions_for_the_sequence():
    assert config_from_case(GPT_22B).num_parameters == load_model("megatron-22b").num_parameters
    assert config_from_case(GPT_22B, seq_len=8192).num_position_rows == 8192
    assert config_from_case(GPT_22B, dropout=0.0).dropout == 0.0


MIXTRAL = {
    **LLAMA_3_8B,
    "name": "Mixtral-8x7B v0.1",
    "kind": "moe",
    "vocab_size": 32000,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def test_a_model_with_experts_is_the_one_of_its_name_else_what_the_run_states():
    assert config_from_case(MIXTRAL) == load_model("mixtral-8x7b")
    assert config_from_case({**MIXTRAL, "num_hidden_layers": 4}) == load_model("mixtral-8x7b").with_layers(4)
    ours, mixtral = config_from_case({**MIXTRAL, "name": "ours"}), load_model("mixtral-8x7b")
    assert (ours.parts.experts, ours.num_parameters) == (mixtral.parts.experts, mixtral.num_parameters)
    other = config_from_case({**MIXTRAL, "hidden_size": 2048})  # not that Mixtral
    assert (other.hidden_size, other.parts.experts.width) == (2048, 14336)


DEEPSEEK_V3 = {
    **LLAMA_3_8B,
    "name": "DeepSeek-V3",
    "kind": "moe-mla",
    "num_hidden_layers": 4,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}


def test_a_truncated_model_keeps_the_layers_that_its_source_states():
    by_default = config_from_case(DEEPSEEK_V3)
    assert layers_text(by_default) == "4 layers: 1 dense, 3 with experts; no MTP"
    assert assumed_layers(DEEPSEEK_V3, by_default) == ["num_dense_layers", "num_mtp_layers"]
    stated = {**DEEPSEEK_V3, "num_dense_layers": 3, "num_mtp_layers": 1}
    assert layers_text(config_from_case(stated)) == "4 layers: 3 dense, 1 with experts; 1 module for a further token (MTP)"
    assert assumed_layers(stated, config_from_case(stated)) == []
    with pytest.raises(InputError, match="num_mtp_layers=-1"):
        config_from_case({**DEEPSEEK_V3, "num_mtp_layers": -1})


def test_flags_of_megatron_say_what_the_sizes_do_not():
    args = ["num-experts=8", "moe-ffn-hidden-size=1024", "moe-shared-expert-intermediate-size=512", "moe-layer-freq=([0]*3+[1]*29)"]
    model = config_from_case(MIXTRAL, settings={"megatron_args": args})
    assert (model.parts.experts.width, model.parts.experts.shared_width, model.intermediate_size) == (1024, 512, 14336)
    assert [(kind.count, kind.feed_forward) for kind in model.layer_kinds] == [(3, "dense"), (29, "experts")]
    assert expert_layers("2", 4) == [True, False, True, False]
    for frequency, words in (("([0]*1+[", "must be a number or a list"), ("([1]*5)", "is of 5 layers, not of 4")):
        with pytest.raises(InputError, match=words):
            expert_layers(frequency, 4)


def test_what_the_run_leaves_out_is_assumed_and_reported():
    model = config_from_case({**GPT_22B, "vocab_size": None, "tie_word_embeddings": None, "num_key_value_heads": None}, tp=8)
    assert model.vocab_size == 51200  # 50,257 padded to a multiple of 128 * 8
    assert model.tie_word_embeddings
    assert model.num_key_value_heads == 64
    assert model.origin.source.endswith("assumed: vocab_size, tie_word_embeddings")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "moe"}, "with experts where the run states how many"),
        ({"kind": "moe", "num_experts": 8}, "model.num_experts_per_tok"),
        ({"kind": "moe-mla", "num_experts": 8, "num_experts_per_tok": 2}, "neither its latents nor its shared experts"),
        ({"kind": "encoder"}, "encoder models"),
        ({"kind": "encoder-decoder"}, "encoder-decoder models"),
        ({"kind": "decoder-xl"}, "Transformer-XL"),
        ({"kind": "single-layer"}, "one layer alone"),
        ({"kind": "cnn (ImageNet 224x224, 4.1 GMACs/img fwd)"}, "convolutional"),
        ({"kind": "hybrid/other (dims not in source)"}, "only decoder models"),
        ({"hidden_size": None}, "model.hidden_size: the run does not state it"),
        ({"gated_mlp": None}, "model.gated_mlp"),
        ({"num_attention_heads": 7}, "must divide hidden_size"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7"),
        ({"vocab_size": "many"}, 'vocab_size="many"'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ],
)
def test_case_that_is_not_modelled_says_why(changes, words):
    with pytest.raises(InputError) as caught:
        config_from_case({**LLAMA_3_8B, **changes})
    assert words in str(caught.value)
