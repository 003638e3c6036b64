"""Models with fewer layers: which dense layers and prediction modules they keep."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import load_model
from perfmodel.workload.truncation import layers_text, truncated


@pytest.mark.parametrize(
    ("num_layers", "text"),
    [
        (4, "4 layers: 1 dense, 3 with experts; no MTP"),
        (30, "30 layers: 1 dense, 29 with experts; no MTP"),
        (61, "61 layers: 3 dense, 58 with experts; 1 module for a further token (MTP)"),
    ],
)
def test_a_truncated_model_has_dense_layers_in_proportion_and_no_prediction_module(num_layers, text):
    assert layers_text(truncated(load_model("deepseek-v3"), num_layers)) == text


def test_stated_layers_replace_the_defaults():
    model = load_model("deepseek-v3")
    assert layers_text(truncated(model, 4, num_dense_layers=3, num_mtp_layers=1)) == (
        "4 layers: 3 dense, 1 with experts; 1 module for a further token (MTP)"
    )
    assert [kind.feed_forward for kind in truncated(model, 4, num_dense_layers=0).layer_kinds] == ["experts"]
    assert truncated(model, 61, num_mtp_layers=0).num_mtp_layers == 0


def test_a_model_at_its_full_depth_is_unchanged():
    assert truncated(load_model("deepseek-v3"), 61) == load_model("deepseek-v3")
    assert truncated(load_model("mixtral-8x7b"), 4) == load_model("mixtral-8x7b").with_layers(4)


def test_dense_layers_that_do_not_exist_are_refused():
    with pytest.raises(InputError, match="num_dense_layers=5: must be at most num_hidden_layers=4"):
        truncated(load_model("deepseek-v3"), 4, num_dense_layers=5)
    with pytest.raises(InputError, match="has no leading dense layers"):
        truncated(load_model("mixtral-8x7b"), 4, num_dense_layers=1)


def test_models_with_alike_layers_have_no_text():
    assert layers_text(load_model("mixtral-8x7b")) == ""
    assert layers_text(load_model("llama-3-8b")) == ""
