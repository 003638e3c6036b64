"""Layers that compute the same are traced once: the graph is that of a complete trace, or the trace is complete."""

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import nn

import perfmodel
from perfmodel.execute.importer import import_graph
from perfmodel.execute.importer.repeats import Repeats
from tests.workload.imported.hugging_face import Qwen3Moe


class Block(nn.Module):
    def __init__(self, size, index, how):
        super().__init__()
        self.layer_idx, self.how, self.loss = index, how, 0.0
        self.up, self.down, self.norm = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.BatchNorm1d(size)

    def forward(self, x, scale=None, *, flag=True):
        y = self.down(torch.relu(self.up(x)))
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        if self.how == "counts" and self.layer_idx % 2:
            y = y * 2
        if self.how == "multiplies":
            y = y * self.layer_idx
        if self.how == "reads":
            y = y + Net.seen[-1]
        if self.how == "leaves":
            self.loss = y.mean()
        return x + y, None, {"mean": y.mean()}


class Net(nn.Module):
    seen: ClassVar[list] = []

    def __init__(self, how="", layers=4, size=8):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block(size, index, how) for index in range(layers)]), nn.Linear(size, 3)

    def forward(self, x):
        total = 0
        for layer in self.layers:
            Net.seen.append(x * 2)
            x, _, values = layer(x, flag=False)
            total = total + values["mean"]
        return self.head(x) + total + sum(layer.loss for layer in self.layers)


class Tied(nn.Module):
    """The same layer twice in a list, and one that is called again."""

    def __init__(self):
        super().__init__()
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([first, second, first])

    def forward(self, x):
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        return x


class Scaled(nn.Linear):
    def __init__(self, scale):
        super().__init__(8, 8)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return super().forward(x) * self.scale


class Shares(nn.Module):
    """All layers share a buffer; `tied`: the first layer has the weight of the head."""

    def __init__(self, *, tied):
        super().__init__()
        scale = torch.ones(8)
        self.layers, self.head = nn.ModuleList([Scaled(scale) for _ in range(3)]), nn.Linear(8, 8)
        if tied:
            self.layers[0].weight = self.head.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NoGroups:
    def __init__(self, module):
        self.groups = []


@contextmanager
def calls_of(monkeypatch, layer):
    """Count the traced calls of a class of layers."""
    calls, forward = [], layer.forward

    def counted(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", counted)
        yield calls


CASES = {
    "layers": (Net, "float32[2,4,8]", Block, 1),
    "position counts": (lambda: Net("counts"), "float32[2,4,8]", Block, 1 + 4),
    "position in a product": (lambda: Net("multiplies"), "float32[2,4,8]", Block, 1 + 4),
    "value of the surrounding": (lambda: Net("reads"), "float32[2,4,8]", Block, 1 + 4),
    "value left to the surrounding": (lambda: Net("leaves"), "float32[2,4,8]", Block, 1 + 4),
    "one layer twice": (Tied, "float32[2,8]", nn.Linear, 4),
    "decoder and encoder": (
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        "float32[2,4,16] float32[2,4,16]",
        nn.MultiheadAttention,
        3,
    ),
    "experts": (lambda: Qwen3Moe(3, 64, 32, 2, 1, 16, 16, 6, 2), "int64[2,16]", nn.Embedding, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_that_of_a_complete_trace(name, monkeypatch):
    make, inputs, layer, expected = CASES[name]
    with calls_of(monkeypatch, layer) as calls:
        graph = perfmodel.import_graph(make, inputs)
    assert len(calls) == expected
    monkeypatch.setattr(import_graph, "Repeats", NoGroups)
    assert graph == perfmodel.import_graph(make, inputs)


def test_a_module_is_left_as_it_was():
    net = Net()
    with Repeats(net).traced_once():
        assert "forward" in vars(net.layers[0])
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert [type(layer.layer_idx) for layer in net.layers] == [int] * 4
    assert [layer.layer_idx for layer in net.layers] == [0, 1, 2, 3]


def test_layers_of_different_sizes_or_numbers_do_not_repeat():
    net = Net(layers=3)
    net.layers[1].how = "other"
    assert [group.paths for group in Repeats(net).groups] == [["layers.0", "layers.2"]]
    net.layers.append(Block(8, 7, ""))  # the number does not follow the position in the list
    assert Repeats(net).groups == []


@pytest.mark.parametrize(("tied", "paths"), [(False, [[f"layers.{i}" for i in range(3)]]), (True, [["layers.1", "layers.2"]])])
def test_shared_tensors_are_the_same_in_all_layers(tied, paths, monkeypatch):
    assert [group.paths for group in Repeats(Shares(tied=tied)).groups] == paths
    graph = perfmodel.import_graph(lambda: Shares(tied=tied), "float32[2,8]")
    monkeypatch.setattr(import_graph, "Repeats", NoGroups)
    assert graph == perfmodel.import_graph(lambda: Shares(tied=tied), "float32[2,8]")


def test_sizes_are_counted_in_all_layers():
    graph = perfmodel.import_graph(lambda: Qwen3Moe(2, 64, 32, 2, 1, 16, 16, 6, 2), "int64[2,16]")
    assert "12 sizes that only values tell are even shares" in graph.source
