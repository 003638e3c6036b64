"""DenseNet-121 as a layer graph: within a block every layer reads the outputs of all earlier ones.

Source: Huang, Liu, van der Maaten & Weinberger, Densely Connected Convolutional Networks, CVPR 2017, table 1 (growth rate 32, bottleneck of
4 x 32 channels, compression 0.5, 224 x 224 images). As in the graphs of PaSE, a normalisation precedes each convolution and includes the
ReLU, and every join is a concat of all its inputs. A block of n layers has n + 1 tensors that read each other pairwise, so no elimination
order has small tables (dependent sets of 25).
"""

from __future__ import annotations

from perfmodel.planner.pase.layer import LayerKind, PaseGraph, Shape, graph_of, layer
from perfmodel.workload.graph import Operator

_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH
_CLASSES = 1000


class _Builder:
    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.layers: list[Operator] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, operator: Operator, *producers: int) -> int:
        self.layers.append(operator)
        index = len(self.layers) - 1
        self.edges += [(producer, index) for producer in producers]
        return index

    def shape(self, channels: int, side: int) -> Shape:
        return (self.batch, channels, side, side)

    def convolution(self, channels: int, filters: int, window: int, side: int, *producers: int) -> int:
        dims = {"b": self.batch, "c": channels, "h": side, "w": side, "r": window, "s": window, "n": filters}
        return self.add(layer(LayerKind.CONVOLUTION, dims), *producers)

    def pointwise(self, kind: LayerKind, channels: int, side: int, producer: int) -> int:
        return self.add(layer(kind, dict(zip("bchw", self.shape(channels, side), strict=True)), axes="b"), producer)

    def pooling(self, channels: int, window: int, side: int, input_side: int, producer: int) -> int:
        dims = dict(zip("bchw", self.shape(channels, side), strict=True))
        return self.add(layer(LayerKind.POOLING, dims, reads=self.shape(channels, input_side), window=(window, window)), producer)

    def concat(self, parts: list[tuple[int, int]], side: int) -> int:
        """Add a concat. parts: vertex and channels of each input"""
        joined = self.shape(sum(channels for _, channels in parts), side)
        operator = layer(LayerKind.CONCAT, {"b": self.batch, "c": 1, "h": side, "w": side}, writes=joined, axes="c")
        return self.add(operator, *(vertex for vertex, _ in parts))


def densenet121(batch: int = 128) -> PaseGraph:
    """Return the network for training on `batch` images, with PaSE's cutoff for convolutional networks."""
    build = _Builder(batch)
    side, channels = 56, 2 * _GROWTH
    vertex = build.convolution(3, channels, 7, 2 * side)
    vertex = build.pointwise(LayerKind.NORM, channels, 2 * side, vertex)
    vertex = build.pooling(channels, 3, side, 2 * side, vertex)
    for block, num_layers in enumerate(_BLOCKS):
        parts = [(vertex, channels)]
        for _ in range(num_layers):
            joined = build.concat(parts, side) if len(parts) > 1 else vertex
            narrow = build.convolution(channels, _BOTTLENECK, 1, side, build.pointwise(LayerKind.NORM, channels, side, joined))
            grown = build.convolution(_BOTTLENECK, _GROWTH, 3, side, build.pointwise(LayerKind.NORM, _BOTTLENECK, side, narrow))
            parts.append((grown, _GROWTH))
            channels += _GROWTH
        vertex = build.pointwise(LayerKind.NORM, channels, side, build.concat(parts, side))
        if block < len(_BLOCKS) - 1:
            vertex = build.convolution(channels, channels // 2, 1, side, vertex)
            channels, side = channels // 2, side // 2
            vertex = build.pooling(channels, 2, side, 2 * side, vertex)
    mean = layer(LayerKind.MEAN, dict(zip("bchw", build.shape(channels, side), strict=True)), axes="hw")
    head = layer(LayerKind.FULLY_CONNECTED, {"b": batch, "n": _CLASSES, "c": channels})
    loss = layer(LayerKind.CROSS_ENTROPY, {"b": batch, "n": _CLASSES})
    build.add(loss, build.add(head, build.add(mean, vertex)))
    return graph_of(
        "densenet121",
        build.layers,
        build.edges,
        batch=batch,
        smallest_share=4,
        source="Huang et al., Densely Connected Convolutional Networks, CVPR 2017, table 1; layers as in PaSE (Elango, IPDPS 2021)",
    )
