"""Dims of an imported graph split into the finest runs that its reshapes distinguish, so that edges match position by position.

Features viewed as heads become two dims, heads and head size, of the projection, of its weight and of the attention. A split of one dim is
propagated along every link until nothing changes. A link whose runs contradict the existing splits (6 as 2 x 3 and as 3 x 2) is dropped:
its reader then needs the run unsharded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from perfmodel.foundation.disjoint_sets import DisjointSets
from perfmodel.workload.imported.graph import DimLink, ImportedGraph, ImportedKind, ImportedOperand, ImportedVertex, Shape

#: Key of a dim: of a vertex ("vertex", index, dim), of an output position without a dim ("output", vertex, output, position) or of a
#: parameter ("parameter", name, position).
DimKey = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of a dim: `size` entries with stride `inner`."""

    key: DimKey
    inner: int
    size: int


@dataclass(slots=True)
class _Link:
    """A run that two dims share; `second` is empty where the reader has no dim for it."""

    first: DimKey
    first_inner: int
    second: DimKey
    second_inner: int
    size: int
    is_broken: bool = False


@dataclass(slots=True)
class Pieces:
    """Pieces of every dim, and the links between them. `plain`: even splits whose parts are separate dims nevertheless."""

    graph: ImportedGraph
    plain: frozenset[int] = frozenset()
    parameters: dict[str, Shape] = field(init=False)
    sizes: dict[DimKey, int] = field(default_factory=dict)
    cuts: dict[DimKey, list[int]] = field(default_factory=dict)
    links: dict[tuple[int, int], list[_Link]] = field(default_factory=dict)  # by (vertex, input)
    _at: dict[DimKey, list[_Link]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.parameters = {parameter.name: parameter.shape for parameter in self.graph.parameters}

    def tensor(self, vertex: int, output: int) -> str:
        """Return the tensor name of an output of a vertex; it differs from all parameter names."""
        producer = self.graph.vertices[vertex]
        name = producer.name if len(producer.outputs) == 1 else f"{producer.name}.{output}"
        return f"{name}.out" if name in self.parameters else name

    def tensor_read(self, operand: ImportedOperand) -> str:
        """Return the name of the tensor that an input views; "" for a buffer."""
        return self.tensor(*operand.producer) if operand.producer else operand.parameter

    def of(self, key: DimKey, inner: int = 1, size: int = 0) -> tuple[Piece, ...]:
        """Return the pieces of a run of a dim, outermost first; without a size, of the full dim."""
        end = inner * size if size else self.sizes[key]
        marks = [cut for cut in self.cuts[key] if inner <= cut <= end]
        return tuple(Piece(key=key, inner=low, size=high // low) for low, high in pairwise(marks))[::-1]

    def of_output(self, vertex: int, output: int) -> list[tuple[Piece | None, ...]]:
        """Return the pieces at each position of a tensor; a position of size 1 has the piece None."""
        return [
            self.of(*self.run_of_output(vertex, output, position)) if size > 1 else (None,)
            for position, size in enumerate(self.graph.vertices[vertex].outputs[output].shape)
        ]

    def of_parameter(self, name: str) -> list[tuple[Piece | None, ...]]:
        keys: list[DimKey] = [("parameter", name, position) for position in range(len(self.parameters[name]))]
        return [self.of(key) if self.sizes[key] > 1 else (None,) for key in keys]

    def of_input(self, operand: ImportedOperand) -> list[tuple[Piece | None, ...]]:
        """Return the pieces at each position of the tensor that an input views; a buffer has none."""
        if operand.producer:
            return self.of_output(*operand.producer)
        return self.of_parameter(operand.parameter) if operand.parameter else []

    def run_of_output(self, vertex: int, output: int, position: int) -> tuple[DimKey, int, int]:
        """Return (key, inner, size) of an output position: a dim of the vertex, its inner run, or a separate dim."""
        producer = self.graph.vertices[vertex]
        operand = producer.outputs[output]
        dim, size = operand.dims[position], operand.shape[position]
        if dim and producer.dims[dim] == size:
            return ("vertex", vertex, dim), 1, size
        axis, _ = self.even_part(vertex)
        if axis and not dim:
            return ("vertex", vertex, axis), 1, size
        return ("output", vertex, output, position), 1, size

    def even_part(self, vertex: int) -> tuple[str, int]:
        """Return (dim, entries of a part) of a split into equal parts, else ("", 0). The entries of a part stay a dim."""
        split = self.graph.vertices[vertex]
        if vertex in self.plain or split.kind is not ImportedKind.SPLIT or len(split.outputs) < 2 or len(split.unsplit) != 1:
            return "", 0
        (axis,) = split.unsplit
        names, shape = split.inputs[0].dims, split.outputs[0].shape
        if axis not in names or len(shape) != len(names) or any(output.shape != shape for output in split.outputs):
            return "", 0
        part = shape[names.index(axis)]
        return (axis, part) if part * len(split.outputs) == split.dims[axis] else ("", 0)

    def read_as(self, vertex: int, number: int, piece: Piece) -> Piece | None:
        """Return the piece of the reader's dim that equals a piece of the tensor; None where the reader needs it unsharded."""
        for link in self.links.get((vertex, number), ()):
            is_within = link.first == piece.key and link.first_inner <= piece.inner
            if is_within and piece.inner * piece.size <= link.first_inner * link.size and link.second and not link.is_broken:
                inner = link.second_inner * (piece.inner // link.first_inner)
                read = Piece(key=link.second, inner=inner, size=piece.size)
                return read if read in self.of(link.second) else None
        return None

    def classes(self) -> dict[Piece, Piece]:
        """Return a representative piece for each class of linked pieces."""
        joined = DisjointSets(piece for key in self.cuts for piece in self.of(key))
        for links in self.links.values():
            for link in links:
                if link.second and not link.is_broken:
                    for piece in self.of(link.first, link.first_inner, link.size):
                        inner = link.second_inner * (piece.inner // link.first_inner)
                        other = Piece(key=link.second, inner=inner, size=piece.size)
                        if other in joined:
                            joined.join(other, piece)
        return joined.representatives()

    # --- construction -------------------------------------------------------------------------------------------

    def add_dim(self, key: DimKey, size: int) -> None:
        self.sizes[key] = size
        self.cuts[key] = [1, size] if size > 1 else [1]

    def add_link(self, vertex: int, number: int, link: _Link) -> None:
        self.links.setdefault((vertex, number), []).append(link)
        self._at[link.first].append(link)
        if link.second:
            self._at[link.second].append(link)
        for key, inner in ((link.first, link.first_inner), (link.second, link.second_inner)):
            if key and not (self.cut(key, inner) and self.cut(key, inner * link.size)):
                link.is_broken = True
        if not link.is_broken and link.second:
            for key in (link.first, link.second):
                for cut in tuple(self.cuts[key]):
                    self._carry(link, key, cut)

    def cut(self, key: DimKey, cut: int) -> bool:
        """Split a dim so that `cut` entries form the inner part; return False if existing splits contradict it."""
        known = self.cuts[key]
        if cut in known:
            return True
        if any(other % cut and cut % other for other in known):
            return False
        self.cuts[key] = sorted((*known, cut))
        for link in self._at[key]:
            self._carry(link, key, cut)
        return True

    def _carry(self, link: _Link, key: DimKey, cut: int) -> None:
        """Propagate a split from one side of a link to the other."""
        if link.is_broken or not link.second:
            return
        ends = (link.first, link.first_inner), (link.second, link.second_inner)
        (_, inner), (other, other_inner) = ends if key == link.first else ends[::-1]
        if inner < cut < inner * link.size and not self.cut(other, other_inner * (cut // inner)):
            link.is_broken = True


def refine(graph: ImportedGraph) -> Pieces:
    """Return the pieces of a graph. Links are taken in vertex order: of two contradicting, the first stays.

    Halves that are joined again (rotary positions) are no dims: the concatenation needs them unsharded.
    """
    pieces = _refine(graph, frozenset())
    evenly = [index for index in range(len(graph.vertices)) if pieces.even_part(index)[0]]
    if not evenly:
        return pieces
    class_of = pieces.classes()
    joined = {
        class_of[piece]
        for (vertex, _), links in pieces.links.items()
        if graph.vertices[vertex].kind is ImportedKind.CONCAT
        for link in links
        if not link.second
        for piece in pieces.of(link.first, link.first_inner, link.size)
    }
    plain = set()
    for index in evenly:
        axis, part = pieces.even_part(index)
        if joined & {class_of[piece] for piece in pieces.of(("vertex", index, axis), 1, part)}:
            plain.add(index)
    return _refine(graph, frozenset(plain)) if plain else pieces


def _refine(graph: ImportedGraph, plain: frozenset[int]) -> Pieces:
    pieces = Pieces(graph=graph, plain=plain)
    for name, shape in pieces.parameters.items():
        for position, size in enumerate(shape):
            pieces.add_dim(("parameter", name, position), size)
    for index, vertex in enumerate(graph.vertices):
        for dim, size in vertex.dims.items():
            pieces.add_dim(("vertex", index, dim), size)
        for number, operand in enumerate(vertex.outputs):
            for position, size in enumerate(operand.shape):
                key, _, _ = pieces.run_of_output(index, number, position)
                if key[0] == "output":
                    pieces.add_dim(key, size)
    for index, vertex in enumerate(graph.vertices):
        axis, part = pieces.even_part(index)
        if axis:
            pieces.cut(("vertex", index, axis), part)
        numbers = sorted(range(len(vertex.inputs)), key=lambda number: bool(vertex.inputs[number].producer))  # parameters first
        for number in numbers:
            for link in vertex.inputs[number].links:
                _add(pieces, index, number, link)
    return pieces


def _add(pieces: Pieces, index: int, number: int, link: DimLink) -> None:
    """Add one link of an input, with the reader's dim if the operand has all of its entries."""
    vertex = pieces.graph.vertices[index]
    operand = vertex.inputs[number]
    first: DimKey = ()
    size = 0
    for position in link.positions:
        if operand.producer:
            producer, output = operand.producer
            first, _, size = pieces.run_of_output(producer, output, position)
        else:
            first, size = ("parameter", operand.parameter, position), pieces.parameters[operand.parameter][position]
    second: DimKey = ()
    inner = link.consumer_inner
    if link.consumer:
        entries = operand.shape[operand.dims.index(link.consumer)]
        of_dim = vertex.dims[link.consumer]
        if entries == of_dim:
            second = ("vertex", index, link.consumer)
        elif vertex.kind is ImportedKind.ATTENTION and of_dim % entries == 0:
            second, inner = ("vertex", index, link.consumer), inner * (of_dim // entries)  # a key-value head for each run of query heads
        elif vertex.kind is ImportedKind.EMBEDDING and entries % of_dim == 0 and inner % (entries // of_dim) == 0:
            second, inner = ("vertex", index, link.consumer), inner // (entries // of_dim)  # bags of several entries each
    elif not number and (axis := repeated_axis(vertex)):
        second, inner = ("vertex", index, axis), inner * (vertex.dims[axis] // operand.shape[vertex.outputs[0].dims.index(axis)])
    if not first:
        if second:  # a broadcast splits the dim at the run that it is constant along
            pieces.cut(second, inner)
            pieces.cut(second, inner * link.size)
        return
    if link.producer_inner * link.size > size:
        return
    pieces.add_link(index, number, _Link(first=first, first_inner=link.producer_inner, second=second, second_inner=inner, size=link.size))


def repeated_axis(vertex: ImportedVertex) -> str:
    """Return the dim along which each entry is repeated (key-value heads for their query heads); "" if there is none."""
    if vertex.kind is not ImportedKind.REARRANGE or ".repeat_interleave.self_int" not in vertex.operator or len(vertex.unsplit) != 1:
        return ""
    read, written = vertex.inputs[0], vertex.outputs[0]
    (axis,) = vertex.unsplit
    moved = [position for position, dim in enumerate(read.dims) if not dim and read.shape[position] > 1]
    is_one = len(read.shape) == len(written.shape) and moved == [written.dims.index(axis)]
    return axis if is_one and vertex.dims[axis] % read.shape[moved[0]] == 0 else ""


def is_stepped(vertex: ImportedVertex, number: int, dim: str) -> bool:
    """Return whether a convolution reads an integer number of input entries per entry of the dim: then both may be sharded alike."""
    if vertex.kind is not ImportedKind.CONVOLUTION or number or dim not in vertex.inputs[0].dims or dim not in vertex.outputs[0].dims:
        return False
    read, written = (operand.shape[operand.dims.index(dim)] for operand in (vertex.inputs[0], vertex.outputs[0]))
    return written == vertex.dims[dim] and read % written == 0
