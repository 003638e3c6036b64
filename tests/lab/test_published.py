import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.lab.published import config_from_case
from perfmodel.workload.models import load_model
from tests.lab.published_cases import MODEL as LLAMA_3_8B

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


def test_what_the_run_leaves_out_is_assumed_and_said():
    model = config_from_case({**GPT_22B, "vocab_size": None, "tie_word_embeddings": None, "num_key_value_heads": None}, tp=8)
    assert model.vocab_size == 51200  # 50,257 padded to a multiple of 128 * 8
    assert model.tie_word_embeddings
    assert model.num_key_value_heads == 64
    assert model.source.endswith("assumed: vocab_size, tie_word_embeddings")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "moe", "num_experts": 8}, "mixture-of-experts"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"kind": "moe-mla"}, "multi-head latent attention"),
        ({"kind": "encoder"}, "encoder models"),
        ({"kind": "encoder-decoder"}, "encoder-decoder models"),
        ({"kind": "decoder-xl"}, "Transformer-XL"),
        ({"kind": "single-layer"}, "one layer alone"),
        ({"kind": "cnn (ImageNet 224x224, 4.1 GMACs/img fwd)"}, "convolutional"),
        ({"kind": "hybrid/other (dims not in source)"}, "only dense decoder models"),
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
