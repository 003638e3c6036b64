"""What every choice of a per-operator search costs: vectors and matrices for the search kernel.

A vertex costs its work, the collectives of its own rule (norm, loss) and those of its parameters. An edge costs the redistribution of
its tensor, forward and backward, by the same `redistribute` and the same collective times as a uniform plan. Seconds of one microbatch:
the embedding, all layers, the head; what happens once a step counts one over the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.program import comm_class
from perfmodel.parallel.derive import Phase, Traffic, _own_traffic, _step_amount
from perfmodel.parallel.parameters import TENSOR_AXES
from perfmodel.parallel.sharding import (
    Collective,
    Layout,
    Step,
    gradient_layout,
    input_layout,
    join_gradients,
    output_layout,
    redistribute,
    sliced_towards,
)
from perfmodel.planner.operator_mesh import Prices
from perfmodel.planner.operator_parameters import ParameterTerms, parameter_price
from perfmodel.planner.operator_space import OperatorSpace, OperatorVertex, layouts_of, parameters_of, reader_view
from perfmodel.planner.operator_work import WorkRows
from perfmodel.workload.operator import Operator, OperatorKind, TensorRole

Array = NDArray[np.float64]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTables:
    """vertex_times: work and own collectives; parameter_times: collectives of parameters; edges: (u, v, matrix). [s]"""

    space: OperatorSpace
    vertex_times: tuple[Array, ...]
    parameter_times: tuple[Array, ...]
    edges: tuple[tuple[int, int, Array], ...]

    @property
    def vertex_costs(self) -> tuple[Array, ...]:
        return tuple(time + parameters for time, parameters in zip(self.vertex_times, self.parameter_times, strict=True))

    def microbatch_time(self, choice: Sequence[int]) -> float:
        """Forward, backward and communication of activations of one microbatch. [s]"""
        own = sum(float(times[index]) for times, index in zip(self.vertex_times, choice, strict=True))
        return own + sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.edges)

    def parameter_time(self, choice: Sequence[int]) -> float:
        """Exposed collectives of parameters and gradients, for each microbatch. [s]"""
        return sum(float(times[index]) for times, index in zip(self.parameter_times, choice, strict=True))


@dataclass(slots=True, kw_only=True, eq=False)
class _Moves:
    """Redistributions between layouts, each derived once; they know nothing of sizes."""

    steps: dict[tuple[Layout, Layout], tuple[Step, ...]] = field(default_factory=dict)
    slices: dict[tuple[Layout, Layout], Layout] = field(default_factory=dict)

    def between(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        found = self.steps.get((source, target))
        if found is None:
            found = self.steps[source, target] = redistribute(source, target)
        return found

    def sliced(self, layout: Layout, goal: Layout) -> Layout:
        found = self.slices.get((layout, goal))
        if found is None:
            found = self.slices[layout, goal] = sliced_towards(layout, goal)
        return found


@dataclass(slots=True, kw_only=True, eq=False)
class _Redistributions:
    """Prices of redistributions of what an operator makes; tensors of equal dims share them."""

    prices: Prices
    moves: _Moves
    maker: Operator
    itemsize: float
    feeds_product: bool
    known_steps: dict[Hashable, float] = field(default_factory=dict)
    known_gradients: dict[tuple[Layout, Layout], float] = field(default_factory=dict)
    known_forward: dict[tuple[Layout, Layout], float] = field(default_factory=dict)

    def forward(self, source: Layout, target: Layout) -> float:
        known = self.known_forward.get((source, target))
        if known is None:
            known = sum(self._time(source, target, step, comm_class(step.axes)) for step in self.moves.between(source, target))
            self.known_forward[source, target] = known
        return known

    def again(self, source: Layout, target: Layout) -> float:
        """The gathers of forward, once more, for a product that saved the shard of its input (R17)."""
        if source.partial or not source.cut_axes - target.cut_axes:
            return 0.0
        gathers = (step for step in self.moves.between(source, target) if step.kind is Collective.ALL_GATHER)
        return sum(self._time(source, target, step, "regather") for step in gathers)

    def backward(self, gradients: Sequence[Layout], goal: Layout) -> float:
        """Gradients that leave the readers of a tensor, joined (R7), to where they must arrive: as it was made, nothing partial."""
        sliced = [self.moves.sliced(gradient, goal) for gradient in gradients]
        return sum(self._gradient(gradient, goal) for gradient in join_gradients(sliced))

    def _gradient(self, gradient: Layout, goal: Layout) -> float:
        known = self.known_gradients.get((gradient, goal))
        if known is None:
            known = 0.0
            for step in self.moves.between(gradient, goal):
                is_reduction = step.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
                hides = self.feeds_product and is_reduction and bool(step.axes & TENSOR_AXES)
                known += self._time(gradient, goal, step, "input_gradient" if hides else comm_class(step.axes))
            self.known_gradients[gradient, goal] = known
        return known

    def _time(self, source: Layout, target: Layout, step: Step, name: str) -> float:
        amount = _step_amount(self.maker, source, target, step, self.itemsize)
        key = (step.kind, step.axes, amount, name)
        if key not in self.known_steps:
            self.known_steps[key] = self.prices.redistribution(step.kind, step.axes, amount, name)
        return self.known_steps[key]


def operator_tables(space: OperatorSpace, prices: Prices, *, attention_kernel: str, parameters: ParameterTerms) -> OperatorTables:
    """Every cost that a search needs."""
    builder = _Builder(space=space, prices=prices, attention_kernel=attention_kernel)
    vertex_times, skipped = [], []
    for vertex in space.vertices:
        times, fused = builder.vertex_times(vertex)
        vertex_times.append(times)
        skipped.append(fused)
    parameter_times = [builder.parameter_times(vertex, parameters) for vertex in space.vertices]
    for shared in space.shared:
        vertex_times.append(np.zeros(len(shared.layouts)))
        parameter_times.append(np.zeros(len(shared.layouts)))
    edges = [edge for op in space.graph.operators for edge in builder.edges_of(op, skipped)]
    return OperatorTables(
        space=space,
        vertex_times=tuple(vertex_times),
        parameter_times=tuple(parameter_times),
        edges=(*edges, *builder.tied_edges()),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Builder:
    space: OperatorSpace
    prices: Prices
    attention_kernel: str
    moves: _Moves = field(default_factory=_Moves)
    known: dict[Hashable, _Redistributions] = field(default_factory=dict)

    def repeats(self, region: str) -> float:
        return float(self.space.graph.num_layers) if region == "layer" else 1.0

    # --- vertices -----------------------------------------------------------------------------------------------------------------

    def vertex_times(self, vertex: OperatorVertex) -> tuple[Array, dict[str, Array]]:
        """Work of each sharding, and what is saved of it where a bias is added by the product before it (by the bias's name)."""
        graph, prices = self.space.graph, self.prices
        biases = [op.name for op in vertex.operators if self._may_be_epilogue(op)]
        variants: list[frozenset[str]] = [frozenset(), *(frozenset((name,)) for name in biases)]
        rows = WorkRows(graph=graph, prices=prices)
        own = np.zeros(len(vertex.shardings))
        region = self.repeats(vertex.operators[0].region)  # boundaries, the one vertex of several regions, do no work
        for v, epilogues in enumerate(variants):
            internal = self._internal(vertex, epilogues)
            for c, sharding in enumerate(vertex.shardings):
                for op in vertex.operators:
                    rows.add(c * len(variants) + v, op, sharding, internal=internal, is_epilogue=op.name in epilogues)
        for c, sharding in enumerate(vertex.shardings):
            for op in vertex.operators:
                own[c] += sum(self._own_time(traffic) for traffic in _own_traffic(op, sharding))
        itemsize = graph.tensors[graph.boundary].itemsize
        times = rows.times(len(vertex.shardings) * len(variants), itemsize=itemsize, attention_kernel=self.attention_kernel)
        table = times.reshape(len(vertex.shardings), len(variants))
        saved = {name: (table[:, 1 + i] - table[:, 0]) * region for i, name in enumerate(biases)}
        return (table[:, 0] + own) * region, saved

    def _may_be_epilogue(self, op: Operator) -> bool:
        maker = self.space.graph.producer(op.inputs[0].tensor)
        return op.kernel_class == "bias" and maker is not None and maker.kind is OperatorKind.EINSUM

    def _internal(self, vertex: OperatorVertex, epilogues: frozenset[str]) -> set[str]:
        """Tensors between operators of one kernel: what lies inside a vertex, but for what a product writes."""
        readers = {operand.tensor for op in vertex.operators for operand in op.inputs}
        made = {op.output.tensor for op in vertex.operators if op.kind is not OperatorKind.IDENTITY and op.name not in epilogues}
        return made & readers

    def _own_time(self, traffic: Traffic) -> float:
        is_gradient = traffic.phase is Phase.BACKWARD and bool(traffic.axes & TENSOR_AXES)
        name = "input_gradient" if is_gradient and self._feeds_product(traffic.tensor) else comm_class(traffic.axes)
        return self.prices.redistribution(traffic.kind, traffic.axes, traffic.amount, name)

    def _feeds_product(self, tensor: str) -> bool:
        return any(op.kind is OperatorKind.EINSUM for op, _ in self.space.graph.consumers(tensor))

    def parameter_times(self, vertex: OperatorVertex, terms: ParameterTerms) -> Array:
        """Collectives of the parameters that this vertex is the first to read."""
        graph = self.space.graph
        times = np.zeros(len(vertex.shardings))
        for op in vertex.operators:
            for i in parameters_of(graph, op):
                uses = graph.consumers(op.inputs[i].tensor)
                if uses[0] == (op, i):
                    regions = tuple(dict.fromkeys(reader.region for reader, _ in uses))
                    for c, sharding in enumerate(vertex.shardings):
                        price = parameter_price(graph, op, i, sharding, regions, self.prices, terms)
                        times[c] += price * self.repeats(op.region)
        return times

    # --- edges --------------------------------------------------------------------------------------------------------------------

    def edges_of(self, maker: Operator, skipped: Sequence[dict[str, Array]]) -> list[tuple[int, int, Array]]:
        """The redistribution of what an operator leaves: one edge to its reader, or to the shared tensor and from there to each."""
        space = self.space
        tensor = maker.output.tensor
        readers = space.graph.consumers(tensor)
        if not readers:
            return []
        u = space.vertex_of[maker.name]
        lefts, left_index = _distinct([output_layout(maker, s) for s in space.vertices[u].shardings])
        shared = next((k for k, each in enumerate(space.shared) if each.tensor == tensor), -1)
        if shared < 0:
            ((reader, i),) = readers
            v = space.vertex_of[reader.name]
            if u == v:
                return []  # one sharding: nothing to redistribute
            shardings = space.vertices[v].shardings
            needs: list[tuple[Layout, tuple[Layout, ...]]] = [
                (input_layout(reader, s, reader.inputs[i]), (gradient_layout(reader, s, reader.inputs[i]),)) for s in shardings
            ]
            views, view_index = _distinct(needs)
        else:
            v = len(space.vertices) + shared
            layouts = space.shared[shared].layouts
            views, view_index = _distinct([(Layout(cuts=each[0]), tuple(layouts_of(each))) for each in layouts])
        matrix = self._redistribution_times(maker, readers, lefts, views)[left_index[:, None], view_index]
        edges = [(u, v, matrix)]
        if shared < 0:
            if readers[0][0].name in skipped[v]:
                whole = np.array([not left.partial for left in lefts])[left_index]
                edges.append((u, v, whole[:, None] * skipped[v][readers[0][0].name]))
            return [*edges, *self._merged_sum(maker, readers[0][0], edges)]
        for reader, i in readers:
            r = space.vertex_of[reader.name]
            own = [reader_view(reader, s, i) for s in space.vertices[r].shardings]
            fits = np.array([[cuts == shape[0] and partial in shape[1] for cuts, partial in own] for shape in space.shared[shared].layouts])
            edges.append((v, r, np.where(fits, 0.0, np.inf)))
        return edges

    def _redistribution_times(
        self,
        maker: Operator,
        readers: list[tuple[Operator, int]],
        lefts: Sequence[Layout],
        views: Sequence[tuple[Layout, tuple[Layout, ...]]],
    ) -> Array:
        price = self._redistributions(maker)
        regathers = self.prices.profile.saved_input_layout == "producer" and any(
            op.kind is OperatorKind.EINSUM and any(s.what == "input" and s.index == i for s in op.saved) for op, i in readers
        )
        copies = [position for position, name in enumerate(maker.output.dims) if maker.dim(name).stretched]
        targets, target_index = _distinct([target for target, _ in views])
        gradients, gradient_index = _distinct([gradient for _, gradient in views])
        goals, goal_index = _distinct([left.resolved() for left in lefts])
        back = np.array([[price.backward(gradient, goal) for gradient in gradients] for goal in goals])
        there = np.array([[price.forward(left, target) for target in targets] for left in lefts])
        if regathers:
            there = there + np.array([[price.again(left, target) for target in targets] for left in lefts])
        for position in copies:  # copies must be cut as they are read
            differs = [[left.cuts[position] != target.cuts[position] for target in targets] for left in lefts]
            there = np.where(np.array(differs), np.inf, there)
        times = there[:, target_index] + back[goal_index[:, None], gradient_index]
        return np.asarray(times * self.repeats(readers[0][0].region))

    def _redistributions(self, maker: Operator) -> _Redistributions:
        tensor = maker.output.tensor
        dims = tuple((d.size, d.per_sample, d.stretched, d.padded) for d in map(maker.dim, maker.output.dims))
        itemsize, feeds_product = self.space.graph.tensors[tensor].itemsize, self._feeds_product(tensor)
        key = (dims, itemsize, feeds_product)
        if key not in self.known:
            self.known[key] = _Redistributions(
                prices=self.prices, moves=self.moves, maker=maker, itemsize=itemsize, feeds_product=feeds_product
            )
        return self.known[key]

    def _merged_sum(self, maker: Operator, reader: Operator, edges: list[tuple[int, int, Array]]) -> list[tuple[int, int, Array]]:
        """Partial inputs of an addition are added first and reduced once (R7): the second costs nothing, in the layout of the first."""
        space = self.space
        if reader.kind is not OperatorKind.ADD:
            return []
        makers = [op for op in self._lone_makers(reader) if op.kind is OperatorKind.EINSUM]
        if len(makers) < 2 or makers[0] is maker:
            return []
        first, second = space.vertex_of[makers[0].name], space.vertex_of[maker.name]
        mine = [output_layout(maker, s) for s in space.vertices[second].shardings]
        others = [output_layout(makers[0], s) for s in space.vertices[first].shardings]
        is_partial = np.array([bool(layout.partial) for layout in mine])
        edges[0][2][is_partial] = 0.0
        clash = np.array([[bool(layout.partial) and layout != other for other in others] for layout in mine])
        return [(second, first, np.where(clash, np.inf, 0.0))]

    def _lone_makers(self, reader: Operator) -> list[Operator]:
        """Makers of the inputs that nobody else reads."""
        graph = self.space.graph
        found = [graph.producer(o.tensor) for o in reader.inputs if len(graph.consumers(o.tensor)) == 1]
        return [op for op in found if op is not None]

    def tied_edges(self) -> list[tuple[int, int, Array]]:
        """Operators that share a parameter must hold it in one layout."""
        space, edges = self.space, []
        for name, tensor in space.graph.tensors.items():
            uses = space.graph.consumers(name) if tensor.role is TensorRole.PARAMETER else []
            for reader, i in uses[1:]:
                first, j = uses[0]
                u, v = space.vertex_of[first.name], space.vertex_of[reader.name]
                one = [input_layout(first, s, first.inputs[j]) for s in space.vertices[u].shardings]
                other = [input_layout(reader, s, reader.inputs[i]) for s in space.vertices[v].shardings]
                edges.append((u, v, np.where(np.array([[a == b for b in other] for a in one]), 0.0, np.inf)))
        return edges


def _distinct(items: Sequence[_Key]) -> tuple[list[_Key], NDArray[np.int64]]:
    """The different ones in order of appearance, and which of them each is."""
    index: dict[_Key, int] = {}
    where = np.array([index.setdefault(item, len(index)) for item in items], dtype=np.int64)
    return list(index), where
