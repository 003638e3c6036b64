"""Keys that the mask of an imported attention leaves: all earlier tokens, a window or a chunk, in which layers; other masks are refused."""

import pytest
import torch

from perfmodel.foundation.errors import InputError
from perfmodel.workload.imported.decoder import decoder_of
from perfmodel.workload.imported.graph import ImportedKind, Reach, SeenKeys
from tests.workload.imported.decoders import ByHand, Forward, Layer, Mixer, Net, added, causal, filled, imported, picked, places, window


def as_numbers(s):
    return torch.full((s, s), float("-inf")).triu(1)


def added_window(s):
    """As Hugging Face adds it to the scores: the least number where nothing is seen."""
    return torch.where(window(8)(s), 0.0, torch.finfo(torch.float32).min)[None, None]


def chunk(s):
    query, key = places(s)
    return (key <= query) & (key // 8 == query // 8)


def all_seen(s):
    return torch.ones(s, s, dtype=torch.bool)


def prefix(s):
    query, key = places(s)
    return (key <= query) | (key < 4)


def net(*masks):
    return lambda: Net([Layer(64, Mixer(64, 8, 2, 16, mask=mask), Forward(64, 96)) for mask in masks])


def seen(graph):
    return [vertex.seen for vertex in graph.vertices if vertex.kind is ImportedKind.ATTENTION]


@pytest.mark.parametrize(
    ("mask", "reach", "num_keys"),
    [
        (None, Reach.CAUSAL, 0),
        (causal, Reach.CAUSAL, 0),
        (as_numbers, Reach.CAUSAL, 0),
        (window(8), Reach.WINDOW, 8),
        (window(31), Reach.WINDOW, 31),
        (window(32), Reach.CAUSAL, 0),
        (added_window, Reach.WINDOW, 8),
        (chunk, Reach.CHUNK, 8),
        (all_seen, Reach.ALL, 0),
        (prefix, Reach.OTHER, 0),
    ],
)
def test_a_mask_made_of_sizes_alone_is_read(mask, reach, num_keys):
    assert seen(imported(net(mask))) == [SeenKeys(reach=reach, num_keys=num_keys)]


@pytest.mark.slow
def test_what_a_mask_says_is_a_field_of_the_model():
    model = decoder_of(imported(net(window(8), window(8))))
    assert (model.attention.sliding_window, model.attention.full_attention_every) == (8, 0)
    model = decoder_of(imported(net(window(8), None, window(8), None)))
    assert (model.attention.sliding_window, model.attention.full_attention_every) == (8, 2)
    model = decoder_of(imported(net(chunk, chunk, chunk, None)))
    assert (model.attention.attention_chunk, model.attention.sliding_window, model.attention.full_attention_every) == (8, 0, 4)


@pytest.mark.parametrize("put", [added, filled, picked], ids=lambda put: put.__name__)
@pytest.mark.parametrize(("mask", "reach"), [(causal, Reach.CAUSAL), (window(8), Reach.WINDOW), (prefix, Reach.OTHER)])
def test_attention_by_two_products_and_a_softmax_is_the_fused_one(put, mask, reach):
    graph = imported(lambda: Net([Layer(64, ByHand(64, 8, 2, 16, mask=mask, put=put), Forward(64, 96))]))
    assert {vertex.seen.reach for vertex in graph.vertices if vertex.kind is ImportedKind.SOFTMAX} == {reach}
    if reach is not Reach.OTHER:
        assert decoder_of(graph) == decoder_of(imported(net(mask)))


def test_without_a_mask_attention_by_hand_is_taken_to_be_causal_and_sinks_are_reported():
    models = [
        decoder_of(imported(lambda how=how: Net([Layer(64, ByHand(64, 8, 2, 16, **how), Forward(64, 96))])))
        for how in ({}, dict(sinks=True, mask=causal, put=added))
    ]
    assert [model.attention.attention_sinks for model in models] == [False, True]
    assert models[0] == decoder_of(imported(net(causal)))


def written_later(s):
    """A mask with a part that is written in place; that write is not in the graph of the mask."""
    mask = causal(s)
    mask[:, :4].fill_(True)
    return mask


def test_a_mask_that_is_written_into_is_not_known():
    assert seen(imported(net(written_later))) == [SeenKeys()]


class WithMask(Net):
    """A mask that it is called with."""

    def forward(self, tokens, mask):
        for layer in self.layers:
            layer.mixer.mask = lambda size: mask
        return super().forward(tokens)


def test_a_mask_that_depends_on_what_the_module_is_called_with_is_not_known():
    make = lambda: WithMask([Layer(64, Mixer(64, 8, 2, 16), Forward(64, 96))])  # noqa: E731
    graph = imported(make, "int64[2,32] bool[32,32]")
    assert seen(graph) == [SeenKeys()]
    assert decoder_of(graph).attention.sliding_window == 0


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ((all_seen,), "attends to later tokens too; a decoder's attention is causal"),
        ((prefix,), "sees by its mask neither all earlier tokens, nor a window of them"),
        ((window(8), window(4)), r"see by their masks window 8, window 4; one window .* .full_attention_every"),
        ((None, window(8)), r"see by their masks causal, window 8; .* .full_attention_every"),
    ],
)
def test_what_a_model_has_no_field_for_is_refused(masks, message):
    with pytest.raises(InputError, match=message) as raised:
        decoder_of(imported(net(*masks)))
    assert len(str(raised.value).splitlines()) == 1
