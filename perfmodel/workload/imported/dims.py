"""Dims of an imported graph cut into the finest runs that any reshape in it tells apart, so that edges match position by position.

Features viewed as heads become two dims, heads and head size, of the projection that makes them, of its weight and of the attention that
reads them. A cut of one dim is carried along every link to the others, until nothing changes. A link whose runs do not fit the cuts that
are there already (6 as 2 x 3 and as 3 x 2) is given up: its reader then needs the run whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from perfmodel.foundation.disjoint_sets import DisjointSets
from perfmodel.workload.imported.graph import DimLink, ImportedGraph, ImportedKind, ImportedVertex

#: What is cut: a dim of a vertex ("vertex", index, dim), a position of an output that has no dim there ("output", vertex, output, position)
#: or of a parameter ("parameter", name, position).
Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`size` entries of a place, each `inner` of its entries apart."""

    place: Place
    inner: int
    size: int


@dataclass(slots=True)
class _Link:
    """A run that two places share; `second` is empty where the reader has no dim for it."""

    first: Place
    first_inner: int
    second: Place
    second_inner: int
    size: int
    is_broken: bool = False


@dataclass(slots=True)
class Pieces:
    """Every place in its pieces, and who reads what. `plain`: splits whose parts are places of their own, although they are even."""

    graph: ImportedGraph
    plain: frozenset[int] = frozenset()
    sizes: dict[Place, int] = field(default_factory=dict)
    cuts: dict[Place, list[int]] = field(default_factory=dict)
    links: dict[tuple[int, int], list[_Link]] = field(default_factory=dict)  # of each input (vertex, input)
    _at: dict[Place, list[_Link]] = field(default_factory=lambda: defaultdict(list))

    def of(self, place: Place, inner: int = 1, size: int = 0) -> tuple[Piece, ...]:
        """The pieces of a run of a place, outermost first; of the whole place where no size is given."""
        end = inner * size if size else self.sizes[place]
        marks = [cut for cut in self.cuts[place] if inner <= cut <= end]
        return tuple(Piece(place=place, inner=low, size=high // low) for low, high in pairwise(marks))[::-1]

    def of_output(self, vertex: int, output: int) -> list[tuple[Piece | None, ...]]:
        """The pieces at each position of a tensor; a position of size 1 is one of None."""
        return [
            self.of(*self.run_of_output(vertex, output, position)) if size > 1 else (None,)
            for position, size in enumerate(self.graph.vertices[vertex].outputs[output].shape)
        ]

    def of_parameter(self, name: str, rank: int) -> list[tuple[Piece | None, ...]]:
        places: list[Place] = [("parameter", name, position) for position in range(rank)]
        return [self.of(place) if self.sizes[place] > 1 else (None,) for place in places]

    def run_of_output(self, vertex: int, output: int, position: int) -> tuple[Place, int, int]:
        """Where a position of an output lies: a dim of the vertex, the inner run of one, or a place of its own. (place, inner, size)"""
        made = self.graph.vertices[vertex]
        operand = made.outputs[output]
        dim, size = operand.dims[position], operand.shape[position]
        if dim and made.dims[dim] == size:
            return ("vertex", vertex, dim), 1, size
        axis, _ = self.even_part(vertex)
        if axis and not dim:
            return ("vertex", vertex, axis), 1, size
        return ("output", vertex, output, position), 1, size

    def even_part(self, vertex: int) -> tuple[str, int]:
        """(dim, entries of one part) of a split into equal parts, ("", 0) of anything else. What is in a part stays a dim."""
        made = self.graph.vertices[vertex]
        axis = "" if vertex in self.plain else _evenly_split(made)
        return (axis, made.dims[axis] // len(made.outputs)) if axis else ("", 0)

    def read_as(self, vertex: int, number: int, piece: Piece) -> Piece | None:
        """The piece of the reader's dim that a piece of the tensor is; None where the reader needs it whole."""
        for link in self.links.get((vertex, number), ()):
            is_within = link.first == piece.place and link.first_inner <= piece.inner
            if is_within and piece.inner * piece.size <= link.first_inner * link.size and link.second and not link.is_broken:
                inner = link.second_inner * (piece.inner // link.first_inner)
                found = Piece(place=link.second, inner=inner, size=piece.size)
                return found if found in self.of(link.second) else None
        return None

    def classes(self) -> dict[Piece, Piece]:
        """One piece for all those that links make the same."""
        joined = DisjointSets(piece for place in self.cuts for piece in self.of(place))
        for links in self.links.values():
            for link in links:
                if link.second and not link.is_broken:
                    for piece in self.of(link.first, link.first_inner, link.size):
                        inner = link.second_inner * (piece.inner // link.first_inner)
                        other = Piece(place=link.second, inner=inner, size=piece.size)
                        if other in joined:
                            joined.join(other, piece)
        return joined.representatives()

    # How they are found

    def add_place(self, place: Place, size: int) -> None:
        self.sizes[place] = size
        self.cuts[place] = [1, size] if size > 1 else [1]

    def add_link(self, vertex: int, number: int, link: _Link) -> None:
        self.links.setdefault((vertex, number), []).append(link)
        self._at[link.first].append(link)
        if link.second:
            self._at[link.second].append(link)
        for place, inner in ((link.first, link.first_inner), (link.second, link.second_inner)):
            if place and not (self.cut(place, inner) and self.cut(place, inner * link.size)):
                link.is_broken = True
        if not link.is_broken and link.second:
            for place in (link.first, link.second):
                for cut in tuple(self.cuts[place]):
                    self._carry(link, place, cut)

    def cut(self, place: Place, cut: int) -> bool:
        """Cut a place so that `cut` entries are the inner part; False where that does not fit the cuts that are there."""
        known = self.cuts[place]
        if cut in known:
            return True
        if any(other % cut and cut % other for other in known):
            return False
        self.cuts[place] = sorted((*known, cut))
        for link in self._at[place]:
            self._carry(link, place, cut)
        return True

    def _carry(self, link: _Link, place: Place, cut: int) -> None:
        """Carry a cut of one side of a link to the other."""
        if link.is_broken or not link.second:
            return
        ends = (link.first, link.first_inner), (link.second, link.second_inner)
        (_, inner), (other, other_inner) = ends if place == link.first else ends[::-1]
        if inner < cut < inner * link.size and not self.cut(other, other_inner * (cut // inner)):
            link.is_broken = True


def _evenly_split(vertex: ImportedVertex) -> str:
    """The dim that a split cuts into equal parts, all of them."""
    if vertex.kind is not ImportedKind.SPLIT or len(vertex.outputs) < 2 or len(vertex.unsplit) != 1:
        return ""
    (axis,) = vertex.unsplit
    shapes = {operand.shape for operand in vertex.outputs}
    names = vertex.inputs[0].dims
    if len(shapes) > 1 or axis not in names or len(vertex.outputs[0].shape) != len(names):
        return ""
    return axis if vertex.outputs[0].shape[names.index(axis)] * len(vertex.outputs) == vertex.dims[axis] else ""


def refine(graph: ImportedGraph, parameters: Mapping[str, Sequence[int]]) -> Pieces:
    """`parameters`: shapes by name. Links are taken in the order of the vertices: where two do not fit, the first stays.

    Halves that are joined again (rotary positions) are no dims: what joins them needs them whole.
    """
    pieces = _refine(graph, parameters, frozenset())
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
    return _refine(graph, parameters, frozenset(plain)) if plain else pieces


def _refine(graph: ImportedGraph, parameters: Mapping[str, Sequence[int]], plain: frozenset[int]) -> Pieces:
    pieces = Pieces(graph=graph, plain=plain)
    for name, shape in parameters.items():
        for position, size in enumerate(shape):
            pieces.add_place(("parameter", name, position), size)
    for index, vertex in enumerate(graph.vertices):
        for dim, size in vertex.dims.items():
            pieces.add_place(("vertex", index, dim), size)
        for number, operand in enumerate(vertex.outputs):
            for position, size in enumerate(operand.shape):
                place, _, _ = pieces.run_of_output(index, number, position)
                if place[0] == "output":
                    pieces.add_place(place, size)
    into = defaultdict(list)
    for edge in graph.edges:
        into[edge.consumer].append(edge)
    for index, vertex in enumerate(graph.vertices):
        axis, part = pieces.even_part(index)
        if axis:
            pieces.cut(("vertex", index, axis), part)
        for number, operand in enumerate(vertex.inputs):
            if operand.parameter in parameters:
                shape = parameters[operand.parameter]
                for link in operand.links:
                    first: Place = ("parameter", operand.parameter, link.positions[0]) if link.positions else ()
                    _add(pieces, index, number, link, first, shape[link.positions[0]] if link.positions else 0)
        for edge in into[index]:
            made = graph.vertices[edge.producer].outputs[edge.output]
            for link in edge.links:
                first = pieces.run_of_output(edge.producer, edge.output, link.positions[0])[0] if link.positions else ()
                _add(pieces, index, edge.input, link, first, made.shape[link.positions[0]] if link.positions else 0)
    return pieces


def _add(pieces: Pieces, index: int, number: int, link: DimLink, first: Place, size: int) -> None:
    """One link of an input, with the reader's dim if the operand has all of its entries."""
    vertex = pieces.graph.vertices[index]
    operand = vertex.inputs[number]
    second: Place = ()
    inner = link.consumer_inner
    if link.consumer:
        entries = operand.shape[operand.dims.index(link.consumer)]
        of_dim = vertex.dims[link.consumer]
        if entries == of_dim:
            second = ("vertex", index, link.consumer)
        elif vertex.kind is ImportedKind.ATTENTION and of_dim % entries == 0:
            second, inner = ("vertex", index, link.consumer), inner * (of_dim // entries)  # a head for each run of query heads
        elif vertex.kind is ImportedKind.EMBEDDING and entries % of_dim == 0 and inner % (entries // of_dim) == 0:
            second, inner = ("vertex", index, link.consumer), inner // (entries // of_dim)  # bags of several entries each
    elif not number and (axis := repeated_axis(vertex)):
        second, inner = ("vertex", index, axis), inner * (vertex.dims[axis] // operand.shape[vertex.outputs[0].dims.index(axis)])
    if not first:
        if second:  # a broadcast: what it runs along is told apart from the rest of the dim
            pieces.cut(second, inner)
            pieces.cut(second, inner * link.size)
        return
    if link.producer_inner * link.size > size:
        return
    pieces.add_link(index, number, _Link(first=first, first_inner=link.producer_inner, second=second, second_inner=inner, size=link.size))


def repeated_axis(vertex: ImportedVertex) -> str:
    """The dim along which each entry is repeated so many times in a row (heads for their groups of queries); "" of anything else."""
    if vertex.kind is not ImportedKind.REARRANGE or ".repeat_interleave.self_int" not in vertex.operator or len(vertex.unsplit) != 1:
        return ""
    read, written = vertex.inputs[0], vertex.outputs[0]
    (axis,) = vertex.unsplit
    moved = [position for position, dim in enumerate(read.dims) if not dim and read.shape[position] > 1]
    is_one = len(read.shape) == len(written.shape) and moved == [written.dims.index(axis)]
    return axis if is_one and vertex.dims[axis] % read.shape[moved[0]] == 0 else ""


def is_stepped(vertex: ImportedVertex, number: int, dim: str) -> bool:
    """Whether a convolution reads a whole number of entries of its first input for each one of the dim: then both may be cut alike."""
    if vertex.kind is not ImportedKind.CONVOLUTION or number or dim not in vertex.inputs[0].dims or dim not in vertex.outputs[0].dims:
        return False
    read, written = (operand.shape[operand.dims.index(dim)] for operand in (vertex.inputs[0], vertex.outputs[0]))
    return written == vertex.dims[dim] and read % written == 0
