"""Laws of PaSE's cost function, and its formulas written out by hand on small layers."""

import numpy as np
import pytest

from perfmodel.planner.pase.cost import edge_cost, flops_per_word, layer_cost, missing_words
from perfmodel.planner.pase.graph import list_pase_graphs, load_pase_graph
from perfmodel.planner.pase.layer import LayerKind, einsum_layer, graph_of, layer, likeness
from perfmodel.planner.pase.search import pase_configurations

R = flops_per_word()
ALL_LAYERS = [case for name in list_pase_graphs() for case in {likeness(case): case for case in load_pase_graph(name).layers}.values()]
ALL_LAYERS.append(layer(LayerKind.ATTENTION, {"b": 8, "h": 4, "s": 16, "d": 8, "z": 16, "e": 8}))


def fully_connected(b, n, c, pointwise=0):
    return layer(LayerKind.FULLY_CONNECTED, {"b": b, "n": n, "c": c}, pointwise=pointwise)


def test_a_word_is_worth_5000_flop_at_10_tflops_and_16_gb_per_second():
    assert R == 5000
    assert flops_per_word(flop_rate=20e12) == 2 * R
    assert flops_per_word(bandwidth=32e9) == R / 2


def test_a_fully_connected_layer_by_hand():
    splits = np.array([[1, 1, 1], [4, 1, 1], [1, 2, 1], [1, 1, 8], [2, 2, 2]])
    by_hand = [
        3 * 64 * 32 * 16 + 3 * 64 * 32,
        3 * 16 * 32 * 16 + 3 * 16 * 32 + R * 2 * (32 * 16) * 3 / 4,
        3 * 64 * 16 * 16 + 3 * 64 * 16 + R * 2 * (64 * 16) / 2,
        3 * 64 * 32 * 2 + 3 * 64 * 32 + R * 2 * (64 * 32) * 7 / 8,
        3 * 32 * 16 * 8 + 3 * 32 * 16 + R * (32 * 16 + 32 * 8 + 16 * 8),
    ]
    assert layer_cost(fully_connected(64, 32, 16, pointwise=1), splits, word_flops=R).tolist() == by_hand


def test_a_fully_connected_layer_is_an_einsum_and_a_convolution_of_one_pixel():
    splits = np.array([[1, 1, 1], [2, 4, 1], [1, 2, 8], [4, 1, 2]])
    einsum = einsum_layer({"b": 64, "n": 32, "c": 16}, "bc,cn->bn")
    pixel = layer(LayerKind.CONVOLUTION, {"b": 64, "c": 16, "h": 1, "w": 1, "r": 1, "s": 1, "n": 32})
    of_pixel = np.ones((4, 7), dtype=int)
    of_pixel[:, [0, 6, 1]] = splits
    expected = layer_cost(fully_connected(64, 32, 16), splits, word_flops=R)
    assert np.array_equal(layer_cost(einsum, splits, word_flops=R), expected)
    assert np.array_equal(layer_cost(pixel, of_pixel, word_flops=R), expected)


def test_an_attention_is_two_products_and_a_softmax():
    case = ALL_LAYERS[-1]
    splits = pase_configurations(case, num_devices=16, smallest_share=1)
    b, h, s, d, z, e = splits.T
    parts = (
        (einsum_layer({"b": 8, "h": 4, "s": 16, "z": 16, "d": 8}, "bhsd,bhzd->bhsz"), (b, h, s, z, d)),
        (layer(LayerKind.SOFTMAX, {"b": 8, "h": 4, "s": 16, "z": 16}, axes="z"), (b, h, s, z)),
        (einsum_layer({"b": 8, "h": 4, "s": 16, "e": 8, "z": 16}, "bhsz,bhze->bhse"), (b, h, s, e, z)),
    )
    expected = sum(layer_cost(part, np.stack(columns, axis=1), word_flops=R) for part, columns in parts)
    assert np.array_equal(layer_cost(case, splits, word_flops=R), expected)


@pytest.mark.parametrize("kind", LayerKind)
def test_one_device_communicates_nothing(kind):
    """Without a split the cost does not depend on what a word costs."""
    layers = [case for case in ALL_LAYERS if case.kind == kind]
    assert layers
    for case in layers:
        unsplit = np.ones((1, len(case.dims)), dtype=int)
        assert layer_cost(case, unsplit, word_flops=R) == layer_cost(case, unsplit, word_flops=0.0)


@pytest.mark.parametrize("kind", LayerKind)
def test_free_communication_leaves_the_work_divided(kind):
    for case in [case for case in ALL_LAYERS if case.kind == kind][:5]:
        splits = pase_configurations(case, num_devices=16, smallest_share=1)
        free = layer_cost(case, splits, word_flops=0.0)
        total = free[(splits == 1).all(axis=1)][0]
        devices = splits.prod(axis=1)
        if (
            kind in (LayerKind.SOFTMAX, LayerKind.ATTENTION, LayerKind.CROSS_ENTROPY) or case.settings["pointwise"]
        ):  # what follows a reduction is not divided by its parts
            assert (free * devices >= total * (1 - 1e-12)).all()
        elif kind != LayerKind.MEAN:
            np.testing.assert_allclose(free * devices, total, rtol=1e-12)
        assert (layer_cost(case, splits, word_flops=R) >= free).all()


def test_a_split_that_stays_moves_nothing_and_a_change_moves_what_is_missing():
    same = np.array([[4, 2]])
    assert missing_words((64, 32), same, same) == 0
    assert missing_words((64, 32), np.array([[8, 1]]), np.array([[1, 8]])) == 64 * 4 - 8 * 4
    assert missing_words((64, 32), np.array([[4, 1]]), np.array([[8, 1]])) == 8 * 32  # more devices than hold it: all of the share


def test_an_edge_is_the_missing_words_both_ways():
    producer, consumer = fully_connected(64, 32, 16), fully_connected(64, 8, 32)
    produced = np.array([[1, 1, 1], [8, 1, 1], [1, 8, 1], [1, 1, 8]])
    consumed = np.array([[8, 1, 1], [1, 1, 8], [1, 8, 1]])
    (edge,) = graph_of("two", [producer, consumer], [(0, 1)], batch=64, smallest_share=1, source="this test").edges
    matrix = edge_cost(edge.runs, producer, produced, consumer, consumed, word_flops=R)
    assert matrix[1, 0] == 0  # b stays on b
    assert matrix[2, 1] == 0  # n becomes c
    assert matrix[1, 1] == 2 * R * (64 * 4 - 8 * 4)
    assert matrix[1, 2] == 2 * R * (64 * 32 - 8 * 32)  # split over 8, wanted whole
    assert matrix[3, 0] == 2 * R * 8 * 32  # whole on what counts as one device, wanted by 8
