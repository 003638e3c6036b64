"""PaSE's space: every admissible split and no other."""

import itertools
import math

import numpy as np
import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.layer import LayerKind, layer
from perfmodel.planner.pase.search import pase_configurations, pase_search, pase_tables


def layer_of(kind, **dims):
    return layer(kind, dims)


@pytest.mark.parametrize("num_devices", [1, 4, 6, 32])
@pytest.mark.parametrize("smallest_share", [1, 4])
def test_the_space_is_what_a_naive_loop_finds(num_devices, smallest_share):
    pooling = layer_of(LayerKind.POOLING, b=24, c=3, h=35, w=8)
    admissible = [
        [part for part in range(1, size + 1) if size % part == 0 and size // part >= smallest_share] or [1]
        for size in pooling.dims.values()
    ]
    naive = [row for row in itertools.product(*admissible) if math.prod(row) <= num_devices]
    assert pase_configurations(pooling, num_devices=num_devices, smallest_share=smallest_share).tolist() == [list(row) for row in naive]


def test_outputs_of_a_convolution_and_steps_of_an_lstm_stay_whole():
    convolution = layer_of(LayerKind.CONVOLUTION, b=8, c=8, h=8, w=8, r=1, s=1, n=8)
    lstm = layer_of(LayerKind.LSTM, l=2, s=8, b=8, e=8, d=8)
    assert (pase_configurations(convolution, num_devices=8, smallest_share=1)[:, [2, 3]] == 1).all()
    assert (pase_configurations(lstm, num_devices=8, smallest_share=1)[:, 1] == 1).all()


def test_a_flattened_tensor_is_split_into_contiguous_parts():
    ravel = layer_of(LayerKind.RAVEL, b=4, c=6, h=2)
    configurations = pase_configurations(ravel, num_devices=48, smallest_share=1).tolist()
    contiguous = []
    for row in itertools.product((1, 2, 4), (1, 2, 3, 6), (1, 2)):
        flat = np.arange(48).reshape(4, 6, 2)
        block = flat[: 4 // row[0], : 6 // row[1], : 2 // row[2]].ravel()
        if np.array_equal(block, np.arange(len(block))):
            contiguous.append(list(row))
    assert configurations == contiguous


def test_equal_layers_share_their_arrays():
    tables = pase_tables(load_pase_graph("transformer"), 8)
    assert len({id(cost) for cost in tables.vertex_costs}) == 15
    assert len({id(matrix) for _, _, matrix in tables.edges}) == 21


def test_more_devices_never_cost_more():
    graph = load_pase_graph("alexnet")
    costs = [pase_search(pase_tables(graph, p)).cost for p in (1, 2, 4, 8, 16, 32, 64)]
    assert costs == sorted(costs, reverse=True)


def test_one_device_has_one_strategy():
    tables = pase_tables(load_pase_graph("rnnlm"), 1)
    assert [len(cost) for cost in tables.vertex_costs] == [1] * 4
    assert all(set(split.values()) == {1} for split in tables.strategy(pase_search(tables).choice))


@pytest.mark.parametrize("num_devices", [0, -4, 2.5, True])
def test_a_number_of_devices_is_a_whole_number(num_devices):
    with pytest.raises(InputError, match="must be a whole number of at least 1"):
        pase_tables(load_pase_graph("alexnet"), num_devices)


def test_a_strategy_outside_the_space_is_refused():
    tables = pase_tables(load_pase_graph("alexnet"), 8)
    strategy = [list(split.values()) for split in tables.strategy(pase_search(tables).choice)]
    strategy[0] = [128, 1, 1, 1, 1, 1, 1]
    with pytest.raises(InputError, match=r"strategy\[0\]=\(128, 1, 1, 1, 1, 1, 1\): is not among the layer's configurations"):
        tables.cost_of(strategy)
