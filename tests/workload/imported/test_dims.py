"""Dims split into the runs that views distinguish, against index arithmetic on real arrays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.workload.imported.dims import refine
from perfmodel.workload.imported.graph import DimLink, ImportedGraph, ImportedKind, ImportedOperand, ImportedVertex
from perfmodel.workload.imported.network import network_of
from perfmodel.workload.imported.views import identity_view, permuted, reshaped

SHAPES = [(4, 6, 8), (24, 8), (2, 2, 6, 8), (4, 48), (8, 24), (4, 3, 2, 2, 4), (192,), (1, 4, 6, 1, 8), (12, 16), (4, 6, 2, 4)]


def vertex(name, kind, shape, *, producer=None, view=()):
    """A vertex that reads the output of another one under a view; an input of the module without one."""
    dims = tuple("abcdefgh"[: len(shape)])
    operand = ImportedOperand(shape=shape, itemsize=4, dims=dims)
    return ImportedVertex(
        name=name,
        operator=f"aten.{name}.default",
        module="",
        kind=kind,
        dims=dict(zip(dims, shape, strict=True)),
        inputs=() if producer is None else (replace(operand, producer=(producer, 0), links=links_of(view)),),
        outputs=(operand,),
        flops=0.0,
        activation_bytes=0.0,
    )


def links_of(view):
    """As the importer links a view of a tensor to the dims of its reader."""
    links = []
    for dim, position in zip("abcdefgh", view, strict=False):
        inner = 1
        for run in reversed(position):
            links.append(
                DimLink(
                    producer="abcdefgh"[int(run.dim)] if run.dim else "", producer_inner=run.inner, consumer=dim, consumer_inner=inner,
                    size=run.size, positions=(int(run.dim),) if run.dim else (),
                )
            )  # fmt: skip
            inner *= run.size
    return tuple(links)


def graph_of(vertices):
    return ImportedGraph(name="views", source="this test", vertices=tuple(vertices), parameters=(), buffer_bytes=0.0)


def index_along(shape, axis):
    return np.broadcast_to(np.arange(shape[axis]).reshape([-1 if dim == axis else 1 for dim in range(len(shape))]), shape)


def sizes_of(view):
    return tuple(int(np.prod([run.size for run in position])) for position in view)


@st.composite
def chains(draw):
    """Three elementwise vertices, each of a random view of the one before it."""
    shape = draw(st.sampled_from(SHAPES))
    views = []
    for _ in range(2):
        target = draw(st.sampled_from(SHAPES))
        order = draw(st.permutations(range(len(target))))
        views.append((shape, target, order))
        shape = tuple(target[index] for index in order)
    return views


@given(chains())
def test_pieces_of_the_reader_are_the_same_entries(views):
    vertices = [vertex("x", ImportedKind.INPUT, views[0][0])]
    for number, (shape, target, order) in enumerate(views):
        view = permuted(reshaped(identity_view(shape, [str(i) for i in range(len(shape))]), target), order)
        vertices.append(vertex(f"relu{number}", ImportedKind.ELEMENTWISE, sizes_of(view), producer=number, view=view))
    pieces = refine(graph_of(vertices))
    aligned = 0
    for number, (shape, target, order) in enumerate(views):
        seen_by = tuple(target[index] for index in order)
        for axis, position in enumerate(pieces.of_output(number, 0)):
            for piece in position:
                if piece is None:
                    continue
                read = pieces.read_as(number + 1, 0, piece)
                if read is None:
                    continue
                aligned += 1
                written = index_along(shape, axis) // piece.inner % piece.size
                mine = index_along(seen_by, "abcdefgh".index(read.key[-1])) // read.inner % read.size
                assert (written.reshape(target).transpose(order) == mine).all()
    assert aligned or any(not link.positions for reader in vertices[1:] for link in reader.inputs[0].links)


def test_a_cut_is_carried_along_the_whole_chain():
    first = [str(i) for i in range(2)]
    view = identity_view((4, 24), first)
    vertices = [
        vertex("x", ImportedKind.INPUT, (4, 24)),
        vertex("relu", ImportedKind.ELEMENTWISE, (4, 24), producer=0, view=view),
        vertex("tanh", ImportedKind.ELEMENTWISE, (4, 6, 4), producer=1, view=reshaped(view, (4, 6, 4))),
    ]
    network = network_of(graph_of(vertices)).network
    assert network.tensors["x"].shape == (4, 6, 4)
    assert [operator.inputs[0].dims for operator in network.operators] == [("b", "s", "t"), ("b", "s", "c")]
    assert [dict(operator.dims) for operator in network.operators] == [{"b": 4, "s": 6, "t": 4}, {"b": 4, "s": 6, "c": 4}]


@pytest.mark.parametrize("first", [(4, 2, 3), (4, 3, 2)])
def test_views_that_do_not_fit_leave_the_second_reader_whole(first):
    second = (4, 3, 2) if first == (4, 2, 3) else (4, 2, 3)
    view = identity_view((4, 6), ["0", "1"])
    vertices = [
        vertex("x", ImportedKind.INPUT, (4, 6)),
        vertex("relu", ImportedKind.ELEMENTWISE, first, producer=0, view=reshaped(view, first)),
        vertex("tanh", ImportedKind.ELEMENTWISE, second, producer=0, view=reshaped(view, second)),
    ]
    network = network_of(graph_of(vertices)).network
    assert network.tensors["x"].shape == first
    assert network.operators[0].inputs[0].dims == ("b", "s", "c")
    assert network.operators[1].inputs[0].dims == ("b", "", "")
