import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.workload.config import FIELDS, TransformerConfig
from perfmodel.workload.layer_specs import PARTS
from perfmodel.workload.models import list_models, load_model


def llama(**changes):
    return load_model("llama-3-8b").having(**changes)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3.2-1b", "gemma-2-9b", "falcon-7b", "falcon-40b", "phi-2", "opt-125m", "qwen3-8b", "megatron-22b"]
)
def test_listed_parameters_add_up_to_the_count(name):
    model = load_model(name)
    shapes = model.parameter_shapes()
    assert sum(shape.num_elements for shape in shapes) == model.num_parameters
    assert len({shape.name for shape in shapes}) == len(shapes)


def test_parameters_know_their_region():
    regions = {shape.name: shape.region for shape in load_model("gpt2").with_layers(1).parameter_shapes()}
    assert regions["embedding.weight"] == regions["position_embedding.weight"] == "embedding"
    assert regions["layers.0.q_proj.weight"] == regions["layers.0.mlp_norm.bias"] == "layer"
    assert regions["final_norm.weight"] == "head"
    assert "lm_head.weight" not in regions  # tied


def test_matrices_are_stored_rows_first():
    shapes = {shape.name: shape.shape for shape in load_model("llama-3-8b").layer_shapes()}
    assert shapes["k_proj.weight"] == (1024, 4096)
    assert shapes["down_proj.weight"] == (4096, 14336)


def test_norms_of_queries_and_keys_have_the_weights_of_their_scope():
    shapes = {
        scope: dict(shape[:2] for shape in llama(qk_norm=True, qk_norm_scope=scope).layer_shapes()) for scope in ("head", "own", "all")
    }
    assert [sizes["q_norm.weight"] for sizes in shapes.values()] == [(128,), (32, 128), (4096,)]
    assert [sizes["k_norm.weight"] for sizes in shapes.values()] == [(128,), (8, 128), (1024,)]


def test_norms_may_stand_after_branches_alone():
    names = {shape.name for shape in llama(pre_norm=False, sandwich_norm=True).layer_shapes()}
    assert {"attention_post_norm.weight", "mlp_post_norm.weight"} < names
    assert names.isdisjoint({"attention_norm.weight", "mlp_norm.weight"})
    with pytest.raises(InputError, match="pre_norm=False"):
        llama(pre_norm=False)
    with pytest.raises(InputError, match="no_rotary_every=4: needs position=rotary"):
        llama(position="none", no_rotary_every=4)


@pytest.mark.parametrize("name", [name for name in list_models() if name.startswith("megatron")])
def test_megatron_models_follow_the_papers_formula(name):
    """12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), Narayanan et al. SC21 equation 2, plus the final norm that it leaves out."""
    model = load_model(name)
    layers, h, v, s = model.num_hidden_layers, model.hidden_size, model.vocab_size, model.positions.max_position_embeddings
    assert model.num_parameters == 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h


def test_non_embedding_parameters_leave_both_tables_out():
    model = load_model("qwen2.5-72b")  # its model card: 72.7 B, 70.0 B without embeddings
    assert model.num_parameters - model.num_parameters_non_embedding == 2 * model.vocab_size * model.hidden_size
    assert round(model.num_parameters_non_embedding / 1e9) == 70


def test_tying_saves_one_table():
    untied = llama()
    assert untied.num_parameters - llama(tie_word_embeddings=True).num_parameters == untied.vocab_size * untied.hidden_size


def test_with_layers_changes_only_the_layers_and_tells():
    model = load_model("llama-3-8b")
    assert model.with_layers(model.num_hidden_layers) is model
    shallow = model.with_layers(4)
    assert shallow.num_parameters == model.num_parameters - 28 * model.num_layer_parameters
    assert shallow.name == "llama-3-8b-4-layers"


@given(layers=st.integers(1, 1000))
def test_parameters_grow_by_a_layer_at_a_time(layers):
    model = load_model("gemma-2-9b")
    one, more = model.with_layers(layers), model.with_layers(layers + 1)
    assert more.num_parameters - one.num_parameters == model.num_layer_parameters


@pytest.mark.parametrize("name, fraction", [("llama-3-8b", 0.0), ("mistral-7b", 1.0), ("gemma-2-9b", 0.5), ("gpt2", 0.0)])
def test_share_of_layers_with_a_window(name, fraction):
    assert load_model(name).sliding_layer_fraction == fraction


def test_window_of_gemma3_spares_every_sixth_layer():
    model = llama(sliding_window=1024, full_attention_every=6, num_hidden_layers=26)
    assert model.sliding_layer_fraction == pytest.approx(22 / 26)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": -4096}, "hidden_size=-4096"),
        ({"hidden_size": 4096.0}, "hidden_size=4096.0"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"vocab_size": 10**5000}, "vocab_size="),
        ({"vocab_size": 2**31}, "vocab_size=2147483648"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"num_key_value_heads": 64}, "num_key_value_heads=64"),
        ({"sliding_window": -1}, "sliding_window=-1"),
        ({"full_attention_every": 2}, "full_attention_every=2"),
        ({"gated_mlp": 1}, "gated_mlp=1"),
        ({"activation": "mish"}, "activation=mish"),
        ({"activation": ["silu"]}, "activation=list of 1"),
        ({"norm": "batchnorm"}, "norm=batchnorm"),
        ({"norm_bias": True}, "norm_bias=True"),
        ({"shared_norm": True}, "shared_norm=True"),
        ({"parallel_block": True, "sandwich_norm": True}, "sandwich_norm=True"),
        ({"position_offset": 2}, "position_offset=2"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": float("nan")}, "dropout=nan"),
        ({"dropout": True}, "dropout=True"),
        ({"name": 3}, "name=3"),
        ({"num_mtp_layers": 2000}, "num_mtp_layers=2000: must be 16 at most"),
    ],
)
def test_contradictory_fields_are_refused_in_one_sentence(changes, field):
    with pytest.raises(InputError) as caught:
        llama(**changes)
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)


def test_files_have_every_field_of_a_config_and_of_its_groups():
    ungrouped = {field.name for field in dataclasses.fields(TransformerConfig) if field.init} - {*TransformerConfig.GROUP_OF.values()}
    assert {*FIELDS} == ungrouped | {*TransformerConfig.GROUP_OF}


def test_fields_are_single_values_that_a_file_can_hold():
    model = load_model("gemma-2-9b")
    values, records = model.values, {*PARTS, "kinds"}
    assert all(type(value) in (str, int, float, bool) for name, value in values.items() if name not in records)
    assert TransformerConfig.of(**values) == model
