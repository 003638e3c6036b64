"""Conversion of an imported graph to a training `Graph`, for the per-operator search with the cost model of uniform plans.

Reshapes and transposes disappear: dims are split into the pieces that the graph's views distinguish (`imported/dims.py`). A tensor has the
position order of its producer, and each reader names its own dims there. A bias becomes an operator after its product. Each output of a
split is an operator.

- Gradients start at the outputs: a module that returns no loss has no loss operator.
- The module's inputs get no gradient. Floats computed from them alone count as if they did; those computed from constants do not, and have
  role INDEX like integers and booleans.
- Buffers of the module are on every chip: they are read, but are no tensors of the network. Constants (zeros, ranges) are tensors without
  a producer.
- The first dim of the first input counts samples; the second does where the first is the time of a recurrence or of a fused attention.
  This dim is named `b` in every operator.
- Attention is costed on its full score matrix, whatever its mask.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod

from perfmodel.foundation.collection import without_collection
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor, TensorRole
from perfmodel.workload.imported.dims import DimKey, Piece, Pieces, is_stepped, refine, repeated_axis
from perfmodel.workload.imported.graph import ImportedGraph, ImportedKind, ImportedOperand, Shape
from perfmodel.workload.imported.kinds import KINDS, Read, Seen, added_input, bias
from perfmodel.workload.work import OwnTraffic, Pass

#: Tensors below this share of the largest are not reported.
_WORTH_TELLING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedNetwork:
    """A network with the data of its conversion.

    treatments  sentences about tensors that stay unsharded, with the reason
    graph       the imported graph, with parameters split that are read in parts
    pieces      split dims of the graph, which are the dims of the network
    names       names of the pieces, by vertex
    sources     source of each operator, by name
    gradient    whether each tensor is floating-point and depends on a parameter
    """

    network: Graph
    treatments: tuple[str, ...]
    graph: ImportedGraph
    pieces: Pieces
    names: tuple[Mapping[Piece, str], ...]
    sources: Mapping[str, OperatorSource]
    gradient: Mapping[str, bool]

    def dims_of(self, vertex: int, dim: str) -> tuple[tuple[str, int], ...]:
        """Return names and sizes of the network's dims for a dim of a vertex, outermost first."""
        key: DimKey = ("vertex", vertex, dim)
        size = self.graph.vertices[vertex].dims[dim]
        pieces = self.pieces.of(key) or (Piece(key=key, inner=1, size=size),)
        return tuple((self.names[vertex][piece], piece.size) for piece in pieces)

    def tensor(self, vertex: int, output: int) -> str:
        """Return the tensor name of an output of a vertex."""
        return self.pieces.tensor(vertex, output)


class Computed(StrEnum):
    """Part of a vertex that an operator of the network computes."""

    OUTPUT = "output"
    PRODUCT = "product"
    """The product without its bias."""
    BIAS = "bias"
    FURTHER = "further"
    """An output computed with the first one."""


@dataclass(frozen=True, slots=True)
class OperatorSource:
    """Output `number` of a vertex, or a part of its computation."""

    vertex: int
    number: int
    computed: Computed


@without_collection()
def network_of(graph: ImportedGraph) -> ImportedNetwork:
    """Return the network with the same operators, parameters and work."""
    graph = _parts_of_parameters(graph)
    return _Builder(graph, refine(graph)).build()


# ---------------------------------------------------------------------------------------------------------------------------------
# Parameters of which operators read parts
# ---------------------------------------------------------------------------------------------------------------------------------


def _parts_of_parameters(graph: ImportedGraph) -> ImportedGraph:
    """Return the graph with one parameter for each part of a parameter that operators read in disjoint parts."""
    parameters = {parameter.name: parameter for parameter in graph.parameters}
    readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, vertex in enumerate(graph.vertices):
        for number, operand in enumerate(vertex.inputs):
            if operand.parameter:
                readers[operand.parameter].append((index, number))
    changed: dict[int, dict[int, ImportedOperand]] = defaultdict(dict)
    for name, reads in readers.items():
        operands = [graph.vertices[index].inputs[number] for index, number in reads]
        shape = parameters[name].shape
        parts = [_part_shape(operand, shape) for operand in operands]
        is_divided = len(parts) > 1 and all(part is not None and part != shape for part in parts)
        if not is_divided or sum(prod(part) for part in parts if part is not None) != prod(shape):
            continue
        divided = parameters.pop(name)
        for count, ((index, number), operand, part) in enumerate(zip(reads, operands, parts, strict=True)):
            assert part is not None
            parameters[f"{name}[{count}]"] = replace(divided, name=f"{name}[{count}]", shape=part)
            (missing,) = _missing(operand, shape)
            links = tuple(link if link.positions else replace(link, positions=(missing,)) for link in operand.links)
            changed[index][number] = replace(operand, parameter=f"{name}[{count}]", links=links)
    vertices = tuple(
        replace(vertex, inputs=tuple(changed[index].get(number, operand) for number, operand in enumerate(vertex.inputs)))
        if index in changed
        else vertex
        for index, vertex in enumerate(graph.vertices)
    )
    return replace(graph, vertices=vertices, parameters=tuple(parameters.values()))


def _missing(operand: ImportedOperand, shape: Shape) -> list[int]:
    followed = {position for link in operand.links for position in link.positions}
    return [position for position, size in enumerate(shape) if size > 1 and position not in followed]


def _part_shape(operand: ImportedOperand, shape: Shape) -> Shape | None:
    """Return the shape of a part along one position; None for any other part."""
    missing, unknown = _missing(operand, shape), [link for link in operand.links if not link.positions]
    if not missing and not unknown:
        return shape
    if len(missing) != 1 or len(unknown) > 1:
        return None
    size = unknown[0].size if unknown else 1
    return tuple(size if position == missing[0] else full for position, full in enumerate(shape))


# ---------------------------------------------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Builder:
    graph: ImportedGraph
    pieces: Pieces
    names: list[dict[Piece, str]] = field(default_factory=list)  # by vertex
    never_cut: set[Piece] = field(default_factory=set)
    padded: set[Piece] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[str, bool] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    sources: dict[str, OperatorSource] = field(default_factory=dict)

    def build(self) -> ImportedNetwork:
        batch, samples = self._find_samples()
        self._name_pieces(samples)
        self._mark_pieces()
        for name, shape in self.pieces.parameters.items():
            positions = self.pieces.of_parameter(name)
            rows = len(positions[0]) if shape else 1
            self.tensors[name] = Tensor(name=name, shape=_sizes(positions), role=TensorRole.PARAMETER, num_rows=rows)
            self.gradient[name] = True
        read = {operand.producer for vertex in self.graph.vertices for operand in vertex.inputs}
        depends: list[bool] = []  # of each vertex: on floats among the module's inputs
        for index, vertex in enumerate(self.graph.vertices):
            is_data = vertex.kind is ImportedKind.INPUT and bool(vertex.outputs) and not vertex.outputs[0].is_index
            depends.append(is_data or any(depends[operand.producer[0]] for operand in vertex.inputs if operand.producer))
            numbers = [number for number in range(len(vertex.outputs)) if (index, number) in read]
            if vertex.kind is not ImportedKind.SPLIT and 0 not in numbers:
                numbers = [0, *numbers]
            self._convert(index, numbers or [0], depends[index])
        largest = max((tensor.num_elements for tensor in self.tensors.values()), default=0)
        network = Graph(name=self.graph.name, operators=tuple(self.operators), tensors=self.tensors, batch=batch, source=self.graph.source)
        return ImportedNetwork(
            network=network,
            treatments=tuple(self._treatments(network, _WORTH_TELLING * largest)),
            graph=self.graph,
            pieces=self.pieces,
            names=tuple(self.names),
            sources=self.sources,
            gradient=self.gradient,
        )

    def _name_pieces(self, samples: set[tuple[DimKey, int]]) -> None:
        """Name each piece after its dim; pieces that count samples come first, the outermost one as `b`."""
        for index, vertex in enumerate(self.graph.vertices):
            named_pieces: list[tuple[Piece, str]] = []
            for dim, size in vertex.dims.items():
                key: DimKey = ("vertex", index, dim)
                of_dim = self.pieces.of(key) or (Piece(key=key, inner=1, size=size),)
                named_pieces += [
                    (piece, dim if len(of_dim) == 1 else "" if dim == "b" else f"{dim}{number}") for number, piece in enumerate(of_dim)
                ]
            # Stable: otherwise in the order of the dims.
            named_pieces.sort(key=lambda named_piece: (named_piece[0].key, named_piece[0].inner) not in samples)
            wishes = {wanted for _, wanted in named_pieces}
            names: dict[Piece, str] = {}
            for number, (piece, wanted) in enumerate(named_pieces):
                is_sample = (piece.key, piece.inner) in samples
                is_b = (is_sample and number == 0) or (wanted == "b" and piece.size == 1 and "b" not in names.values())
                name = "b" if is_b else wanted
                if not name or name in names.values() or (name == "b" and not is_b):
                    free = (*"stuvwxyz", *(f"{dim}{count}" for count in range(9) for dim in "stuvwxyz"))
                    name = next(candidate for candidate in free if candidate not in wishes and candidate not in names.values())
                names[piece] = name
            self.names.append(names)

    def _find_samples(self) -> tuple[int, set[tuple[DimKey, int]]]:
        """Return the number of samples, and the pieces that count them."""
        shape = next((vertex.outputs[0].shape for vertex in self.graph.vertices if vertex.kind is ImportedKind.INPUT and vertex.dims), ())
        times = {ImportedKind.RECURRENT: ("s",), ImportedKind.ATTENTION: ("s", "z")}
        never = {("vertex", index, dim) for index, vertex in enumerate(self.graph.vertices) for dim in times.get(vertex.kind, ())}
        tried = []
        for position, size in enumerate(shape[:2]):
            pieces = self._samples(position, size)
            if not any(key in never for key, _ in pieces):
                return size, pieces
            tried.append((size, pieces))
        return tried[0] if tried else (1, set())

    def _samples(self, of: int, batch: int) -> set[tuple[DimKey, int]]:
        """Return the pieces that follow from this position of each input with `batch` entries there."""
        pieces: set[tuple[DimKey, int]] = set()
        for index, vertex in enumerate(self.graph.vertices):
            if vertex.kind is ImportedKind.INPUT and len(vertex.dims) > of and batch > 1:
                dim, size = tuple(vertex.dims.items())[of]
                if size == batch:
                    pieces |= {(piece.key, piece.inner) for piece in self.pieces.of(("vertex", index, dim))}
        for index, vertex in enumerate(self.graph.vertices):
            for number, operand in enumerate(vertex.inputs):
                for piece in (piece for position in self.pieces.of_input(operand) for piece in position):
                    if piece is not None and (piece.key, piece.inner) in pieces:
                        read = self.pieces.read_as(index, number, piece)
                        if read is not None:
                            pieces.add((read.key, read.inner))
        return pieces

    def _mark_pieces(self) -> None:
        """Set the pieces that are never cut, because their readers need them unsharded, and the padded ones, by classes of linked pieces.

        Never cut are the head sizes of fused attention (sharding heads is cheaper), and the parts of a tensor whose parts are all read
        (fused q, k and v, fused gate and up). Padded are vocabularies: of embeddings and losses, and thus of the output layer.
        """
        class_of = self.pieces.classes()
        never_cut: set[Piece] = set()
        padded: set[Piece] = set()
        taken: dict[Piece, int] = defaultdict(int)
        for index, vertex in enumerate(self.graph.vertices):
            if vertex.kind is ImportedKind.ATTENTION:
                never_cut |= {class_of[piece] for dim in "de" for piece in self.pieces.of(("vertex", index, dim))}
            elif vertex.kind in (ImportedKind.EMBEDDING, ImportedKind.CROSS_ENTROPY):
                vocabulary = self.pieces.of(("vertex", index, "v"))
                padded |= {class_of[piece] for piece in vocabulary if len(vocabulary) == 1}
            elif vertex.kind is ImportedKind.SPLIT and vertex.unsplit:
                (axis, *_), (even, part) = vertex.unsplit, self.pieces.even_part(index)
                if even:
                    never_cut |= {class_of[piece] for piece in self.pieces.of(("vertex", index, even), part, len(vertex.outputs))}
                elif len(vertex.outputs[0].shape) < len(vertex.dims):  # one entry of the axis each
                    for piece in self.pieces.of(("vertex", index, axis)):
                        taken[class_of[piece]] += len(vertex.outputs)
        never_cut |= {piece for piece, count in taken.items() if count >= piece.size}
        self.never_cut = {piece for piece, first in class_of.items() if first in never_cut}
        self.padded = {piece for piece, first in class_of.items() if first in padded}

    def _convert(self, index: int, outputs: Sequence[int], depends: bool) -> None:
        """Add the tensors of these outputs of a vertex, and their operators. Further outputs than the first are assumed to be computed from
        it, except those of a split."""
        vertex = self.graph.vertices[index]
        is_trained = any(self.gradient[name] for name in filter(None, map(self.pieces.tensor_read, vertex.inputs)))
        for number in outputs:
            name, output = self.pieces.tensor(index, number), vertex.outputs[number]
            self.gradient[name] = is_trained and not output.is_index
            is_float = not output.is_index and (is_trained or depends or vertex.kind is ImportedKind.INPUT)
            role = TensorRole.ACTIVATION if is_float else TensorRole.INDEX
            self.tensors[name] = Tensor(name=name, shape=_sizes(self.pieces.of_output(index, number)), role=role)
        if vertex.kind in (ImportedKind.INPUT, ImportedKind.CONSTANT):
            return
        for number in outputs:
            if vertex.kind is ImportedKind.SPLIT or number == 0:
                self._describe(index, number)
            else:
                seen = self._seen(index, 0)
                further = replace(seen, name=f"{seen.name}.{number}", inputs=(seen.output,), output=self._written(index, number))
                self._append(further.operator("part"), index, number, Computed.FURTHER)

    def _seen(self, index: int, number: int) -> Seen:
        vertex, names = self.graph.vertices[index], self.names[index]
        pieces: dict[str, tuple[str, ...]] = {}
        for dim, size in vertex.dims.items():
            key: DimKey = ("vertex", index, dim)
            pieces[dim] = tuple(names[piece] for piece in self.pieces.of(key) or (Piece(key=key, inner=1, size=size),))
        axis, part = self.pieces.even_part(index)
        repeated = repeated_axis(vertex)
        unsplit = []
        for piece, name in names.items():
            of = piece.key[-1]
            is_unsplit = piece.inner >= part if of == axis else of in vertex.unsplit and of != repeated
            if is_unsplit or piece in self.never_cut:
                unsplit.append(name)
        # The layer is the module path up to its first number ("encoder.3"), or its first name.
        numbered = re.match(r"^(.*?\.)?\d+(?=\.|$)", vertex.module)
        return Seen(
            vertex=vertex,
            name=vertex.name if len(vertex.outputs) == 1 or vertex.kind is not ImportedKind.SPLIT else f"{vertex.name}.{number}",
            layer=numbered.group(0) if numbered else vertex.module.partition(".")[0],
            dims={name: piece.size for piece, name in names.items()},
            pieces=pieces,
            unsplit=tuple(unsplit),
            padded=tuple(name for piece, name in names.items() if piece in self.padded),
            inputs=tuple(self._read(index, input_number, pieces) for input_number in range(len(vertex.inputs))),
            output=self._written(index, number),
        )

    def _written(self, index: int, number: int) -> Read:
        operand, name = self.graph.vertices[index].outputs[number], self.pieces.tensor(index, number)
        dims: list[str] = []
        for dim, position in zip(operand.dims, self.pieces.of_output(index, number), strict=True):
            for piece in position:
                if piece is None:  # of size 1
                    piece_of_one = Piece(key=("vertex", index, dim), inner=1, size=1)
                    dims.append(self.names[index].get(piece_of_one, ""))
                else:
                    dims.append(self.names[index].get(piece, ""))
        return self._as_read(name, dims, tuple(dim for dim in dims if dim))

    def _as_read(self, tensor: str, dims: Sequence[str], along: tuple[str, ...]) -> Read:
        read_tensor = self.tensors[tensor]
        return Read(
            operand=Operand(tensor=tensor, dims=tuple(dims)),
            dims=along,
            extent=tuple(zip(read_tensor.shape, dims, strict=True)),
            is_parameter=read_tensor.role is TensorRole.PARAMETER,
            has_gradient=self.gradient[tensor],
        )

    def _read(self, index: int, number: int, pieces: Mapping[str, tuple[str, ...]]) -> Read:
        vertex = self.graph.vertices[index]
        operand = vertex.inputs[number]
        along = [
            name for dim, size in zip(operand.dims, operand.shape, strict=True) if dim and vertex.dims[dim] == size for name in pieces[dim]
        ]
        tensor = self.pieces.tensor_read(operand)
        if not tensor:  # a buffer
            of_buffer = tuple(
                (self.pieces.sizes["vertex", index, dim], "") if dim and vertex.dims[dim] == size else (size, "")
                for dim, size in zip(operand.dims, operand.shape, strict=True)
            )
            return Read(operand=Operand(tensor="", dims=()), dims=tuple(along), extent=of_buffer)
        dims = []
        for position_number, position in enumerate(self.pieces.of_input(operand)):
            stepped = self._stepped(index, number, position_number) if len(position) == 1 else ""
            for piece in position:
                read = self.pieces.read_as(index, number, piece) if piece is not None else None
                dims.append(self.names[index][read] if read is not None else stepped)
        return self._as_read(tensor, dims, tuple(dict.fromkeys((*along, *(dim for dim in dims if dim)))))

    def _stepped(self, index: int, number: int, position: int) -> str:
        """Return the reader's dim where it reads an integer number of a position's entries per own entry (a convolution's rows)."""
        vertex = self.graph.vertices[index]
        operand = vertex.inputs[number]
        if vertex.kind is not ImportedKind.CONVOLUTION or not operand.producer:
            return ""
        for link in operand.links:
            entries = operand.shape[operand.dims.index(link.consumer)] if link.consumer in operand.dims else 0
            is_all = link.positions == (position,) and link.consumer_inner == 1 and link.size == entries
            if is_all and is_stepped(vertex, number, link.consumer) and link.size != vertex.dims[link.consumer]:
                of_dim = self.pieces.of(("vertex", index, link.consumer))
                return self.names[index][of_dim[0]] if len(of_dim) == 1 else ""
        return ""

    def _describe(self, index: int, number: int) -> None:
        seen = self._seen(index, number)
        added = added_input(seen.vertex)
        if added < 0:
            self._append(KINDS[seen.vertex.kind](seen), index, number, Computed.OUTPUT)
            return
        final = seen.output
        product = f"{seen.name}.product"
        factors = [factor.has_gradient for input_number, factor in enumerate(seen.inputs) if input_number != added]
        self.tensors[product] = replace(self.tensors[final.operand.tensor], name=product)
        self.gradient[product] = any(factors)
        partial = replace(final, operand=replace(final.operand, tensor=product), has_gradient=any(factors))
        operator = KINDS[seen.vertex.kind](replace(seen, output=partial))
        self._append(operator, index, number, Computed.PRODUCT)
        if seen.inputs[added].is_parameter:
            vector = seen.inputs[added].operand.tensor
            self.tensors[vector] = replace(self.tensors[vector], bias_of=operator.name)
        final_sum = bias(replace(seen, name=f"{seen.name}.bias", inputs=(partial, seen.inputs[added]), output=final))
        self._append(final_sum, index, number, Computed.BIAS)

    def _append(self, operator: Operator, index: int, number: int, computed: Computed) -> None:
        self.operators.append(operator)
        self.sources[operator.name] = OperatorSource(index, number, computed)

    # --- unsharded reads ----------------------------------------------------------------------------------------

    def _treatments(self, network: Graph, least: float) -> list[str]:
        vertex_of = {vertex.name: vertex for vertex in self.graph.vertices}
        producers = {operator.output.tensor: operator for operator in network.operators}
        treated: dict[tuple[str, str], list[Operator]] = defaultdict(list)
        for operator in network.operators:
            vertex = vertex_of.get(operator.name) or vertex_of.get(operator.name.rpartition(".")[0])
            if vertex is None:
                continue
            if vertex.kind is ImportedKind.BATCH_NORM:
                treated[vertex.operator, "takes the statistics of its own share of the batch"].append(operator)
            if vertex.kind is ImportedKind.UNRECOGNISED:
                treated[vertex.operator, "is not recognised: computed whole on every chip"].append(operator)
                continue
            for operand in operator.inputs:
                tensor = network.tensors[operand.tensor]
                of = producers.get(operand.tensor)
                if of is None or tensor.num_elements < least or vertex.kind in _WHOLE_BY_NATURE:
                    continue
                unsharded = [at for at, dim in enumerate(operand.dims) if not dim and tensor.shape[at] > 1 and of.output.dims[at]]
                if unsharded:
                    reason = _REASONS.get(vertex.kind, "its view of the tensor has other runs of entries, or broadcasts")
                    sizes = " x ".join(str(tensor.shape[position]) for position in unsharded)
                    treated[vertex.operator, f"reads {sizes} entries of its input whole: {reason}"].append(operator)
        return [
            f"{operator} ({examples[0].layer or examples[0].name}{f' and {len(examples) - 1} more' if len(examples) > 1 else ''}) {what}"
            for (operator, what), examples in treated.items()
        ]


#: Kinds whose operators define their own unsplit dims.
_WHOLE_BY_NATURE = (ImportedKind.ATTENTION, ImportedKind.RECURRENT, ImportedKind.EMBEDDING, ImportedKind.REDUCTION)

_REASONS = {
    ImportedKind.POOLING: "the window is not known",
    ImportedKind.CONVOLUTION: "its windows or groups do not line up with those entries",
    ImportedKind.CONCAT: "tensors are joined along it",
    ImportedKind.SPLIT: "a part is taken of it",
    ImportedKind.REARRANGE: "entries move along it",
}


def _sizes(positions: Sequence[tuple[Piece | None, ...]]) -> Shape:
    return tuple(piece.size if piece is not None else 1 for position in positions for piece in position)


def synchronised(imported: ImportedNetwork) -> ImportedNetwork:
    """Return the network with all-reduces of the sums of each batch norm, so that its statistics equal those of one process.

    Data-parallel frameworks, and the search, use the statistics of each shard of the batch; gradients then differ from the module's.
    """

    def with_sums(operator: Operator) -> Operator:
        """Add all-reduces of two numbers a channel in forward (sums of x and x^2) and two in backward, as in `kinds/batch_norm.py`."""
        statistics = operator.saved[-1].extent if operator.saved else ((2, ""),)
        channels = {dim for _, dim in statistics if dim}
        over = tuple(dim for dim in operator.output.dims if dim and dim not in channels)
        reduce = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=over, extent=statistics, phase=Pass.FORWARD, itemsize=4.0)
        traffic = (reduce, replace(reduce, phase=Pass.BACKWARD)) if over else ()
        return replace(operator, traffic=traffic, settings={**operator.settings, "synchronised": True})

    operators = tuple(with_sums(operator) if operator.kind == "batch_norm" else operator for operator in imported.network.operators)
    return replace(imported, network=replace(imported.network, operators=operators))


__all__ = ["ImportedNetwork", "network_of", "synchronised"]
