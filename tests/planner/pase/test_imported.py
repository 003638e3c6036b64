"""PaSE's search on imported graphs: equal to its search on the same layers written by hand, and sound where torch's graphs differ."""

import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.planner.pase.imported import pase_graph_of, search_imported
from perfmodel.planner.pase.layer import LayerKind, graph_of, layer
from perfmodel.planner.pase.search import pase_tables, run_pase
from perfmodel.workload.imported.graph import ImportedKind
from tests.execute.per_operator.networks import LanguageLSTM, OddProducts, SmallAlexNet, SmallResNet, WithFourier

LLAMA = Path(perfmodel.__file__).parent / "workload" / "models" / "llama-3-8b.json"


def chain(*layers):
    edges = [(index, index + 1) for index in range(len(layers) - 1)]
    return graph_of("chain", layers, edges, batch=16, smallest_share=1, source="this test")


def connected(b, n, c):
    return layer(LayerKind.FULLY_CONNECTED, {"b": b, "n": n, "c": c})


def convolved(b, c, n, side):
    return layer(LayerKind.CONVOLUTION, {"b": b, "c": c, "h": side, "w": side, "r": 3, "s": 3, "n": n})


@pytest.mark.parametrize("num_devices", [1, 2, 6, 8, 32])
def test_linear_layers_cost_what_they_cost_by_hand(num_devices):
    imported = perfmodel.import_graph(
        lambda: nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 48, bias=False), nn.Linear(48, 32)), "float32[16,64]"
    )
    by_hand = run_pase(chain(connected(16, 256, 64), connected(16, 48, 256), connected(16, 32, 48)), num_devices)
    result = search_imported(imported, num_devices)
    assert result.solution.cost == pytest.approx(by_hand.solution.cost, rel=1e-12)
    if 16 % num_devices == 0:
        assert result.times_data_parallel == pytest.approx(by_hand.times_data_parallel, rel=1e-12)


@pytest.mark.parametrize("num_devices", [1, 4, 16])
def test_convolutions_cost_what_they_cost_by_hand(num_devices):
    imported = perfmodel.import_graph(lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3, stride=2)), "float32[16,3,34,34]")
    layers = convolved(16, 3, 32, 32), convolved(16, 32, 64, 15)
    by_hand = run_pase(chain(*layers), num_devices)
    result = search_imported(imported, num_devices)
    assert result.solution.cost == pytest.approx(by_hand.solution.cost, rel=1e-12)
    assert result.times_data_parallel == pytest.approx(by_hand.times_data_parallel, rel=1e-12)


def test_a_reshape_between_agreeing_splits_costs_nothing():
    """Heads cut out of a projection's features: cutting features and heads alike moves no data."""

    class Reshapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.into(x).unflatten(-1, (8, 8)).transpose(1, 2).relu()

    graph = perfmodel.import_graph(Reshapes, "float32[2,4,64]")
    tables = pase_tables(pase_graph_of(graph), 16)
    configurations, (_, _, matrix) = tables.configurations, tables.edges[-1]
    projection, after = graph.vertices[-2:]
    names = tuple(projection.dims), tuple(after.dims)

    def row(which, **parts):
        wanted = [parts.get(name, 1) for name in names[which]]
        return int(np.flatnonzero((configurations[which + 1] == wanted).all(axis=1))[0])

    assert tuple(after.dims) == ("b", "c", "h", "w")  # b, heads, s, depth
    assert matrix[row(0, n=8), row(1, c=8)] == 0
    assert matrix[row(0, n=4), row(1, c=4)] == 0
    assert matrix[row(0, n=16), row(1, c=8, w=2)] == 0
    assert matrix[row(0, n=8), row(1, w=8)] == 2 * 5000 * (2 * 4 * 64 / 8) * (1 - 1 / 8)


NETWORKS = {
    "alexnet": (SmallAlexNet, "images=float32[16,3,96,96] labels=int64[16]"),
    "resnet": (SmallResNet, "float32[16,3,64,64]"),
    "lstm": (LanguageLSTM, "tokens=int64[16,10] labels=int64[16,10]"),
    "odd products": (OddProducts, "float32[16,8,12,12]"),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), "float32[16,8,64]"),
    "fourier": (WithFourier, "float32[16,8]"),
    "pointers": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), "float32[4,6,32] float32[4,6,32] float32[4,6,32]"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_can_be_searched(name):
    graph = perfmodel.import_graph(*NETWORKS[name])
    one, eight = (search_imported(graph, num_devices) for num_devices in (1, 8))
    assert one.solution.cost == one.data_parallel_cost > 0
    assert eight.solution.cost <= min(eight.data_parallel_cost, one.solution.cost)
    assert eight.solution.is_proved
    for vertex, parts in zip(graph.vertices, eight.strategy, strict=True):
        assert int(np.prod(list(parts.values()))) <= 8
        assert all(vertex.dims[name] % part == 0 for name, part in parts.items())
        assert all(parts[name] == 1 for name in vertex.unsplit)
        if vertex.kind is ImportedKind.UNRECOGNISED:
            assert dict(parts) == {}


def test_data_parallelism_uses_no_more_devices_than_there_are_samples():
    graph = perfmodel.import_graph("torch.nn:Linear(64, 64)", "float32[4,64]")
    assert search_imported(graph, 2).data_parallel_devices == 2
    assert search_imported(graph, 16).data_parallel_devices == 4


@pytest.mark.slow
def test_shared_heads_are_split_no_further_than_they_are_many(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(LLAMA.read_text(encoding="utf-8")) | {"num_hidden_layers": 4}))
    graph = perfmodel.import_graph(f"perfmodel.execute.importer.import_graph:shipped('{config}')", "int64[2,128]")
    result = search_imported(graph, 16)
    parts = [split for vertex, split in zip(graph.vertices, result.strategy, strict=True) if vertex.kind is ImportedKind.ATTENTION]
    assert len(parts) == 4
    assert all(8 % split["h"] == 0 for split in parts)
    assert result.data_parallel_cost > result.solution.cost


@pytest.mark.parametrize("num_devices", [0, -1, True, 2.0])
def test_a_bad_number_of_devices_is_one_sentence(num_devices):
    graph = perfmodel.import_graph(WithFourier, "float32[16,8]")
    with pytest.raises(InputError, match="must be a whole number of at least 1"):
        search_imported(graph, num_devices)
