"""A layer in the vocabulary of PaSE: what kind it is, over which named dims, what it reads and writes; and a graph of layers.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PaseLayer:
    """One layer: its iteration dims by name, in order, and the shapes of what it reads and writes.

    `axes` are the dims that it normalises, reduces or joins; a joined dim has size 1. `equation` is that of an einsum (`bsd,de->bse`).
    `window` is a pooling's, `pointwise` counts the elementwise operations fused into the layer. In a convolution h and w are those of
    the output.
    """

    kind: LayerKind
    dims: Mapping[str, int]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    axes: str = ""
    equation: str = ""
    window: tuple[int, int] = (1, 1)
    pointwise: int = 0

    @property
    def names(self) -> str:
        return "".join(self.dims)

    @property
    def sizes(self) -> Shape:
        return tuple(self.dims.values())

    @property
    def operands(self) -> tuple[str, str, str]:
        """Dims of an einsum's first and second input and of its output."""
        inputs, output = self.equation.split("->")
        first, second = inputs.split(",")
        return first, second, output


@dataclass(frozen=True, slots=True, kw_only=True)
class PaseGraph:
    """A network's layers and the edges (producer, consumer) between them. No dim is split into shares smaller than `smallest_share`."""

    name: str
    batch: int
    smallest_share: int
    layers: tuple[PaseLayer, ...]
    edges: tuple[tuple[int, int], ...]
    source: str


def einsum_layer(dims: Mapping[str, int], equation: str, *, pointwise: int = 0) -> PaseLayer:
    """An einsum; the shapes follow from its equation."""
    inputs, output = equation.split("->")
    shapes = [tuple(dims[name] for name in operand) for operand in (*inputs.split(","), output)]
    return PaseLayer(
        kind=LayerKind.EINSUM, dims=dims, inputs=tuple(shapes[:-1]), outputs=(shapes[-1],), equation=equation, pointwise=pointwise
    )
