"""Engines of one's own: what cannot be is refused with its field."""

from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.serving.engine import load_engine


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"activation_factor": (3.0,)}, r"activation_factor=\(3.0,\): must be four factors"),
        ({"graph_sizes": (4, 2)}, r"graph_sizes=\(4, 2\): must be batches from 1"),
        ({"graph_sizes": ()}, r"graph_sizes=\(\): must be batches from 1"),
        ({"floor_fraction": 7.0}, "floor_fraction=7.0: must lie in 0..1; correct the engine"),
        ({"prefill_context": "all"}, "prefill_context='?all'?: must be one of any, latent, none"),
        ({"prefill_context_beside": ("tp",)}, "prefill_context_beside=.*: must be of pp, attention_dp"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        replace(load_engine("vllm"), **wrong)


def test_an_engine_of_ones_own_says_what_it_shares(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: vllm\nname: mine\nversion: '1'\nprefill_context: any\nprefill_context_since: ''\nprefill_context_beside: [pp]\n")
    engine = load_engine(file)
    assert (engine.prefill_context, engine.prefill_context_beside, engine.prefill_context_since) == ("any", ("pp",), "")
    assert engine.has_decode_context
