"""A network imported by `perfmodel import`: operators over named dims, and the tensors between them. Forward only, without torch.

Every operator is an iteration space: `dims` gives the size of each dim. Each operand names the dim at each of its positions ("" for none: a
broadcast, a window). Names belong to the operator (rule R16 of the sharding algebra). Reshapes, transposes and the like are links from the
producer's dims to the consumer's, not operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import prod
from typing import Any

from perfmodel.foundation.errors import InputError

Shape = tuple[int, ...]

#: Of the saved file. In version 1 the edges of the graph were a list of their own.
SCHEMA_VERSION = 2


class ImportedKind(StrEnum):
    INPUT = "input"
    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    EMBEDDING = "embedding"
    NORM = "norm"
    BATCH_NORM = "batch norm"
    SOFTMAX = "softmax"
    CROSS_ENTROPY = "cross-entropy"
    POOLING = "pooling"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    CONCAT = "concat"
    SPLIT = "split"
    """Part of a tensor: slices, chunks, selections."""
    REARRANGE = "rearrange"
    """Entries copied to other positions: repetitions, padding, shifts."""
    CONSTANT = "constant"
    """Tensors without inputs: zeros, ranges of numbers."""
    UNRECOGNISED = "not recognised"
    """Computed in full on every chip (replicated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimLink:
    """A run of `size` entries shared by a producer's dim and a consumer's dim.

    A dim of n entries is n = outer * size * inner; with `inner` 1 on both sides and full sizes, the dim is only renamed. "" stands for no
    dim of the producer (a broadcast), or for one that could not be tracked through a reshape.

    positions  position of the run in the shape of the producer's tensor (or of a parameter), even if the producer has no dim there; empty
               where it could not be tracked
    """

    producer: str
    producer_inner: int
    consumer: str
    consumer_inner: int
    size: int
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedOperand:
    """An operator's view of a tensor: of the output of an earlier operator, of a parameter or a part of one, or of a buffer.

    producer   (vertex, output) of the tensor that an input views; empty for a parameter or a buffer
    parameter  the parameter that an input views
    is_index   integers or booleans: no gradient
    links      of an input: the runs of the viewed tensor, from the outermost position inwards; the positions of a parameter have no names
               (`DimLink.producer` is "")
    """

    shape: Shape
    itemsize: int
    dims: tuple[str, ...]
    producer: tuple[int, ...] = ()
    parameter: str = ""
    is_index: bool = False
    links: tuple[DimLink, ...] = ()

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Reach(StrEnum):
    """Keys that a query attends to."""

    UNKNOWN = "unknown"
    CAUSAL = "causal"
    """Its own and all earlier ones."""
    WINDOW = "window"
    """The last n of the causal ones."""
    CHUNK = "chunk"
    """All earlier ones of the query's chunk of n, and its own."""
    ALL = "all"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """Attended keys; `num_keys` of a window or a chunk."""

    reach: Reach = Reach.UNKNOWN
    num_keys: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedVertex:
    """An operator.

    operator          torch name; of a fused chain of elementwise operators the last, `chain` counts them, `joined` names the others
    module            path of its submodule
    reduced           dims that it sums, normalises or searches over, even if they are in its output
    unsplit           dims that no axis may shard: windows, joined dims, time steps of a recurrence
    flops             work of one forward pass, a multiply-add as 2; only products, as in torch's FlopCounter. [FLOP]
    activation_bytes  of the tensors that it writes; 0 for views and in-place results
    seen              of an attention, or of a softmax: the keys by its mask
    """

    name: str
    operator: str
    module: str
    kind: ImportedKind
    dims: Mapping[str, int]
    inputs: tuple[ImportedOperand, ...]
    outputs: tuple[ImportedOperand, ...]
    flops: float
    activation_bytes: float
    reduced: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    chain: int = 1
    joined: tuple[str, ...] = ()
    seen: SeenKeys = SeenKeys()

    def __post_init__(self) -> None:
        for operand in (*self.inputs, *self.outputs):
            for dim in operand.dims:
                if dim and dim not in self.dims:
                    raise InputError(f"operator {self.name}: a tensor has dim {dim!r}: not a dim of the operator; add it")
            if len(operand.dims) != len(operand.shape):
                raise InputError(f"operator {self.name}: dims={operand.dims}: must be one for each position of shape {operand.shape}")

    @property
    def function(self) -> str:
        """Torch name without namespace, overload and in-place suffix."""
        return self.functions[-1]

    @property
    def functions(self) -> tuple[str, ...]:
        """Likewise for all operators of a chain."""
        names = (name.split(".") for name in (*self.joined, self.operator))
        return tuple((parts[1] if len(parts) > 1 else parts[0]).removesuffix("_") for parts in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedParameter:
    """A trainable tensor. A shared one is listed once, under its first name."""

    name: str
    shape: Shape
    itemsize: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> float:
        return float(self.num_elements * self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotals:
    """Totals of the operators of one kind. A parameter counts where it is read first."""

    kind: ImportedKind
    num_operators: int
    flops: float
    num_parameters: int
    parameter_bytes: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecognised:
    """Operators with the same torch name and without a rule, and their treatment."""

    operator: str
    num_operators: int
    modules: tuple[str, ...]
    treatment: str


REPLICATED = "replicated: computed whole on every chip"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedGraph:
    """Vertices in execution order, inputs of the module first."""

    name: str
    source: str
    vertices: tuple[ImportedVertex, ...]
    parameters: tuple[ImportedParameter, ...]
    buffer_bytes: float

    def __post_init__(self) -> None:
        for index, vertex in enumerate(self.vertices):
            for operand in vertex.inputs:
                if operand.producer and not (len(operand.producer) == 2 and 0 <= operand.producer[0] < index):
                    raise InputError(f"edge {operand.producer[0]} -> {index}: must go from an earlier vertex to a later one")

    @property
    def num_edges(self) -> int:
        """Inputs that are outputs of earlier vertices."""
        return sum(bool(operand.producer) for vertex in self.vertices for operand in vertex.inputs)

    @property
    def flops(self) -> float:
        return sum(vertex.flops for vertex in self.vertices)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> float:
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def activation_bytes(self) -> float:
        return sum(vertex.activation_bytes for vertex in self.vertices)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Parameters that no operator reads."""
        read = {operand.parameter for vertex in self.vertices for operand in vertex.inputs}
        return tuple(parameter.name for parameter in self.parameters if parameter.name not in read)

    def totals(self) -> tuple[KindTotals, ...]:
        """Return totals by kind, in the order of `ImportedKind`; inputs are not counted as operators."""
        known = {parameter.name: parameter for parameter in self.parameters}
        owned: dict[ImportedKind, list[ImportedParameter]] = {kind: [] for kind in ImportedKind}
        for vertex in self.vertices:
            owned[vertex.kind] += [known.pop(operand.parameter) for operand in vertex.inputs if operand.parameter in known]
        rows = []
        for kind in ImportedKind:
            members = [vertex for vertex in self.vertices if vertex.kind is kind]
            if members and kind is not ImportedKind.INPUT:
                rows.append(
                    KindTotals(
                        kind=kind,
                        num_operators=sum(vertex.chain for vertex in members),
                        flops=sum(vertex.flops for vertex in members),
                        num_parameters=sum(parameter.num_elements for parameter in owned[kind]),
                        parameter_bytes=sum(parameter.num_bytes for parameter in owned[kind]),
                        activation_bytes=sum(vertex.activation_bytes for vertex in members),
                    )
                )
        return tuple(rows)

    def unrecognised(self) -> tuple[Unrecognised, ...]:
        """Return the operators without a rule, by torch name."""
        modules: dict[str, list[str]] = {}
        for vertex in self.vertices:
            if vertex.kind is ImportedKind.UNRECOGNISED:
                modules.setdefault(vertex.operator, []).append(vertex.module)
        return tuple(
            Unrecognised(operator=operator, num_operators=len(paths), modules=tuple(dict.fromkeys(paths)), treatment=REPLICATED)
            for operator, paths in modules.items()
        )


def graph_to_dict(graph: ImportedGraph) -> dict[str, Any]:
    """Return the graph in its JSON form; sizes in bytes, work in FLOP."""
    return {"schema_version": SCHEMA_VERSION, **asdict(graph)}
