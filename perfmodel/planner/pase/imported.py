"""PaSE's search on an imported graph: its cost function and its space of configurations, on operators and links from torch.export.

Each operator becomes one or several layers of PaSE's kinds, over (some of) its own dims. A tensor between two operators is compared by runs
of its dims, so that a reshape costs nothing where the parts agree. Unrecognised operators are not split.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021, sections II and III.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import bad_field
from perfmodel.planner.pase.cost import Splits, flops_per_word, layer_cost, missing_words
from perfmodel.planner.pase.layer import LayerKind, Shape, einsum_layer, layer
from perfmodel.planner.pase.search import pase_configurations
from perfmodel.search import eliminate
from perfmodel.workload.graph import Operator
from perfmodel.workload.imported.graph import DimLink, ImportedEdge, ImportedGraph, ImportedKind, ImportedVertex

Array = NDArray[np.float64]

#: Least share of a dim. The paper uses 4 for its convolutional networks and no limit for the others; imported graphs have no limit.
SMALLEST_SHARE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedStrategy:
    """Parts of each dim of each vertex, their cost, and the cost of data parallelism. [FLOP, times in s]

    data_parallel_devices   devices that data parallelism can use: there may be fewer samples than devices
    """

    num_devices: int
    parts: tuple[Mapping[str, int], ...]
    cost: float
    data_parallel_cost: float
    data_parallel_devices: int
    is_proved: bool
    gap: float
    table_time: float
    search_time: float

    @property
    def times_data_parallel(self) -> float:
        return self.data_parallel_cost / self.cost if self.cost else math.nan


def search_imported(graph: ImportedGraph, num_devices: int, *, word_flops: float = flops_per_word()) -> ImportedStrategy:
    """Return the strategy of least cost in PaSE's space."""
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise bad_field("num_devices", num_devices, "must be a whole number of at least 1", "use 4, 8, 16, 32 or 64")
    start = time.process_time()
    configurations, costs = _vertex_tables(graph, num_devices, word_flops)
    known: dict[object, Array] = {}
    edges = []
    for edge in graph.edges:
        producer, consumer = graph.vertices[edge.producer], graph.vertices[edge.consumer]
        key = (id(configurations[edge.producer]), id(configurations[edge.consumer]), tuple(producer.dims), tuple(consumer.dims), edge.links)
        if key not in known:
            known[key] = _edge_cost(edge, producer, configurations[edge.producer], consumer, configurations[edge.consumer], word_flops)
        edges.append((edge.producer, edge.consumer, known[key]))
    middle = time.process_time()
    solution = eliminate(costs, edges)
    end = time.process_time()
    by_batch = _data_parallel(graph, configurations)
    return ImportedStrategy(
        num_devices=num_devices,
        parts=tuple(
            dict(zip(vertex.dims, map(int, rows[index]), strict=True))
            for vertex, rows, index in zip(graph.vertices, configurations, solution.choice, strict=True)
        ),
        cost=solution.cost,
        data_parallel_cost=sum(float(cost[index]) for cost, index in zip(costs, by_batch, strict=True))
        + sum(float(matrix[by_batch[u], by_batch[v]]) for u, v, matrix in edges),
        data_parallel_devices=max(int(rows[index].prod()) for rows, index in zip(configurations, by_batch, strict=True)),
        is_proved=solution.is_proved,
        gap=solution.gap,
        table_time=middle - start,
        search_time=end - middle,
    )


def _vertex_tables(graph: ImportedGraph, num_devices: int, word_flops: float) -> tuple[list[Splits], list[Array]]:
    """Return C(v) and t_l of each vertex; equal vertices share their arrays."""
    known: dict[object, tuple[Splits, Array]] = {}
    configurations, costs = [], []
    for vertex in graph.vertices:
        operands = tuple((operand.shape, operand.dims) for operand in (*vertex.inputs, *vertex.outputs))
        key = vertex.kind, _factors(vertex), tuple(vertex.dims.items()), operands, vertex.reduced, vertex.unsplit, vertex.chain
        if key not in known:
            # a convolution is not split over its pixels, as halos have no cost in PaSE
            unsplit = {*vertex.unsplit, *(vertex.outputs[0].dims[2:] if vertex.kind is ImportedKind.CONVOLUTION else ())}
            sizes = {name: 1 if name in unsplit else size for name, size in vertex.dims.items()}
            for operand in (*vertex.inputs, *vertex.outputs) if vertex.kind is ImportedKind.ATTENTION else ():
                for name, size in zip(operand.dims, operand.shape, strict=True):
                    if name:  # parts divide the fewest entries that some tensor has along a dim (heads)
                        sizes[name] = math.gcd(sizes[name], size)
            splits = pase_configurations(layer(LayerKind.ELEMENTWISE, sizes), num_devices=num_devices, smallest_share=SMALLEST_SHARE)
            total: Array = np.zeros(len(splits))
            names = list(vertex.dims)
            for operator, of_dims in _layers(vertex):
                total = total + layer_cost(operator, splits[:, [names.index(name) for name in of_dims]], word_flops=word_flops)
            known[key] = splits, total
        splits, cost = known[key]
        configurations.append(splits)
        costs.append(cost)
    return configurations, costs


# ---------------------------------------------------------------------------------------------------------------------------------
# Cost of a vertex
# ---------------------------------------------------------------------------------------------------------------------------------


def _layers(vertex: ImportedVertex) -> list[tuple[Operator, tuple[str, ...]]]:
    """Return the PaSE layers of an operator, each with the operator's dims in the layer's order."""
    dims = dict(vertex.dims)
    match vertex.kind:
        case ImportedKind.MATMUL:
            first, second = (vertex.inputs[index] for index in _factors(vertex))
            terms = [tuple(dim for dim in operand.dims if dim) for operand in (first, second, vertex.outputs[0])]
            return [_einsum(dims, *terms)]
        case ImportedKind.ATTENTION:
            query, key, value = (tuple(dim for dim in operand.dims if dim) for operand in vertex.inputs[:3])
            scores = (*query[:-1], key[-2])
            softmax = _plain(LayerKind.SOFTMAX, {name: dims[name] for name in scores}, axes=key[-2])
            return [_einsum(dims, query, key, scores), softmax, _einsum(dims, scores, value, vertex.outputs[0].dims)]
        case ImportedKind.CONVOLUTION:
            return [_convolution(vertex)]
        case ImportedKind.RECURRENT:
            order = ("l", "b", "s", "d", "e")
            return [_plain(LayerKind.LSTM, {name: dims[name] for name in order})]
        case ImportedKind.EMBEDDING:
            leads = tuple(name for name in dims if name not in ("v", "d"))
            return [_plain(LayerKind.FULLY_CONNECTED, {name: dims[name] for name in (*leads, "d", "v")})]
        case ImportedKind.NORM | ImportedKind.BATCH_NORM:
            return [_plain(LayerKind.NORM, dims, axes=_axis_of(vertex))]
        case ImportedKind.SOFTMAX:
            return [_plain(LayerKind.SOFTMAX, dims, axes=_axis_of(vertex))]
        case ImportedKind.CROSS_ENTROPY:
            return [_plain(LayerKind.CROSS_ENTROPY, {name: dims[name] for name in (*(dim for dim in dims if dim != "v"), "v")})]
        case ImportedKind.REDUCTION:
            return [_plain(LayerKind.MEAN, dims, axes="".join(vertex.reduced))]
        case ImportedKind.POOLING if len(dims) == 4:
            source, output = vertex.inputs[0].shape, vertex.outputs[0].shape
            window = (math.ceil(source[-2] / output[-2]), math.ceil(source[-1] / output[-1]))
            names = dict(zip("bchw", dims.values(), strict=True))
            read_shape: Shape = tuple(source) if len(source) == len(output) else (1, *source)
            return [(layer(LayerKind.POOLING, names, reads=read_shape, window=window), tuple(dims))]
        case ImportedKind.POOLING:
            return [_plain(LayerKind.ELEMENTWISE, dims)]
        case ImportedKind.ELEMENTWISE:
            return [_plain(LayerKind.ELEMENTWISE, dims, pointwise=vertex.chain - 1)]
        case _:
            return []


def _factors(vertex: ImportedVertex) -> tuple[int, int]:
    """Return the indices of the two factors among the inputs; `addmm` and similar operators add the first input."""
    is_added_first = vertex.operator.split(".")[1:2] in (["addmm"], ["baddbmm"])
    return (1, 2) if is_added_first else (0, 1)


def _letters(names: Sequence[str]) -> dict[str, str]:
    """Map dims to single letters, which PaSE's layers need."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    return {name: name if len(name) == 1 else next(letter for letter in letters if letter not in names) for name in names}


def _einsum(dims: Mapping[str, int], *terms: Sequence[str]) -> tuple[Operator, tuple[str, ...]]:
    used = tuple(dict.fromkeys(name for term in (terms[2], terms[0], terms[1]) for name in term))
    letter = _letters(used)
    first, second, output = ("".join(letter[name] for name in term) for term in terms)
    return einsum_layer({letter[name]: dims[name] for name in used}, f"{first},{second}->{output}"), used


def _plain(kind: LayerKind, dims: Mapping[str, int], *, axes: str = "", pointwise: int = 0) -> tuple[Operator, tuple[str, ...]]:
    letter = _letters(tuple(dims))
    renamed = {letter[name]: size for name, size in dims.items()}
    return layer(kind, renamed, axes=axes, pointwise=pointwise), tuple(dims)


def _axis_of(vertex: ImportedVertex) -> str:
    """Return the one axis of PaSE's norms and softmax: the largest reduced one, or the batch for a batch norm."""
    if vertex.kind is ImportedKind.BATCH_NORM:
        return vertex.reduced[0]
    return max(vertex.reduced, key=lambda name: vertex.dims[name])


def _convolution(vertex: ImportedVertex) -> tuple[Operator, tuple[str, ...]]:
    """Return a convolution as a matmul of m = b h w, n filters and k = c r s; with a filter per channel, as a batch of them.

    Groups of several channels are priced as if every filter read every channel: PaSE has no groups.
    """
    dims = vertex.dims
    weight, output = vertex.inputs[1].dims, vertex.outputs[0].dims
    inner = [name for name in dims if name not in output]
    columns = [name for name in output if name in weight and name in dims]
    rows = [name for name in output if name not in columns]
    of_each = ["g"] if "g" in dims else []
    return _einsum(dims, [*rows, *of_each, *inner], [*(of_each or columns), *inner], output)


# ---------------------------------------------------------------------------------------------------------------------------------
# Cost of a tensor between two vertices
# ---------------------------------------------------------------------------------------------------------------------------------


def _edge_cost(
    edge: ImportedEdge, producer: ImportedVertex, produced: Splits, consumer: ImportedVertex, consumed: Splits, word_flops: float
) -> Array:
    """Return t_x as in PaSE, over the runs of dims that the two sides share."""
    links = edge.links
    if not links:
        return np.zeros((len(produced), len(consumed)))
    a = _parts_of_runs(links, produced, list(producer.dims), is_producer=True)
    b = _parts_of_runs(links, consumed, list(consumer.dims), is_producer=False)
    (a, of_a), (b, of_b) = (np.unique(splits, axis=0, return_inverse=True) for splits in (a, b))
    words = 2 * word_flops * missing_words(tuple(link.size for link in links), a[:, None, :], b[None, :, :])
    return words[of_a.ravel()[:, None], of_b.ravel()]


def _parts_of_runs(links: Sequence[DimLink], splits: Splits, names: Sequence[str], *, is_producer: bool) -> Splits:
    """Return the number of parts of each run. A dim is split from outside: its outermost run first, the remaining parts on the next one."""
    parts = np.ones((len(splits), len(links)), dtype=np.int64)
    for dim in dict.fromkeys(link.producer if is_producer else link.consumer for link in links):
        if not dim:
            continue
        left = splits[:, names.index(dim)].copy()
        columns = [index for index, link in enumerate(links) if (link.producer if is_producer else link.consumer) == dim]
        columns.sort(key=lambda index: -(links[index].producer_inner if is_producer else links[index].consumer_inner))
        if len(columns) == 1:
            parts[:, columns[0]] = left  # also where one side has fewer entries: a window, a stride
            continue
        for column in columns:
            run_parts = np.gcd(left, links[column].size)
            parts[:, column] = run_parts
            left //= run_parts
    return parts


# ---------------------------------------------------------------------------------------------------------------------------------
# Data parallelism
# ---------------------------------------------------------------------------------------------------------------------------------


def _data_parallel(graph: ImportedGraph, configurations: Sequence[Splits]) -> list[int]:
    """Return the configuration of each vertex that splits only the samples, into the largest possible number of parts.

    The sample dim ("" for none) is the first of the first input, followed through the links.
    """
    batch = [""] * len(graph.vertices)
    for index, vertex in enumerate(graph.vertices):
        if vertex.kind is ImportedKind.INPUT:
            batch[index] = next(iter(vertex.dims), "")
    for edge in sorted(graph.edges, key=lambda edge: edge.consumer):
        for link in edge.links:
            is_samples = link.producer and link.producer == batch[edge.producer] and link.consumer
            if is_samples and not batch[edge.consumer]:
                batch[edge.consumer] = link.consumer
    chosen = []
    for vertex, rows, samples in zip(graph.vertices, configurations, batch, strict=True):
        others = [index for index, name in enumerate(vertex.dims) if name != samples]
        only = np.flatnonzero((rows[:, others] == 1).all(axis=1))
        best = np.argmax(rows[only, list(vertex.dims).index(samples)]) if samples else 0
        chosen.append(int(only[best]))
    return chosen
