import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.workload import models
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.models import family_table, read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
VARIANTS = [json.loads(line) for line in (Path(__file__).parent / "config_variants.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", VARIANTS, ids=lambda row: row["config"]["model_type"])
def test_small_variants_count_as_transformers_counts(row):
    """The counts are those of the model that transformers 5.23 builds from the same config (the language half of a nested one)."""
    assert read_config(row["config"]).num_parameters == row["num_parameters"]


def test_llama_block():
    model = read_config(LLAMA, name="tiny")
    assert (model.name, model.origin.architecture, model.head_dim) == ("tiny", "llama", 16)
    assert (model.norms.norm, model.positions.position, model.mlp.activation, model.mlp.gated_mlp) == ("rmsnorm", "rotary", "silu", True)
    assert not any((*asdict(model.biases).values(), model.tie_word_embeddings))


def test_gpt2_block():
    model = models.load_model("gpt2")
    assert (model.norms.norm, model.positions.position) == ("layernorm", "learned")
    assert (model.mlp.activation, model.mlp.gated_mlp) == ("gelu_tanh", False)
    assert model.intermediate_size == 3072
    assert model.biases.qkv_bias
    assert model.tie_word_embeddings
    assert model.dropout == 0.1


def test_parallel_blocks_share_a_norm_where_the_family_does():
    blocks = {name: models.load_model(name) for name in ("falcon-7b", "falcon-40b", "phi-2", "gpt-neox-20b")}
    assert all(model.parallel_block for model in blocks.values())
    assert {name for name, model in blocks.items() if model.norms.shared_norm} == {"falcon-7b", "phi-2"}
    assert (blocks["falcon-7b"].num_key_value_heads, blocks["falcon-40b"].num_key_value_heads) == (1, 8)
    assert blocks["phi-2"].biases.lm_head_bias


def test_opt_table_has_two_rows_more():
    model = models.load_model("opt-125m")
    assert (model.positions.max_position_embeddings, model.num_position_rows, model.mlp.activation) == (2048, 2050, "relu")


def test_head_dim_need_not_share_out_the_hidden_size():
    assert models.load_model("gemma-7b").head_dim == 256
    assert read_config({**LLAMA, "num_attention_heads": 6, "head_dim": 10}).head_dim == 10


@pytest.mark.parametrize(
    "config, window, every",
    [
        ({"model_type": "mistral", "sliding_window": 8}, 8, 0),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
        ({"model_type": "mistral"}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8, 0),
        ({"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}, 8, 2),
        ({"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}, 8, 6),
        ({"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 4}, 8, 4),
        ({"model_type": "gemma2", "head_dim": 16, "sliding_window": 8, "layer_types": ["full_attention"] * 2}, 0, 0),
        ({"model_type": "gemma2", "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8, 0),
        ({"model_type": "llama", "sliding_window": 8}, 0, 0),
    ],
)
def test_sliding_window(config, window, every):
    model = read_config({**LLAMA, **config})
    assert (model.attention.sliding_window, model.attention.full_attention_every) == (window, every)


def test_vision_language_model_is_read_by_its_language_half():
    model = read_config(
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}}
    )
    assert (model.origin.architecture, model.num_hidden_layers, model.vocab_size, model.head_dim) == ("gemma3_text", 34, 262208, 256)
    with pytest.raises(InputError, match=r"model_type=mllama_text_model: needs cross-attention"):
        read_config({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}})


@pytest.mark.parametrize(
    "config, architecture, left_out",
    [
        ({"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 8}}, "llama", "its vision tower"),
        ({**LLAMA, "model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "qwen2_vl_text", "its vision tower"),
        ({**LLAMA, "model_type": "glm", "head_dim": 16, "vision_config": {"hidden_size": 8}}, "glm", "its vision tower"),
        ({**LLAMA, "vision_config": {"depth": 2}, "audio_config": {"depth": 2}}, "llama", "its vision tower and its audio tower"),
        (LLAMA, "llama", ""),
    ],
)
def test_parts_outside_the_language_model_are_named(config, architecture, left_out):
    model = read_config(config)
    assert (model.origin.architecture, model.origin.left_out) == (architecture, left_out)


def test_outer_tie_reaches_the_language_half():
    outer = {"model_type": "llava", "tie_word_embeddings": True, "text_config": {"hidden_size": 64}}
    assert read_config(outer).tie_word_embeddings


def test_class_name_stands_in_for_a_missing_model_type():
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert read_config({**config, "architectures": ["MistralForCausalLM"]}).origin.architecture == "mistral"


def test_null_is_a_missing_key():
    assert read_config({**LLAMA, "head_dim": None, "attention_bias": None}).head_dim == 16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_local_experts": 8}, "num_local_experts=8: model_type=llama has no such key"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: model_type=llama has no such key"),
        ({"model_type": "bert"}, "an encoder"),
        ({"model_type": "t5"}, "cross-attention"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"model_type": "mamba2"}, "Mamba-2 layers in another"),
        ({"model_type": "falcon_mamba"}, "Mamba-1"),
        ({"model_type": "xglm2"}, "there is no reader for this architecture"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": None}, "model_type: is missing"),
        ({"model_type": 3}, "model_type=3: must be a text"),
        ({"hidden_size": None}, "hidden_size: is missing, and model_type=llama needs it"),
        ({"hidden_size": "64"}, 'hidden_size="64": must be a whole number'),
        ({"hidden_size": 64.0}, "hidden_size=64.0: must be a whole number"),
        ({"num_hidden_layers": -2}, "num_hidden_layers=-2: must lie from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must divide"),
        ({"num_attention_heads": 6}, "num_attention_heads=6: must divide hidden_size=64; or give head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"vocab_size": 10**5000}, "vocab_size=a number of over 20 digits"),
        ({"hidden_act": "mish"}, "hidden_act=mish: this activation is not modelled"),
        ({"hidden_act": ["silu"]}, "hidden_act=list of 1"),
        ({"attention_bias": "yes"}, 'attention_bias="yes": must be true or false'),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads: is missing"),
        ({"model_type": "gemma"}, "head_dim: is missing"),
        ({"model_type": "gemma2", "head_dim": 16}, "sliding_window: is missing"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "max_window_layers=1"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["linear_attention"] * 2}, "layer_types=list of 2"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types=list of 2"),
        ({"model_type": "gpt2", "n_embd": 128, "n_layer": 1, "n_head": 1, "n_positions": 8}, "n_embd=128: contradicts hidden_size=64"),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, "no_rope_layers=list of 2: must have one entry for each layer and repeat"),
        ({"model_type": "smollm3", "no_rope_layers": ["yes"]}, "no_rope_layers=list of 1: must list 1 or 0"),
        (
            {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": {"alibi": False}},
            "alibi=False: positions other",
        ),
        ({"model_type": "starcoder2", "norm_type": "rms_norm"}, "norm_type=rms_norm: RMSNorm is not modelled yet"),
        ({"model_type": "opt", "ffn_dim": 96, "do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ({"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
        ({"model_type": "opt", "ffn_dim": 96, "dropout": 1.5}, "dropout=1.5: must be a share"),
    ],
)
def test_bad_config_is_refused_in_one_sentence(changes, words):
    with pytest.raises(InputError) as caught:
        read_config({**LLAMA, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_broken_file_is_refused(tmp_path, contents):
    path = tmp_path / "config.json"
    path.write_bytes(contents)
    with pytest.raises(InputError):
        read_config(path)


def test_file_and_folder_read_alike(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(folder) == read_config(str(folder / "config.json"))
    assert read_config(folder).name == "my-model"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([1, 2, 4, 8, 64, 128, 0.1, True, "gelu", "silu"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {key for row in VARIANTS for key in row["config"]}
    | {
        "architectures",
        "num_experts",
        "kv_lora_rank",
        "is_encoder_decoder",
        "n_inner",
        "resid_pdrop",
        "hidden_dropout",
        "_source",
        "_name_or_path",
    }
)
CONFIGS = st.fixed_dictionaries(
    {"model_type": st.sampled_from(sorted(family_table().families))}, optional={key: JSON for key in KEYS if key != "model_type"}
)


def _reads_or_refuses(config):
    try:
        model = read_config(config)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert len(str(error)) < 4100  # noqa: PT017
    else:
        assert isinstance(model, TransformerConfig)
        assert model.num_parameters > 0


@given(JSON)
def test_any_json_is_read_or_refused(config):
    _reads_or_refuses(config)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=12) | CONFIGS | st.builds(lambda nested: {"text_config": nested}, CONFIGS))
@pytest.mark.slow
def test_any_value_under_any_known_key_is_read_or_refused(config):
    _reads_or_refuses(config)


@given(st.sampled_from(VARIANTS), st.sampled_from(KEYS), JSON)
def test_one_damaged_key_is_read_or_refused(row, key, value):
    _reads_or_refuses({**row["config"], key: value})


@given(st.sampled_from(VARIANTS), st.data())
def test_one_missing_key_is_read_or_refused(row, data):
    key = data.draw(st.sampled_from(sorted(row["config"])))
    _reads_or_refuses({name: value for name, value in row["config"].items() if name != key})


@given(st.binary(max_size=60))
def test_any_bytes_in_a_file_are_read_or_refused(tmp_path_factory, contents):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(contents)
    _reads_or_refuses(path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30"}, "is a diffusers config"),
        ({"model_type": "jamba"}, "Mamba-1 layers (Mamba-2, as in nemotron_h, is modelled)"),
        ({"model_type": "bamba"}, "Mamba-2 layers in another arrangement than nemotron_h"),
    ],
)
def test_what_is_no_known_decoder_says_what_it_is(config, says):
    with pytest.raises(InputError) as caught:
        read_config(config)
    assert says in str(caught.value)
    assert len(str(caught.value)) <= 200
