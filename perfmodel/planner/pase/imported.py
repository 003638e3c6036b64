"""Imported modules as graphs of PaSE's layers, one for each operator of torch.export, over (some of) its dims.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021, sections II and III.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase

from perfmodel.planner.pase.layer import LayerKind, PaseEdge, PaseGraph, Shape, graph_of_layers, layer
from perfmodel.planner.pase.search import PaseRun, run_pase
from perfmodel.workload.graph import Operator
from perfmodel.workload.imported.graph import ImportedGraph, ImportedKind, ImportedVertex

#: Least share of a dim. The paper uses 4 for its convolutional networks and no limit for the others; imported graphs have no limit.
SMALLEST_SHARE = 1


def search_imported(graph: ImportedGraph, num_devices: int) -> PaseRun:
    """Search PaSE's space for an imported module."""
    return run_pase(pase_graph_of(graph), num_devices)


def pase_graph_of(graph: ImportedGraph) -> PaseGraph:
    """Return the layers of an imported module, with its vertices' dims in their order and single letters for their names."""
    letters = []
    for vertex in graph.vertices:
        free = (letter for letter in ascii_lowercase if letter not in vertex.dims)
        letters.append({name: name if len(name) == 1 else next(free) for name in vertex.dims})
    edges = []
    for index, vertex in enumerate(graph.vertices):
        for operand in vertex.inputs:
            if operand.producer:
                (producer, _), consumed = operand.producer, {"": "", **letters[index]}
                produced = {"": "", **letters[producer]}
                runs = tuple(replace(link, producer=produced[link.producer], consumer=consumed[link.consumer]) for link in operand.links)
                edges.append(PaseEdge(producer=producer, consumer=index, runs=runs))
    layers = [_layer(vertex, letter) for vertex, letter in zip(graph.vertices, letters, strict=True)]
    # Samples are the first dim of each input, followed through the runs.
    samples = [
        next(iter(operator.dims), "") if vertex.kind is ImportedKind.INPUT else ""
        for vertex, operator in zip(graph.vertices, layers, strict=True)
    ]
    for edge in edges:
        for run in edge.runs:
            if run.producer and run.producer == samples[edge.producer] and not samples[edge.consumer]:
                samples[edge.consumer] = run.consumer
    return PaseGraph(
        graph=graph_of_layers(graph.name, layers, [()] * len(layers), batch=0, source=graph.source),
        edges=tuple(edges),
        smallest_share=SMALLEST_SHARE,
        samples=tuple(samples),
        names=tuple(tuple(vertex.dims) for vertex in graph.vertices),
    )


def _layer(vertex: ImportedVertex, letter: Mapping[str, str]) -> Operator:
    """Return the layer of a vertex. Unrecognised operators and those that only move entries are not split or cost nothing."""
    dims = {letter[name]: size for name, size in vertex.dims.items()}
    divided = _divided(vertex)
    match vertex.kind:
        case ImportedKind.MATMUL:
            is_added_first = vertex.function in ("addmm", "baddbmm")
            first, second = vertex.inputs[1:3] if is_added_first else vertex.inputs[:2]
            equation = _equation(letter, first.dims, second.dims, vertex.outputs[0].dims)
            return layer(LayerKind.EINSUM, dims, equation=equation, divided=divided)
        case ImportedKind.CONVOLUTION:
            return layer(LayerKind.EINSUM, dims, equation=_equation(letter, *_convolution(vertex)), divided=divided)
        case ImportedKind.EMBEDDING:
            leads = tuple(name for name in vertex.dims if name not in ("v", "d"))
            equation = _equation(letter, (*leads, "v"), ("d", "v"), (*leads, "d"))
            return layer(LayerKind.EINSUM, dims, equation=equation, divided=divided)
        case ImportedKind.ATTENTION:
            return layer(LayerKind.ATTENTION, dims, divided=divided)
        case ImportedKind.RECURRENT:
            return layer(LayerKind.LSTM, dims, divided=divided)
        case ImportedKind.NORM | ImportedKind.BATCH_NORM:
            return layer(LayerKind.NORM, dims, axes=letter[_axis_of(vertex)], divided=divided)
        case ImportedKind.SOFTMAX:
            return layer(LayerKind.SOFTMAX, dims, axes=letter[_axis_of(vertex)], divided=divided)
        case ImportedKind.CROSS_ENTROPY:
            return layer(LayerKind.CROSS_ENTROPY, dims, axes="v", divided=divided)
        case ImportedKind.REDUCTION:
            return layer(LayerKind.MEAN, dims, axes="".join(letter[name] for name in vertex.reduced), divided=divided)
        case ImportedKind.POOLING if len(dims) == 4:
            source, output = vertex.inputs[0].shape, vertex.outputs[0].shape
            window = (math.ceil(source[-2] / output[-2]), math.ceil(source[-1] / output[-1]))
            reads: Shape = tuple(source) if len(source) == len(output) else (1, *source)
            return layer(LayerKind.POOLING, dims, reads=reads, window=window, divided=divided)
        case ImportedKind.POOLING | ImportedKind.ELEMENTWISE:
            return layer(LayerKind.ELEMENTWISE, dims, pointwise=vertex.chain - 1, divided=divided)
        case _:
            return layer(LayerKind.CONCAT, dims, divided=divided)


def _divided(vertex: ImportedVertex) -> Shape:
    """Return the sizes that the parts of each dim must divide, 1 for an unsplit one. Halos have no cost in PaSE: pixels are unsplit."""
    unsplit = {*vertex.unsplit, *(vertex.outputs[0].dims[2:] if vertex.kind is ImportedKind.CONVOLUTION else ())}
    sizes = {name: 1 if name in unsplit else size for name, size in vertex.dims.items()}
    for operand in (*vertex.inputs, *vertex.outputs) if vertex.kind is ImportedKind.ATTENTION else ():
        for name, size in zip(operand.dims, operand.shape, strict=True):
            if name:  # the fewest entries that some tensor has along it (heads)
                sizes[name] = math.gcd(sizes[name], size)
    return tuple(sizes.values())


def _equation(letter: Mapping[str, str], *terms: Iterable[str]) -> str:
    first, second, output = ("".join(letter[name] for name in term if name) for term in terms)
    return f"{first},{second}->{output}"


def _axis_of(vertex: ImportedVertex) -> str:
    """Return the one axis of PaSE's norms and softmax: the largest reduced one, or the batch for a batch norm."""
    if vertex.kind is ImportedKind.BATCH_NORM:
        return vertex.reduced[0]
    return max(vertex.reduced, key=lambda name: vertex.dims[name])


def _convolution(vertex: ImportedVertex) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the terms of a convolution as a matmul of m = b h w, n filters and k = c r s; with a filter per channel, as a batch of them.

    Groups of several channels are priced as if every filter read every channel: PaSE has no groups.
    """
    dims = vertex.dims
    weight, output = vertex.inputs[1].dims, vertex.outputs[0].dims
    inner = [name for name in dims if name not in output]
    columns = [name for name in output if name in weight and name in dims]
    rows = [name for name in output if name not in columns]
    of_each = ["g"] if "g" in dims else []
    return [*rows, *of_each, *inner], [*(of_each or columns), *inner], output
