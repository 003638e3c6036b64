"""Layer graphs in the vocabulary of PaSE: what kind of layer, over which named dims, and who reads whose tensor.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021. The graphs beside this file (`graphs/*.json`)
were extracted by running its released code; DenseNet-121 is built in `densenet.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError, suggest

_FOLDER = Path(__file__).parent / "graphs"

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


def list_pase_graphs() -> tuple[str, ...]:
    """The names that `load_pase_graph` knows."""
    return tuple(sorted([*(path.stem for path in _FOLDER.glob("*.json")), "densenet121"]))


def load_pase_graph(name: str) -> PaseGraph:
    """A network of the paper by its name, or `densenet121`."""
    if name == "densenet121":
        from perfmodel.workload.densenet import densenet121

        return densenet121()
    path = _FOLDER / f"{name}.json"
    if name not in list_pase_graphs():
        raise InputError(f"graph={str(name)[:80]}: no such layer graph is shipped{suggest(name, list_pase_graphs())}")
    content = json.loads(path.read_text(encoding="utf-8"))
    layers = [_read_layer(record) for record in content["layers"]]  # equal layers are one object, so that tables are made once
    return PaseGraph(
        name=name,
        batch=content["batch"],
        smallest_share=content["smallest_share"],
        layers=tuple(layers[index] for index in content["vertices"]),
        edges=tuple((producer, consumer) for producer, consumer in content["edges"]),
        source=content["source"],
    )


def _read_layer(record: Mapping[str, Any]) -> PaseLayer:
    pointwise = record.get("pointwise", 0)
    if "einsum" in record:
        return einsum_layer(record["dims"], record["einsum"], pointwise=pointwise)
    window = record.get("window", (1, 1))
    return PaseLayer(
        kind=LayerKind(record["kind"]),
        dims=record["dims"],
        inputs=tuple(tuple(shape) for shape in record["inputs"]),
        outputs=tuple(tuple(shape) for shape in record["outputs"]),
        axes=record.get("axes", ""),
        window=(window[0], window[1]),
        pointwise=pointwise,
    )
