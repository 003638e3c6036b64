"""PaSE's layers as operators of a `Graph`, with the further inputs of its search.

A layer has PaSE's kind, and dims of one letter; its settings are the further inputs of the paper's formulas. It reads the outputs of other
layers, by runs of entries that a dim of each shares. Weights, work and saved data are left out, since the formulas include them.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from perfmodel.workload.graph import Graph, Operand, Operator, Setting, Tensor
from perfmodel.workload.imported.graph import DimLink

Shape = tuple[int, ...]


class LayerKind(StrEnum):
    CONVOLUTION = "convolution"
    POOLING = "pooling"
    FULLY_CONNECTED = "fully connected"
    EINSUM = "einsum"
    ATTENTION = "attention"
    LSTM = "lstm"
    NORM = "norm"
    SOFTMAX = "softmax"
    CROSS_ENTROPY = "cross-entropy"
    ELEMENTWISE = "elementwise"
    MEAN = "mean"
    CONCAT = "concat"
    STACK = "stack"
    UNSTACK = "unstack"
    RAVEL = "ravel"
    UNRAVEL = "unravel"


#: Dims that are not split.
_UNSPLIT: Mapping[str, str] = {LayerKind.CONVOLUTION: "hw", LayerKind.LSTM: "s"}


def layer(
    kind: LayerKind,
    dims: Mapping[str, int],
    *,
    writes: Shape = (),
    reads: Shape = (),
    axes: str = "",
    equation: str = "",
    window: tuple[int, int] = (1, 1),
    pointwise: int = 0,
    divided: Shape = (),
) -> Operator:
    """Return one layer, not yet in a graph.

    dims        by name, in order; in a convolution h and w are those of the output, a joined dim has size 1; those of an attention end in
                queries, head size, keys and value size
    writes      shape of the output; that of the dims if left out
    reads       of a pooling: shape of its input
    axes        dims that it normalises, reduces or joins
    equation    of an einsum: `bsd,de->bse`
    window      of a pooling; pointwise: elementwise operations fused into the layer
    divided     sizes that the parts of each dim must divide, 1 for one that is not split; by default those of the dims
    """
    settings: dict[str, Setting] = {"axes": axes, "equation": equation, "window": window, "pointwise": pointwise, "reads": reads}
    settings["divided"] = divided or tuple(1 if name in _UNSPLIT.get(kind, "") else size for name, size in dims.items())
    operator = Operator(name=kind, kind=kind, dims=dims, inputs=(), output=Operand(tensor="", dims=()), settings=settings)
    written = _written(operator)
    shape = writes or ((prod(dims.values()),) if written == FLAT else tuple(dims[name] for name in written))
    return replace(operator, output=Operand(tensor="", dims=written), settings=settings | {"writes": shape})


def einsum_layer(dims: Mapping[str, int], equation: str, *, pointwise: int = 0) -> Operator:
    """Return an einsum; the shapes follow from its equation."""
    return layer(LayerKind.EINSUM, dims, equation=equation, pointwise=pointwise)


def names_of(operator: Operator) -> str:
    return "".join(operator.dims)


def text_of(operator: Operator, setting: str) -> str:
    return str(operator.settings[setting])


def shape_of(operator: Operator, setting: str) -> Shape:
    value = operator.settings[setting]
    assert isinstance(value, tuple)
    return value


def terms_of(operator: Operator) -> tuple[str, str, str]:
    """Return the dims of an einsum's first and second input and of its output."""
    inputs, output = text_of(operator, "equation").split("->")
    first, second = inputs.split(",")
    return first, second, output


def likeness(operator: Operator) -> object:
    """Return a key that is equal for layers with equal costs."""
    return operator.kind, tuple(operator.dims.items()), tuple(operator.settings.items())


# --- tensors --------------------------------------------------------------------------------------------------------

#: A tensor of one position that no single dim splits: its one split is the product of all.
FLAT = ("",)


def _written(operator: Operator) -> tuple[str, ...]:
    names, axes = names_of(operator), text_of(operator, "axes")
    match operator.kind:
        case LayerKind.CONVOLUTION:
            return tuple("bnhw")
        case LayerKind.FULLY_CONNECTED:
            return tuple(names[:-1])
        case LayerKind.EINSUM:
            return tuple(terms_of(operator)[2])
        case LayerKind.LSTM:
            return tuple("bse")
        case LayerKind.MEAN | LayerKind.UNSTACK:
            return tuple(name for name in names if name not in axes)
        case LayerKind.RAVEL:
            return FLAT
    return tuple(names)


def read_dims(operator: Operator, shape: Shape) -> tuple[str, ...]:
    """Return the layer's dims along a tensor of this shape that it reads."""
    names, axes = names_of(operator), text_of(operator, "axes")
    match operator.kind:
        case LayerKind.CONVOLUTION:
            return tuple("bchw")
        case LayerKind.FULLY_CONNECTED:
            return (*names[:-2], names[-1])
        case LayerKind.EINSUM:
            # the last operand of that shape: of two tensors between the same two layers, the released code keeps the later
            first, second, _ = terms_of(operator)
            return tuple(second if tuple(operator.dims[name] for name in second) == shape else first)
        case LayerKind.LSTM:
            return tuple("bsd")
        case LayerKind.STACK:
            return tuple(name for name in names if name not in axes)
        case LayerKind.UNRAVEL:
            return FLAT
    return tuple(names)


# --- graphs ---------------------------------------------------------------------------------------------------------


#: Stands for all dims of a layer: one run that they split together.
ALL_DIMS = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaseEdge:
    """A tensor between two layers, by runs of entries that a dim of the producer and one of the consumer share."""

    producer: int
    consumer: int
    runs: tuple[DimLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaseGraph:
    """A graph of layers, the tensors between them, and the least size of a share of a dim.

    samples   dim of each layer that counts samples; "" for none
    names     names of the dims of each layer in its strategy
    """

    graph: Graph
    edges: tuple[PaseEdge, ...]
    smallest_share: int
    samples: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def batch(self) -> int:
        return self.graph.batch

    @property
    def layers(self) -> tuple[Operator, ...]:
        return self.graph.operators


def graph_of(
    name: str, layers: Sequence[Operator], edges: Iterable[tuple[int, int]], *, batch: int, smallest_share: int, source: str
) -> PaseGraph:
    """Return the graph of layers in an order of execution, in which `b` counts samples; `edges` are (producer, consumer)."""
    shapes = [shape_of(operator, "writes") for operator in layers]
    read: list[list[Operand]] = [[] for _ in layers]
    tensors = []
    for producer, consumer in sorted(edges):
        dims = read_dims(layers[consumer], shapes[producer])
        read[consumer].append(Operand(tensor=f"{producer}.out", dims=dims))
        runs = [
            DimLink(producer=written or ALL_DIMS, producer_inner=1, consumer=dim or ALL_DIMS, consumer_inner=1, size=size)
            for written, dim, size in zip(layers[producer].output.dims, dims, shapes[producer], strict=True)
        ]
        tensors.append(PaseEdge(producer=producer, consumer=consumer, runs=tuple(runs)))
    samples = tuple("b" if "b" in operator.dims else "" for operator in layers)
    graph = graph_of_layers(name, layers, read, batch=batch, source=source)
    names = tuple(tuple(operator.dims) for operator in layers)
    return PaseGraph(graph=graph, edges=tuple(tensors), smallest_share=smallest_share, samples=samples, names=names)


def graph_of_layers(name: str, layers: Sequence[Operator], reads: Sequence[Sequence[Operand]], *, batch: int, source: str) -> Graph:
    """Return the graph of layers with these inputs, each named by its number."""
    operators = tuple(
        replace(operator, name=str(index), inputs=tuple(reads[index]), output=replace(operator.output, tensor=f"{index}.out"))
        for index, operator in enumerate(layers)
    )
    shapes = {operator.output.tensor: shape_of(operator, "writes") for operator in operators}
    tensors = {name: Tensor(name=name, shape=shape) for name, shape in shapes.items()}
    return Graph(name=name, operators=operators, tensors=tensors, batch=batch, source=source)
