"""PaSE's layers as operators of a `Graph`, with the further inputs of its search.

A layer has PaSE's kind, and dims of one letter in PaSE's order; its settings are the further inputs of the paper's formulas. It reads the
outputs of other layers. Weights, work and saved data are left out, since the formulas include them.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod

from perfmodel.workload.graph import Graph, Operand, Operator, Setting, Tensor

Shape = tuple[int, ...]


class LayerKind(StrEnum):
    CONVOLUTION = "convolution"
    POOLING = "pooling"
    FULLY_CONNECTED = "fully connected"
    EINSUM = "einsum"
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
) -> Operator:
    """Return one layer, not yet in a graph.

    dims        by name, in order; in a convolution h and w are those of the output, a joined dim has size 1
    writes      shape of the output; that of the dims if left out
    reads       of a pooling: shape of its input
    axes        dims that it normalises, reduces or joins
    equation    of an einsum: `bsd,de->bse`
    window      of a pooling; pointwise: elementwise operations fused into the layer
    """
    settings: dict[str, Setting] = {"axes": axes, "equation": equation, "window": window, "pointwise": pointwise, "reads": reads}
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


@dataclass(frozen=True, kw_only=True)
class PaseGraph:
    """A graph of layers, and the least size of a share of a dim."""

    graph: Graph
    smallest_share: int

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def batch(self) -> int:
        return self.graph.batch

    @property
    def layers(self) -> tuple[Operator, ...]:
        return self.graph.operators

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The (producer, consumer) of each tensor between two layers."""
        producers = self.graph.producers()
        return tuple(sorted((producers[tensor], index) for tensor, reading in self.graph.readers().items() for index, _ in reading))


def graph_of(
    name: str, layers: Sequence[Operator], edges: Iterable[tuple[int, int]], *, batch: int, smallest_share: int, source: str
) -> PaseGraph:
    """Return the graph of layers in an order of execution; `edges` are (producer, consumer)."""
    shapes = [shape_of(operator, "writes") for operator in layers]
    read: list[list[Operand]] = [[] for _ in layers]
    for producer, consumer in sorted(edges):
        dims = read_dims(layers[consumer], shapes[producer])
        read[consumer].append(Operand(tensor=f"{producer}.out", dims=dims))
    operators = tuple(
        replace(operator, name=str(index), inputs=tuple(read[index]), output=replace(operator.output, tensor=f"{index}.out"))
        for index, operator in enumerate(layers)
    )
    tensors = {f"{index}.out": Tensor(name=f"{index}.out", shape=shape) for index, shape in enumerate(shapes)}
    return PaseGraph(
        graph=Graph(name=name, operators=operators, tensors=tensors, batch=batch, source=source), smallest_share=smallest_share
    )
