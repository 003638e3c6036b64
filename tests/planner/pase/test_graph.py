"""The shipped layer graphs are whole: edges carry a tensor that the producer writes and the consumer reads."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.planner.pase.densenet import densenet121
from perfmodel.planner.pase.graph import list_pase_graphs, load_pase_graph
from perfmodel.planner.pase.layer import LayerKind, einsum_layer, read_dims, shape_of, terms_of


@pytest.mark.parametrize("name", list_pase_graphs())
def test_each_edge_carries_a_tensor(name):
    graph = load_pase_graph(name)
    assert graph.graph.source
    for producer, consumer in ((edge.producer, edge.consumer) for edge in graph.edges):
        assert producer < consumer
        produced, reads = graph.layers[producer].output.tensor, graph.layers[consumer].inputs
        (read,) = [operand for operand in reads if operand.tensor == produced]
        assert read.dims == read_dims(graph.layers[consumer], graph.graph.tensors[produced].shape)
    assert len({(edge.producer, edge.consumer) for edge in graph.edges}) == len(graph.edges)


def test_an_unknown_graph_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="graph=alexnett: no such layer graph is shipped; did you mean 'alexnet'"):
        load_pase_graph("alexnett")


def test_shapes_of_an_einsum_follow_from_its_equation():
    layer = einsum_layer({"b": 4, "s": 8, "e": 16, "d": 2}, "bsd,de->bse")
    assert (read_dims(layer, (4, 8, 2)), read_dims(layer, (2, 16))) == (tuple("bsd"), tuple("de"))
    assert shape_of(layer, "writes") == (4, 8, 16)
    assert terms_of(layer) == ("bsd", "de", "bse")


def test_densenet_has_its_layers_and_channels():
    """Huang et al. 2017, table 1: 120 convolutions and a classifier; 1024 channels at the end of the last block of 7 x 7."""
    graph = densenet121()
    kinds = [layer.kind for layer in graph.layers]
    assert kinds.count(LayerKind.CONVOLUTION) == 120
    assert kinds.count(LayerKind.FULLY_CONNECTED) == 1
    last = next(layer for layer in reversed(graph.layers) if layer.kind == LayerKind.CONCAT)
    assert shape_of(last, "writes") == (128, 1024, 7, 7)


def test_densenet_has_its_parameters():
    """7,978,856 with 1000 classes, as torchvision counts; each normalisation has two a channel, the classifier a bias."""
    total = 0
    for layer in densenet121().layers:
        dims = layer.dims
        if layer.kind == LayerKind.CONVOLUTION:
            total += dims["c"] * dims["r"] * dims["s"] * dims["n"]
        elif layer.kind == LayerKind.NORM:
            total += 2 * dims["c"]
        elif layer.kind == LayerKind.FULLY_CONNECTED:
            total += dims["c"] * dims["n"] + dims["n"]
    assert total == 7_978_856
