"""The space of a per-operator search: the vertices of a graph, and the shardings that each may have on a mesh.

A vertex is an operator; a chain of elementwise operators that one kernel fuses; or the block boundaries, which have one layout since
layers repeat. A sharding puts every axis of the mesh on one of the vertex's dims or on none (replicated); axes of one dim lie in the
order of `FINE_AXES`. The data axes cut the batch everywhere.

A tensor with several readers is a vertex of its own (`SharedTensor`): the layout in which all of them read it, and the axes on which
their gradients are partial. So it is redistributed once each way, which edges between pairs of operators cannot say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from perfmodel.cost.program import _ELEMENTWISE, DATA_AXES
from perfmodel.errors import bad_field
from perfmodel.parallel.sharding import FINE_AXES, Layout, Sharding, _whole_dims, gradient_layout, input_layout
from perfmodel.planner.operator_mesh import OperatorMesh
from perfmodel.workload.operator import Graph, Operator, OperatorKind, TensorRole

#: Of the gradients of a shared tensor's readers, so many may differ in the axes on which they are partial.
_MOST_PARTIALS = 2

#: What a shared tensor may be: its cuts, and the sets of axes on which its readers' gradients are partial.
SharedLayout = tuple[tuple[tuple[str, ...], ...], frozenset[frozenset[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorVertex:
    """Operators that have one sharding, and what it may be."""

    operators: tuple[Operator, ...]
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor with several readers: (vertex, operator, input) of each, and the layouts that all of them can read."""

    tensor: str
    layouts: tuple[SharedLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpace:
    """Operator vertices first, shared tensors after them; `vertex_of`: operator -> its vertex."""

    graph: Graph
    mesh: OperatorMesh
    vertices: tuple[OperatorVertex, ...]
    shared: tuple[SharedTensor, ...]
    vertex_of: Mapping[str, int]

    @property
    def num_configurations(self) -> tuple[int, ...]:
        return (*(len(v.shardings) for v in self.vertices), *(len(t.layouts) for t in self.shared))

    def shardings(self, choice: Sequence[int]) -> dict[str, Sharding]:
        """The sharding of every operator, by its name."""
        return {op.name: vertex.shardings[index] for vertex, index in zip(self.vertices, choice, strict=False) for op in vertex.operators}

    def choice_of(self, shardings: Mapping[str, Sharding]) -> tuple[int, ...]:
        """Where given shardings lie in the space."""
        found = []
        for vertex in self.vertices:
            wanted = {frozenset(self._on_mesh(shardings[op.name]).items()) for op in vertex.operators}
            known = {frozenset(sharding.items()): i for i, sharding in enumerate(vertex.shardings)}
            if len(wanted) != 1 or not wanted <= set(known):
                names = ", ".join(op.name for op in vertex.operators)
                raise bad_field(f"shardings[{names}]", sorted(map(sorted, wanted)), "is not in the space", "use one sharding that divides")
            found.append(known[wanted.pop()])
        for shared in self.shared:
            views = [
                reader_view(op, self.vertices[self.vertex_of[op.name]].shardings[found[self.vertex_of[op.name]]], i)
                for op, i in self.graph.consumers(shared.tensor)
            ]
            layout = (views[0][0], frozenset(partial for _, partial in views))
            if len({cuts for cuts, _ in views}) != 1 or layout not in shared.layouts:
                raise bad_field(shared.tensor, views, "its readers do not share one layout", "give them one")
            found.append(shared.layouts.index(layout))
        return tuple(found)

    def _on_mesh(self, sharding: Sharding) -> dict[str, tuple[str, ...]]:
        """Without axes of one rank; the data axes stay."""
        keep = DATA_AXES | set(self.mesh.free_axes)
        cut = {dim: tuple(axis for axis in axes if axis in keep) for dim, axes in sharding.items()}
        return {dim: axes for dim, axes in cut.items() if axes}


def reader_view(op: Operator, sharding: Sharding, index: int) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """How a reader needs its input, and the axes on which it leaves that input's gradient partial."""
    operand = op.inputs[index]
    return input_layout(op, sharding, operand).cuts, gradient_layout(op, sharding, operand).partial


def operator_space(graph: Graph, mesh: OperatorMesh, *, micro_batch: int, fuses_elementwise: bool) -> OperatorSpace:
    """All vertices and all that they may be."""
    groups = _groups(graph, fuses_elementwise=fuses_elementwise)
    vertices = tuple(OperatorVertex(operators=group, shardings=tuple(_shardings(group, mesh, micro_batch))) for group in groups)
    vertex_of = {op.name: i for i, vertex in enumerate(vertices) for op in vertex.operators}
    shared = []
    for op in graph.operators:
        readers = graph.consumers(op.output.tensor)
        if len(readers) > 1:
            views = [{reader_view(r, sharding, i) for sharding in vertices[vertex_of[r.name]].shardings} for r, i in readers]
            shared.append(SharedTensor(tensor=op.output.tensor, layouts=tuple(_shared_layouts(views))))
    return OperatorSpace(graph=graph, mesh=mesh, vertices=vertices, shared=tuple(shared), vertex_of=vertex_of)


def _groups(graph: Graph, *, fuses_elementwise: bool) -> list[tuple[Operator, ...]]:
    """Operators by vertex, in the order of the first of each."""
    leader: dict[str, str] = {op.name: op.name for op in graph.operators}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    boundaries = [op.name for op in graph.operators if op.kind is OperatorKind.IDENTITY]
    pairs = [(boundaries[0], name) for name in boundaries[1:]]
    if fuses_elementwise:
        for op in graph.operators:
            readers = graph.consumers(op.output.tensor)
            if op.kernel_class in _ELEMENTWISE and len(readers) == 1:
                reader, i = readers[0]
                in_place = reader.inputs[i].dims == reader.output.dims == op.output.dims
                if reader.kernel_class in _ELEMENTWISE and in_place:
                    pairs.append((op.name, reader.name))
    for a, b in pairs:
        leader[find(b)] = find(a)
    groups: dict[str, list[Operator]] = {}
    for op in graph.operators:
        groups.setdefault(find(op.name), []).append(op)
    return [tuple(group) for group in groups.values()]


def _shardings(group: Sequence[Operator], mesh: OperatorMesh, micro_batch: int) -> Iterable[Sharding]:
    """Every axis on one of the dims that it divides, or on none."""
    whole = set().union(*(_whole_dims(op) for op in group))
    dims = [dim for dim in group[0].dims if dim.name not in whole]
    for places in itertools.product([None, *dims], repeat=len(mesh.free_axes)):
        cuts: dict[str, tuple[str, ...]] = {dim.name: ("dp_replicate", "dp_shard") for dim in dims if dim.per_sample}
        for axis, dim in zip(mesh.free_axes, places, strict=True):
            if dim is not None:
                cuts[dim.name] = (*cuts.get(dim.name, ()), axis)
        if all(_divides(dim.size if not dim.per_sample else micro_batch, cuts.get(dim.name, ()), mesh) or dim.padded or dim.stretched
               for dim in dims):  # fmt: skip
            yield cuts


def _divides(size: int, axes: Iterable[str], mesh: OperatorMesh) -> bool:
    parts = prod(mesh.size((axis,)) for axis in axes if axis not in DATA_AXES)
    return size % parts == 0


def _shared_layouts(views: Sequence[set[tuple[tuple[tuple[str, ...], ...], frozenset[str]]]]) -> Iterable[SharedLayout]:
    """Cuts that every reader can need, with every family of partial axes in which each reader finds its own."""
    cuts = set.intersection(*({cut for cut, _ in own} for own in views))
    for cut in sorted(cuts):
        options = [{partial for c, partial in own if c == cut} for own in views]
        every = sorted(set().union(*options), key=sorted)
        for count in range(1, min(_MOST_PARTIALS, len(views)) + 1):
            for family in itertools.combinations(every, count):
                if all(option & set(family) for option in options):
                    yield cut, frozenset(family)


def layouts_of(cut: SharedLayout) -> list[Layout]:
    """The gradients of a shared tensor's readers, one for each set of partial axes."""
    return [Layout(cuts=cut[0], partial=partial) for partial in sorted(cut[1], key=sorted)]


def parameters_of(graph: Graph, op: Operator) -> list[int]:
    """Which inputs of an operator are parameters."""
    return [i for i, operand in enumerate(op.inputs) if graph.tensors[operand.tensor].role is TensorRole.PARAMETER]


__all__ = [
    "FINE_AXES",
    "OperatorSpace",
    "OperatorVertex",
    "SharedLayout",
    "SharedTensor",
    "layouts_of",
    "operator_space",
    "parameters_of",
    "reader_view",
]
