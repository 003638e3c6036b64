"""Costs of a per-operator search on any network: a vector per vertex, a matrix per edge, in seconds and in bytes.

An edge's cost depends only on the layout of the tensor at its two ends. A layout is the masks of axes that shard each position, and the
axes on which the tensor (or its gradient) is partial. Many configurations give the same layout, so each distinct pair is priced once. The
steps of a redistribution are those of `parallel.algebra.redistribution`, its time is a table over (group, remaining axes). Equal operators
and equal edges share their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.per_operator.operators import (
    MeshPrices,
    OperatorCost,
    StepSetting,
    adding_places,
    compile_operators,
    operator_cost,
    parameter_share,
    saved_inputs,
    saves_output,
)
from perfmodel.cost.per_operator.overlap import exposed_time, mixed_exposure
from perfmodel.cost.per_operator.parameters import parameter_times
from perfmodel.frameworks.rewrites import all_fused
from perfmodel.parallel.algebra.derive import Amount, ParameterLayout, parameter_layout
from perfmodel.parallel.algebra.sharding import collectives, differing
from perfmodel.parallel.grid import LayoutGrid, free_grid
from perfmodel.planner.per_operator.space import Configurations, NetworkSpace
from perfmodel.workload.graph import Operand, Operator, Tensor, TensorRole
from perfmodel.workload.work import Data

Array = NDArray[np.float64]
Masks = NDArray[np.int64] | NDArray[np.int32]

#: Pairs of layouts that are priced at once: temporaries of 32-bit masks then fit in a core's cache.
_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VertexColumns:
    """One operator under each of its configurations: times of one microbatch [s]; parameter collectives without overlap; bytes held."""

    forward: Array
    backward: Array
    collectives: Array
    reductions: Array
    gathers: Array
    published: Array
    optimizer: Array
    state_bytes: Array
    saved_bytes: Array

    def cost(self, share: float, setting: StepSetting) -> Array:
        """Return the time that the operator adds to the step, with the mixed exposure of `cost.network_overlap`. [s]"""
        exposed = mixed_exposure(
            reductions=self.reductions,
            gathers=self.gathers,
            forward=self.forward,
            backward=self.backward,
            share=share,
            setting=setting,
        )
        return np.asarray(self.forward + self.backward + self.collectives + self.published + self.optimizer + exposed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Layout of a tensor at one end of an edge: axes that shard each position, and axes on which it, or its gradient, is partial."""

    cuts: Masks
    partial: Masks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkTables:
    """Costs of vertices (operators, then held tensors) and edges (u, v, seconds); edge_bytes: bytes saved beyond those of the vertices."""

    space: NetworkSpace
    vertices: tuple[VertexColumns, ...]
    edges: tuple[tuple[int, int, Array], ...]
    edge_bytes: tuple[tuple[int, int, Array], ...]

    def costs(self, share: float, setting: StepSetting) -> list[Array]:
        """Return a vector per vertex. For every plan their sum, with the edges, is a lower bound of the time of a microbatch. [s]"""
        known: dict[int, Array] = {}
        for vertex in self.vertices:
            if id(vertex) not in known:
                known[id(vertex)] = vertex.cost(share, setting)
        return [known[id(vertex)] for vertex in self.vertices]

    def step_time(self, choice: Sequence[int], setting: StepSetting) -> float:
        """Return the step time of a choice by these tables alone, with exposed parameter collectives. [s]"""
        columns = [(vertex, index) for vertex, index in zip(self.vertices, choice, strict=True)]

        def total(name: str) -> float:
            return sum(float(getattr(vertex, name)[index]) for vertex, index in columns)

        forward, backward = total("forward"), total("backward")
        reductions, gathers = total("reductions"), total("gathers")
        exposed = exposed_time(reductions=reductions, gathers=gathers, forward=forward, backward=backward, setting=setting)
        moved = sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.edges)
        microbatch = forward + backward + total("collectives") + moved + float(exposed) + total("published") + total("optimizer")
        return setting.num_microbatches * microbatch + setting.profile.timing.step_time_constant

    def held_bytes(self, *, in_flight: float = 1.0) -> list[Array]:
        """Return the bytes of state and, for `in_flight` microbatches, of activation memory kept for backward. [byte]"""
        known: dict[int, Array] = {}
        for vertex in self.vertices:
            if id(vertex) not in known:
                known[id(vertex)] = vertex.state_bytes + in_flight * vertex.saved_bytes
        return [known[id(vertex)] for vertex in self.vertices]


def table_entries(space: NetworkSpace) -> float:
    """Return the approximate number of entries of all distinct edge tables, before any is computed."""
    network = space.network
    producers, held = network.producers(), set(space.held)
    layouts = dict(zip(space.held, space.layouts, strict=True))
    sizes: dict[object, float] = {}
    for tensor, reading in network.readers().items():
        if tensor not in producers:
            continue
        rows, output = space.operators[producers[tensor]], network.operators[producers[tensor]].output
        ends = [(space.operators[index], network.operators[index].inputs[position].dims) for index, position in reading]
        shape = network.tensors[tensor].shape
        if tensor in held:
            held_layouts = layouts[tensor]
            sizes[id(rows), output.dims, id(held_layouts), shape] = float(len(rows) * len(held_layouts))
            sizes |= {(id(held_layouts), id(to), dims, shape): float(len(held_layouts) * len(to)) for to, dims in ends}
        else:
            sizes |= {(id(rows), output.dims, id(to), dims, shape): float(len(rows) * len(to)) for to, dims in ends}
    return sum(sizes.values())


class TableMaker:
    """Tables of settings that differ only in the ZeRO stage; everything that does not depend on it is computed once."""

    def __init__(self, space: NetworkSpace, setting: StepSetting, prices: MeshPrices, *, has_units: bool = True) -> None:
        self.has_units = has_units
        self.space, self.setting, self.prices = space, setting, prices
        self.network = space.network.with_itemsizes(activation=setting.activation_bytes, parameter=setting.sizes.gathered)
        fused = all_fused(self.network, setting.profile)
        self.run, self.apart = fused.graph, fused.apart
        self.num_parameters = self.network.num_parameters
        self.readers = self.network.readers()
        self.producers = self.network.producers()
        self.held = {tensor: len(space.operators) + i for i, tensor in enumerate(space.held)}
        self.known_vertices: dict[object, VertexColumns] = {}
        self.known_costs: dict[object, OperatorCost] = {}
        self.known_edges: dict[object, Array] = {}
        self.known_biases: dict[object, tuple[object, Array]] = {}
        self.known_bytes: dict[object, Array] = {}
        self.known_grids: dict[int, LayoutGrid] = {}
        self.kept = [saved_inputs(operator) for operator in self.network.operators]

    def build(self, setting: StepSetting) -> NetworkTables:
        """Return the tables of `setting`, which has the ZeRO stage."""
        self.setting, self.known_vertices = setting, {}
        vertices = self._vertices()
        edges: list[tuple[int, int, Array]] = []
        saved: list[tuple[int, int, Array]] = []
        for tensor, reading in self.readers.items():
            if self.network.tensors[tensor].role is TensorRole.PARAMETER:
                edges += self.shared_parameter(reading)
            if tensor not in self.producers:
                continue
            producer = self.producers[tensor]
            ends = [(self.held[tensor], -1)] if tensor in self.held else []
            for consumer, position in ends or reading:
                edges.append((producer, consumer, self.edge(tensor, producer, consumer, position)))
                saved += self.copied_bytes(tensor, producer, consumer, position)
            if tensor in self.held:
                for consumer, position in reading:
                    edges.append((self.held[tensor], consumer, self.edge(tensor, self.held[tensor], consumer, position)))
                    saved += self.copied_bytes(tensor, self.held[tensor], consumer, position)
        return NetworkTables(space=self.space, vertices=tuple(vertices), edges=tuple(edges), edge_bytes=tuple(saved))

    def reductions_at(self, prices: MeshPrices) -> list[Array]:
        """Return the time of the gradient reductions of each vertex at other prices. [s]"""
        saved = self.prices, self.known_vertices
        self.prices, self.known_vertices = prices, {}
        reductions = [vertex.reductions for vertex in self._vertices()]
        self.prices, self.known_vertices = saved
        return reductions

    # --- vertices ---------------------------------------------------------------------------------------------------------------------

    def _vertices(self) -> list[VertexColumns]:
        vertices = [self.operator_vertex(index) for index in range(len(self.network.operators))]
        return vertices + [self.held_vertex(tensor, layouts) for tensor, layouts in zip(self.space.held, self.space.layouts, strict=True)]

    def operator_vertex(self, index: int) -> VertexColumns:
        operator, rows = self.network.operators[index], self.space.operators[index]
        parameters = [
            position
            for position, operand in enumerate(operator.inputs)
            if self.network.tensors[operand.tensor].role is TensorRole.PARAMETER and self.readers[operand.tensor][0] == (index, position)
        ]
        kept = tuple(p for p in self.kept[index] if not self.is_kept_before(operator.inputs[p].tensor))
        key = (
            id(rows),
            tuple(operator.dims.items()),
            self.run.operators[index].forward,
            self.run.operators[index].backward,
            operator.traffic,
            operator.saved,
            self.is_wanted_at_once(operator),
            tuple((self._signature(operator.inputs[p]), self.unit(operator.inputs[p].tensor)) for p in parameters),
            kept,
            tuple(self._signature(operator.inputs[p]) for p in self.kept[index]),
            tuple(self._signature(operator.inputs[p]) for p in adding_places(self.network, operator)),
        )
        if key in self.known_vertices:
            return self.known_vertices[key]
        unsharded = {dim: (dim,) for dim in operator.dims}
        if key not in self.known_costs:
            compiled = compile_operators(self.run, [(self.run.operators[index], unsharded, self.also_saved(index))], self.setting)
            self.known_costs[key] = operator_cost(compiled, self.grid(rows), self.prices.machine)
        tensors = [self.network.tensors[operator.inputs[position].tensor] for position in parameters]
        layouts = [parameter_layout(t, [(operator, p)], {operator.name: unsharded}) for t, p in zip(tensors, parameters, strict=True)]
        if self.is_wanted_at_once(operator):
            layouts = [replace(layout, is_end=True, is_last=True) for layout in layouts]
        shares = [self.unit(tensor.name) for tensor in tensors]
        held, cost = parameter_times(layouts, shares, self.setting, self.prices.machine, self.grid(rows)), self.known_costs[key]
        self.known_vertices[key] = VertexColumns(
            forward=cost.forward,
            backward=cost.backward,
            collectives=cost.collectives,
            reductions=held.reductions,
            gathers=held.gathers,
            published=held.published,
            optimizer=held.optimizer,
            state_bytes=held.held_bytes,
            saved_bytes=cost.saved_bytes,
        )
        return self.known_vertices[key]

    def _signature(self, operand: Operand) -> object:
        tensor = self.network.tensors[operand.tensor]
        return tensor.shape, tensor.num_rows, tensor.role, operand.dims

    def grid(self, rows: Configurations) -> LayoutGrid:
        """Return the configurations as columns, with an axis for each dim."""
        if id(rows) not in self.known_grids:
            sizes = {dim: rows.parts[:, d].astype(np.float64) for d, dim in enumerate(rows.dims)}
            inside = [{dim: tier[rows.masks[:, d]] for d, dim in enumerate(rows.dims)} for tier in self.prices.inside]
            self.known_grids[id(rows)] = free_grid(sizes, inside, len(rows))
        return self.known_grids[id(rows)]

    def is_wanted_at_once(self, operator: Operator) -> bool:
        """Whether its weights are gathered once for both passes: those after the blocks, or of an end that may share that gather."""
        return bool(self.network.blocks) and operator.layer not in self.network.blocks

    def is_kept_before(self, tensor: str) -> bool:
        """Whether its producer or held vertex keeps the tensor: a reader then keeps another copy only in another layout."""
        if tensor in self.held:
            return True
        return tensor in self.producers and saves_output(self.network.operators[self.producers[tensor]])

    def also_saved(self, index: int) -> list[Data]:
        """Return the data that the operator saves, without inputs that earlier operators save."""
        operator = self.network.operators[index]
        before = {position for position in self.kept[index] if self.is_kept_before(operator.inputs[position].tensor)}
        return [data for data in operator.saved if data.of not in before]

    def unit(self, tensor: str) -> float:
        if not self.has_units:
            return 1.0
        return parameter_share(self.network.tensors[tensor].num_elements, self.num_parameters, int(self.prices.size[-1]))

    def is_kept_by_readers(self, tensor: str) -> bool:
        return any(position in self.kept[consumer] for consumer, position in self.readers[tensor])

    def held_vertex(self, tensor: str, layouts: Configurations) -> VertexColumns:
        """Return the vertex of a held tensor. It counts the bytes if a reader keeps the tensor and its producer does not."""
        zero = np.zeros(len(layouts))
        saved = zero
        shape = self.network.tensors[tensor].shape
        producer = self.network.operators[self.producers[tensor]]
        if self.is_kept_by_readers(tensor) and not saves_output(producer):
            saved = np.full(len(layouts), self.setting.activation_bytes)
            for position, size in enumerate(shape):
                saved = saved * np.ceil(size / layouts.parts[:, position])
        key = ("held", id(layouts), shape, bool(saved.any()))
        if key not in self.known_vertices:
            self.known_vertices[key] = VertexColumns(
                forward=zero,
                backward=zero,
                collectives=zero,
                reductions=zero,
                gathers=zero,
                published=zero,
                optimizer=zero,
                state_bytes=zero,
                saved_bytes=saved,
            )
        return self.known_vertices[key]

    # --- edges ------------------------------------------------------------------------------------------------------------------------

    def view(self, vertex: int, position: int) -> tuple[object, View]:
        """Return the layout of the tensor at this vertex (as output at position -1, as input, or as held), and its key."""
        if vertex >= len(self.space.operators):
            rows = self.space.layouts[vertex - len(self.space.operators)]
            return ("held", id(rows)), View(cuts=rows.masks[:, :-1], partial=rows.masks[:, -1])
        operator, rows = self.network.operators[vertex], self.space.operators[vertex]
        if position < 0:
            return ("left", id(rows), operator.output.dims, operator.roles.sums), left_view(operator, rows)
        operand = operator.inputs[position]
        return ("read", id(rows), operand.dims), reader_view(operator, operand, rows)

    def edge(self, tensor: str, source: int, consumer: int, position: int) -> Array:
        """Return the time of redistributing a tensor and its gradient along one edge, for each pair of configurations. [s]

        Includes a bias that cannot be fused into the preceding product, because that leaves partial sums.
        """
        source_key, left = self.view(source, -1)
        reader_key, read = self.view(consumer, position)
        moved = self.network.tensors[tensor]
        is_held = source >= len(self.space.operators)
        is_activation = moved.role is TensorRole.ACTIVATION  # made by an operator, as every edge's tensor
        bias_key, bias = self.bias_apart(consumer) if position == 0 and not is_held else (None, np.zeros(0))
        key = (source_key, reader_key, moved.shape, is_activation, bias_key)
        if key not in self.known_edges:
            if is_activation:
                total = moved.num_elements * self.setting.activation_bytes
                matrix = edge_times(left, read, total, self.prices, from_held=is_held)
            else:
                matrix = np.zeros((len(left.partial), len(read.partial)))
            if bias_key is not None:
                matrix = matrix + np.where(left.partial != 0, 1.0, 0.0)[:, None] * bias[None, :]
            self.known_edges[key] = matrix
        return self.known_edges[key]

    def bias_apart(self, index: int) -> tuple[object, Array]:
        """Return the extra time of a bias after a reduction over a fused one, with its only reader in the same layout. [s]"""
        operator = self.run.operators[index]
        if operator.forward or not self.apart.operators[index].forward:
            return None, np.zeros(0)
        rows, readers = self.space.operators[index], self.readers.get(operator.output.tensor, [])
        members = [(index, {dim: (dim,) for dim in operator.dims})]
        if len(readers) == 1:
            reader, position = readers[0]
            names = zip(self.run.operators[reader].inputs[position].dims, operator.output.dims, strict=True)
            members.append((reader, {its: (dim,) for its, dim in names if its and dim}))
        works = [(graph.operators[i].forward, graph.operators[i].backward) for graph in (self.run, self.apart) for i, _ in members]
        key = (id(rows), tuple(operator.dims.items()), tuple(works), tuple(tuple(cut.items()) for _, cut in members))
        if key not in self.known_biases:
            times = []
            for graph in (self.run, self.apart):
                compiled = compile_operators(graph, [(graph.operators[i], cut, ()) for i, cut in members], self.setting)
                cost = operator_cost(compiled, self.grid(rows), self.prices.machine)
                times.append(cost.forward + cost.backward)
            self.known_biases[key] = (len(self.known_biases), times[1] - times[0])
        return self.known_biases[key]

    def shared_parameter(self, reading: Sequence[tuple[int, int]]) -> list[tuple[int, int, Array]]:
        """Return edges between readers of one parameter. They hold it alike; its gradient is reduced once, where any leaves it partial."""
        edges = []
        (first, at), *others = reading
        if not others:
            return []
        operator = self.network.operators[first]
        tensor = self.network.tensors[operator.inputs[at].tensor]
        mine = reader_view(operator, operator.inputs[at], self.space.operators[first])
        share = self.unit(tensor.name)
        alone = self.reductions(tensor, mine.cuts, mine.partial, share)
        for other, position in others:
            reader = self.network.operators[other]
            its = reader_view(reader, reader.inputs[position], self.space.operators[other])
            # pairs that hold it alike, and the distinct ones of these: few among all pairs
            i, j = np.nonzero((mine.cuts[:, None, :] == its.cuts[None, :, :]).all(axis=2))
            joined, of = _distinct(View(cuts=mine.cuts[i], partial=mine.partial[i] | its.partial[j]), len(self.space.axes))
            more = self.reductions(tensor, joined.cuts, joined.partial, share)[of] - alone[i]
            extra = np.full((len(mine.partial), len(its.partial)), np.inf)
            extra[i, j] = np.maximum(more, 0.0)
            edges.append((first, other, extra))
        return edges

    def reductions(self, tensor: Tensor, cuts: Masks, partial: Masks, share: float) -> Array:
        """Return the reduction time of a parameter's gradient by layout and partial axes. [s]"""
        axes = [*map(str, range(len(tensor.shape))), "partial"]
        masks = dict(zip(axes, (*cuts.T, partial), strict=True))
        inside = [{axis: tier[mask] for axis, mask in masks.items()} for tier in self.prices.inside]
        grid = free_grid({axis: self.prices.size[mask] for axis, mask in masks.items()}, inside, len(partial))
        rows = tensor.num_rows
        layout = ParameterLayout(
            name=tensor.name,
            num_rows=prod(tensor.shape[:rows]),
            num_columns=prod(tensor.shape[rows:]),
            row_axes=frozenset(axes[:rows]),
            column_axes=frozenset(axes[rows:-1]),
            gradient_axes=frozenset(("partial",)),
            sum_axes=frozenset(),
            regions=(),
            elements=Amount(base=float(tensor.num_elements)),
        )
        return parameter_times([layout], [share], self.setting, self.prices.machine, grid).reductions

    def copied_bytes(self, tensor: str, source: int, consumer: int, position: int) -> list[tuple[int, int, Array]]:
        """Return the bytes of another copy if both ends keep the tensor and the consumer needs another layout."""
        operators = len(self.space.operators)
        by_readers = tensor in self.held and self.is_kept_by_readers(tensor)
        producer_keeps = saves_output(self.network.operators[self.producers[tensor]])
        source_keeps = by_readers if source >= operators else producer_keeps
        end_keeps = by_readers if consumer >= operators else position in self.kept[consumer]
        if not (source_keeps and end_keeps):
            return []
        source_key, left = self.view(source, -1)
        reader_key, read = self.view(consumer, position)
        shape = self.network.tensors[tensor].shape
        key = (source_key, reader_key, shape)
        if key not in self.known_bytes:
            same = (left.cuts[:, None, :] == read.cuts[None, :, :]).all(axis=2)
            if source < operators:
                same &= (left.partial == 0)[:, None]
            size = np.full(len(read.partial), self.setting.activation_bytes)
            for length, cut in zip(shape, read.cuts.T, strict=True):
                size = size * np.ceil(length / self.prices.size[cut])
            self.known_bytes[key] = np.where(same, 0.0, size[None, :])
        return [(source, consumer, self.known_bytes[key])]


def left_view(operator: Operator, rows: Configurations) -> View:
    """Return the layout of the output for each configuration."""
    return _view(rows, operator.output.dims, operator.roles.sums)


def reader_view(operator: Operator, operand: Operand, rows: Configurations) -> View:
    """Return the layout of an input for each configuration, with the axes on which its gradient becomes partial."""
    return _view(rows, operand.dims, [dim for dim in operator.dims if dim not in operand.dims])


def _view(rows: Configurations, dims: Sequence[str], summed: Sequence[str]) -> View:
    masks = dict(zip(rows.dims, rows.masks.T, strict=True))
    none = np.zeros(len(rows), dtype=np.int64)
    partial = none
    for dim in summed:
        partial = partial | masks[dim]
    return View(cuts=np.stack([masks[dim] if dim else none for dim in dims], axis=1), partial=partial)


def edge_times(left: View, read: View, total_bytes: float, prices: MeshPrices, *, from_held: bool = False) -> Array:
    """Return the time of moving a tensor from `left` to `read`, and its gradient back, for each pair. [s]

    The gradient returns reduced to the tensor's source; to a held tensor it returns as partial as the held sum.
    """
    bits = len(prices.axes)
    (left, of_left), (read, of_read) = _distinct(left, bits), _distinct(read, bits)
    left, read = _narrow(left), _narrow(read)
    matrix = np.empty((len(left.partial), len(read.partial)))
    step = max(1, _CHUNK // max(1, len(read.partial)))
    columns = View(cuts=read.cuts[None, :, :], partial=read.partial[None, :])
    none = np.zeros((1, 1), dtype=np.int32)
    for start in range(0, len(matrix), step):
        rows = View(cuts=left.cuts[start : start + step, None, :], partial=left.partial[start : start + step, None])
        away = rows.partial if not from_held else none
        forward = redistribution_times(View(cuts=rows.cuts, partial=away), View(cuts=columns.cuts, partial=none), total_bytes, prices)
        kept = rows.partial & columns.partial if from_held else none
        backward = redistribution_times(columns, View(cuts=rows.cuts, partial=kept), total_bytes, prices)
        matrix[start : start + step] = forward + backward
    return matrix[of_left[:, None], of_read[None, :]]


def _distinct(view: View, bits: int) -> tuple[View, NDArray[np.int64]]:
    """Return the distinct layouts, and the index of each layout among them."""
    code = view.partial.copy()
    for cut in view.cuts.T:
        code = (code << bits) | cut
    _, first, index = np.unique(code, return_index=True, return_inverse=True)
    return View(cuts=view.cuts[first], partial=view.partial[first]), index.ravel()


def _narrow(view: View) -> View:
    """Return the same masks in 32 bits."""
    return View(cuts=view.cuts.astype(np.int32), partial=view.partial.astype(np.int32))


def redistribution_times(source: View, target: View, total_bytes: float, prices: MeshPrices) -> Array:
    """Return the time of the steps of redistributions whose masks broadcast. [s]"""
    have, want = (tuple(np.moveaxis(cuts, -1, 0)) for cuts in (source.cuts, target.cuts))
    steps = collectives(have, want, source.partial & ~target.partial, tuple(map(differing, have, want)))
    time = np.zeros(np.broadcast_shapes(source.cuts.shape[:-1], target.cuts.shape[:-1], source.partial.shape, target.partial.shape))
    for kind, group, remaining in steps:
        if np.any(group):
            time += prices.table(kind, total_bytes).ravel()[(group << len(prices.axes)) | remaining]
    return time
