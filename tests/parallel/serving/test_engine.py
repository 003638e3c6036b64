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
    ],
)
def test_what_an_engine_cannot_be_is_refused(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        replace(load_engine("vllm"), **wrong)
