"""DenseNet-121 as a layer graph: within a block every layer reads what all earlier ones wrote.

Source: Huang, Liu, van der Maaten & Weinberger, Densely Connected Convolutional Networks, CVPR 2017, table 1 (growth rate 32, bottleneck of
4 x 32 channels, compression 0.5, 224 x 224 images). As in the graphs of PaSE, a normalisation stands before each convolution, ReLU is
part of it, and every join is a concat of all its inputs: a block of n layers has n + 1 tensors that read each other pairwise, so no order
of elimination has small tables (dependent sets of 25).
"""

from __future__ import annotations

from perfmodel.papers.pase.layer import LayerKind, PaseGraph, PaseLayer

_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH
_CLASSES = 1000


class _Builder:
    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.layers: list[PaseLayer] = []
        self.edges: list[tuple[int, int]] = []
        self.known: dict[str, PaseLayer] = {}  # equal layers are one object

    def add(self, layer: PaseLayer, *producers: int) -> int:
        self.layers.append(self.known.setdefault(repr(layer), layer))
        index = len(self.layers) - 1
        self.edges += [(producer, index) for producer in producers]
        return index

    def shape(self, channels: int, side: int) -> tuple[int, int, int, int]:
        return (self.batch, channels, side, side)

    def convolution(self, channels: int, filters: int, window: int, side: int, input_side: int, *producers: int) -> int:
        layer = PaseLayer(
            kind=LayerKind.CONVOLUTION,
            dims={"b": self.batch, "c": channels, "h": side, "w": side, "r": window, "s": window, "n": filters},
            inputs=(self.shape(channels, input_side),),
            outputs=(self.shape(filters, side),),
        )
        return self.add(layer, *producers)

    def pointwise(self, kind: LayerKind, channels: int, side: int, producer: int) -> int:
        shape = self.shape(channels, side)
        return self.add(
            PaseLayer(kind=kind, dims=dict(zip("bchw", shape, strict=True)), inputs=(shape,), outputs=(shape,), axes="b"), producer
        )

    def pooling(self, channels: int, window: int, side: int, input_side: int, producer: int) -> int:
        shape = self.shape(channels, side)
        layer = PaseLayer(
            kind=LayerKind.POOLING,
            dims=dict(zip("bchw", shape, strict=True)),
            inputs=(self.shape(channels, input_side),),
            outputs=(shape,),
            window=(window, window),
        )
        return self.add(layer, producer)

    def concat(self, parts: list[tuple[int, int]], side: int) -> int:
        """`parts`: vertex and channels of each input."""
        layer = PaseLayer(
            kind=LayerKind.CONCAT,
            dims={"b": self.batch, "c": 1, "h": side, "w": side},
            inputs=tuple(sorted({self.shape(channels, side) for _, channels in parts})),
            outputs=(self.shape(sum(channels for _, channels in parts), side),),
            axes="c",
        )
        return self.add(layer, *(vertex for vertex, _ in parts))


def densenet121(batch: int = 128) -> PaseGraph:
    """The network for training on `batch` images, with PaSE's cutoff for convolutional networks."""
    build = _Builder(batch)
    side, channels = 56, 2 * _GROWTH
    vertex = build.convolution(3, channels, 7, 2 * side, 4 * side)
    vertex = build.pointwise(LayerKind.NORM, channels, 2 * side, vertex)
    vertex = build.pooling(channels, 3, side, 2 * side, vertex)
    for block, num_layers in enumerate(_BLOCKS):
        parts = [(vertex, channels)]
        for _ in range(num_layers):
            joined = build.concat(parts, side) if len(parts) > 1 else vertex
            narrow = build.convolution(channels, _BOTTLENECK, 1, side, side, build.pointwise(LayerKind.NORM, channels, side, joined))
            grown = build.convolution(_BOTTLENECK, _GROWTH, 3, side, side, build.pointwise(LayerKind.NORM, _BOTTLENECK, side, narrow))
            parts.append((grown, _GROWTH))
            channels += _GROWTH
        vertex = build.pointwise(LayerKind.NORM, channels, side, build.concat(parts, side))
        if block < len(_BLOCKS) - 1:
            vertex = build.convolution(channels, channels // 2, 1, side, side, vertex)
            channels, side = channels // 2, side // 2
            vertex = build.pooling(channels, 2, side, 2 * side, vertex)
    mean = PaseLayer(
        kind=LayerKind.MEAN,
        dims=dict(zip("bchw", build.shape(channels, side), strict=True)),
        inputs=(build.shape(channels, side),),
        outputs=((batch, channels),),
        axes="hw",
    )
    head = PaseLayer(
        kind=LayerKind.FULLY_CONNECTED,
        dims={"b": batch, "n": _CLASSES, "c": channels},
        inputs=((batch, channels),),
        outputs=((batch, _CLASSES),),
    )
    scores = (batch, _CLASSES)
    loss = PaseLayer(kind=LayerKind.CROSS_ENTROPY, dims={"b": batch, "n": _CLASSES}, inputs=(scores,), outputs=(scores,))
    build.add(loss, build.add(head, build.add(mean, vertex)))
    return PaseGraph(
        name="densenet121",
        batch=batch,
        smallest_share=4,
        layers=tuple(build.layers),
        edges=tuple(build.edges),
        source="Huang et al., Densely Connected Convolutional Networks, CVPR 2017, table 1; layers as in PaSE (Elango, IPDPS 2021)",
    )
