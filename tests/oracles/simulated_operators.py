"""Local programs of operators in numpy, forward and backward, and the run of a sharded graph on simulated ranks.

The same local program, on whole tensors, is the truth. A run redistributes every edge as collectives on the ranks' buffers,
checks each layout that the algebra claims on the way, and lists what was sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from perfmodel.parallel.algebra.derive import Amount, ShardedGraph
from perfmodel.parallel.algebra.sharding import Layout, Sharding, gradient_layout, input_layout, join_gradients, output_layout, redistribute
from perfmodel.workload.graph import Graph, Operator, TensorRole
from tests.oracles.simulated_ranks import Rank, Redistribute, SimulatedMesh, check_reassembles, execute, held

Array = np.ndarray
Buffers = dict[Rank, Array]
#: The dim of keys in attention, which a softmax needs whole.
_KEYS = "z"

Sent = tuple[str, str, str, frozenset[str], float]


# --- one operator ---------------------------------------------------------------------------------------------------


def forward(op: Operator, inputs: list[Array], held_rows: Array | None = None) -> Array:
    """The output of an operator; `held_rows`: rows of an embedding table that are here."""
    match op.kind:
        case "einsum":
            return np.einsum(_equation(op, (op.inputs[0].dims, op.inputs[1].dims), op.output.dims), *inputs)
        case "embedding":
            return _one_hot(inputs, held_rows) @ inputs[1]
        case "attention":
            q, k, v = inputs
            return np.einsum(_equation(op, (_scores_dims(op), op.inputs[2].dims), op.output.dims), _softmax(op, q, k), v)
        case _:
            return _stream(op, [_expand(x, operand.dims, op.output.dims) for x, operand in zip(inputs, op.inputs, strict=True)])


def backward(op: Operator, inputs: list[Array], gradient: Array, held_rows: Array | None = None) -> list[Array]:
    """Gradients of all inputs, summed over what is here of the dims that an input lacks."""
    dims = [operand.dims for operand in op.inputs]
    match op.kind:
        case "einsum":
            return [
                np.einsum(_equation(op, (op.output.dims, dims[1]), dims[0]), gradient, inputs[1]),
                np.einsum(_equation(op, (op.output.dims, dims[0]), dims[1]), gradient, inputs[0]),
            ]
        case "embedding":
            rows = _one_hot(inputs, held_rows).reshape(-1, len(inputs[1]))
            return [np.zeros_like(inputs[0]), rows.T @ gradient.reshape(len(rows), -1)]
        case "attention":
            q, k, v = inputs
            weights, scores = _softmax(op, q, k), _scores_dims(op)
            to_weights = np.einsum(_equation(op, (op.output.dims, dims[2]), scores), gradient, v)
            at = scores.index(_KEYS)
            to_scores = weights * (to_weights - (weights * to_weights).sum(axis=at, keepdims=True))
            return [
                np.einsum(_equation(op, (scores, dims[1]), dims[0]), to_scores, k),
                np.einsum(_equation(op, (scores, dims[0]), dims[1]), to_scores, q),
                np.einsum(_equation(op, (scores, op.output.dims), dims[2]), weights, gradient),
            ]
        case _:
            expanded = [_expand(x, d, op.output.dims) for x, d in zip(inputs, dims, strict=True)]
            return [_reduce(g, op.output.dims, d) for g, d in zip(_stream_backward(op, expanded, gradient), dims, strict=True)]


def _equation(op: Operator, operands: tuple[tuple[str, ...], ...], output: tuple[str, ...]) -> str:
    letter = {dim: chr(ord("a") + i) for i, dim in enumerate(op.dims)}
    return ",".join("".join(letter[d] for d in dims) for dims in operands) + "->" + "".join(letter[d] for d in output)


def _one_hot(inputs: list[Array], held_rows: Array | None) -> Array:
    rows = np.arange(len(inputs[1])) if held_rows is None else held_rows
    return (inputs[0][..., None] == rows).astype(float)


def _scores_dims(op: Operator) -> tuple[str, ...]:
    """Queries and keys as the output has them, d replaced by the key position."""
    return (*(d for d in op.output.dims if d != "d"), _KEYS)


def _softmax(op: Operator, q: Array, k: Array) -> Array:
    scores = np.einsum(_equation(op, (op.inputs[0].dims, op.inputs[1].dims), _scores_dims(op)), q, k)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _expand(x: Array, dims: tuple[str, ...], output: tuple[str, ...]) -> Array:
    order = [dims.index(d) for d in output if d in dims]
    return x.transpose(order).reshape([x.shape[dims.index(d)] if d in dims else 1 for d in output])


def _reduce(x: Array, output: tuple[str, ...], dims: tuple[str, ...]) -> Array:
    kept = [d for d in output if d in dims]
    summed = x.sum(axis=tuple(i for i, d in enumerate(output) if d not in dims))
    return summed.transpose([kept.index(d) for d in dims])


def _stream(op: Operator, x: list[Array]) -> Array:
    match op.settings.get("function", op.kind):
        case "tanh":
            return np.tanh(x[0])
        case "mul":
            return x[0] * x[1]
        case "rms_norm":
            axis = op.output.dims.index(op.inputs[1].dims[0])
            return x[0] / np.sqrt((x[0] ** 2).mean(axis=axis, keepdims=True)) * x[1]
        case _:  # add, bias, identity
            return sum(x[1:], x[0].copy())


def _stream_backward(op: Operator, x: list[Array], g: Array) -> list[Array]:
    match op.settings.get("function", op.kind):
        case "tanh":
            return [g * (1 - np.tanh(x[0]) ** 2)]
        case "mul":
            return [g * x[1], g * x[0]]
        case "rms_norm":
            axis = op.output.dims.index(op.inputs[1].dims[0])
            root = np.sqrt((x[0] ** 2).mean(axis=axis, keepdims=True))
            unit = x[0] / root
            return [(g * x[1] - unit * (g * x[1] * unit).mean(axis=axis, keepdims=True)) / root, g * unit]
        case _:
            return [g for _ in x]


# --- a graph --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algebra:
    """The rules under test, so that a wrong one can be put in the place of each."""

    redistribute: Redistribute = redistribute
    output_layout: Callable[..., Layout] = output_layout
    gradient_layout: Callable[..., Layout] = gradient_layout
    promotes: bool = True
    """Divides a whole gradient by n before it is added to partial ones (R7)."""


@dataclass
class GraphRun:
    """One forward and backward of a sharded graph on all ranks."""

    mesh: SimulatedMesh
    graph: Graph
    shardings: Mapping[str, Sharding]
    leaves: Mapping[str, Array]
    random: np.random.Generator
    algebra: Algebra = field(default_factory=Algebra)
    sent: list[Sent] = field(default_factory=list)

    def run(self) -> GraphRun:
        self._truth()
        self._forward()
        self._backward()
        return self

    def _truth(self) -> None:
        self.value = dict(self.leaves)
        for op in self.graph.operators:
            self.value[op.output.tensor] = forward(op, [self.value[o.tensor] for o in op.inputs])
        read = {o.tensor for op in self.graph.operators for o in op.inputs}
        self.cotangent = {
            op.output.tensor: self.random.normal(size=self.value[op.output.tensor].shape)
            for op in self.graph.operators
            if op.output.tensor not in read
        }
        self.gradient = {t: np.zeros_like(v, dtype=float) for t, v in self.value.items()}
        self.edge_gradient: dict[tuple[str, int], Array] = {}
        for tensor, value in self.cotangent.items():
            self.gradient[tensor] = value
        for op in reversed(self.graph.operators):
            gradients = backward(op, [self.value[o.tensor] for o in op.inputs], self.gradient[op.output.tensor])
            for i, (operand, gradient) in enumerate(zip(op.inputs, gradients, strict=True)):
                self.edge_gradient[op.name, i] = gradient
                self.gradient[operand.tensor] = self.gradient[operand.tensor] + gradient

    def _send(self, phase: str, tensor: str, source: Layout, target: Layout, buffers: Buffers) -> Buffers:
        result, steps = execute(self.mesh, source, target, buffers, self.value[tensor].shape, redistribute=self.algebra.redistribute)
        itemsize = self.graph.tensors[tensor].itemsize
        self.sent += [(phase, tensor, str(step.kind), step.axes, elements * itemsize) for step, elements in steps]
        return result

    def _rows(self, op: Operator, rank: Rank) -> Array | None:
        if op.kind != "embedding":
            return None
        name = op.inputs[1].dims[0]
        cut = self.shardings[op.name].get(name, ())
        return held(self.mesh, Layout(cuts=(tuple(cut),)), (op.dims[name],), rank)[0]

    def _reduced_inputs(self) -> dict[str, str]:
        """Return the partial inputs of an addition that are added locally to another one: tensor -> the reduced tensor."""
        carried: dict[str, str] = {}
        for op in self.graph.operators:
            if op.is_linear:
                first: dict[Layout, str] = {}
                for operand in op.inputs:
                    layout = self.left.get(operand.tensor)
                    if layout is not None and layout.partial and len(self.graph.consumers(operand.tensor)) == 1:
                        if layout in first:
                            carried[operand.tensor] = first[layout]
                        first.setdefault(layout, operand.tensor)
        return carried

    def _forward(self) -> None:
        graph, mesh, algebra = self.graph, self.mesh, self.algebra
        self.left = {op.output.tensor: algebra.output_layout(op, self.shardings[op.name]) for op in graph.operators}
        self.carried = self._reduced_inputs()
        self.inputs: dict[tuple[str, int], Buffers] = {}
        outputs: dict[str, Buffers] = {}
        for op in graph.operators:
            for i, operand in enumerate(op.inputs):
                if graph.tensors[operand.tensor].role is not TensorRole.ACTIVATION:
                    value, layout = self.value[operand.tensor], input_layout(self.shardings[op.name], operand)
                    self.inputs[op.name, i] = {r: value[np.ix_(*held(mesh, layout, value.shape, r))] for r in mesh.ranks}
            buffers = {r: forward(op, [self.inputs[op.name, i][r] for i in range(len(op.inputs))], self._rows(op, r)) for r in mesh.ranks}
            tensor = op.output.tensor
            if not self.carried.keys() & {o.tensor for o in op.inputs}:
                check_reassembles(mesh, self.left[tensor], buffers, self.value[tensor])
            outputs[tensor] = buffers
            if tensor in self.carried or tensor in self.carried.values():
                self._settle_addition(tensor, outputs)
            else:
                self._distribute(tensor, graph.consumers(tensor), buffers)

    def _settle_addition(self, tensor: str, outputs: dict[str, Buffers]) -> None:
        """Once all partial inputs of an addition are there: their sum is sent as one of them, zeros stand for the others."""
        reduced = self.carried.get(tensor, tensor)
        members = [reduced, *(t for t, c in self.carried.items() if c == reduced)]
        if any(t not in outputs for t in members):
            return
        total = {r: sum(outputs[t][r] for t in members) for r in self.mesh.ranks}
        self._distribute(reduced, self.graph.consumers(reduced), total)
        (op, at) = self.graph.consumers(reduced)[0]
        for i, operand in enumerate(op.inputs):
            if operand.tensor in members and operand.tensor != reduced:
                self.inputs[op.name, i] = {r: np.zeros_like(b) for r, b in self.inputs[op.name, at].items()}

    def _distribute(self, tensor: str, readers: list[tuple[Operator, int]], buffers: Buffers) -> None:
        """One redistribution for each distinct layout needed; after the first, a partial sum is never reduced again."""
        wanted = [(input_layout(self.shardings[op.name], op.inputs[i]), op, i) for op, i in readers]
        source, results = self.left[tensor], {}
        for layout, _, _ in sorted(wanted, key=lambda item: -len(item[0].cut_axes)):
            if layout not in results:
                results[layout] = self._send("forward", tensor, source, layout, buffers)
                if source.partial:
                    source, buffers = layout, results[layout]
        for layout, op, i in wanted:
            self.inputs[op.name, i] = results[layout]

    def _backward(self) -> None:
        mesh, graph = self.mesh, self.graph
        self.gradients: dict[tuple[str, int], tuple[Layout, Buffers]] = {}
        arrived: dict[str, Buffers] = {}
        for op in reversed(graph.operators):
            tensor = op.output.tensor
            reduced = self.carried.get(tensor, tensor)
            if reduced not in arrived:
                arrived[reduced] = self._arrive(reduced)
            gradient, goal = arrived[reduced], self.left[tensor].resolved()
            check_reassembles(mesh, goal, gradient, self.gradient[tensor])
            gradients = {
                r: backward(op, [self.inputs[op.name, i][r] for i in range(len(op.inputs))], gradient[r], self._rows(op, r))
                for r in mesh.ranks
            }
            for i, operand in enumerate(op.inputs):
                if graph.tensors[operand.tensor].role is TensorRole.INDEX:
                    continue
                layout = self.algebra.gradient_layout(self.shardings[op.name], operand)
                local = {r: gradients[r][i] for r in mesh.ranks}
                check_reassembles(mesh, layout, local, self.edge_gradient[op.name, i])
                self.gradients[op.name, i] = (layout, local)

    def _arrive(self, tensor: str) -> Buffers:
        """The gradient of a tensor in its producer's layout: sliced where free, added where cut alike, then reduced."""
        goal = self.left[tensor].resolved()
        readers = self.graph.consumers(tensor)
        if not readers:
            value = self.cotangent[tensor]
            return {r: value[np.ix_(*held(self.mesh, goal, value.shape, r))] for r in self.mesh.ranks}
        shape = self.value[tensor].shape
        parts = [self._slice(*self.gradients[op.name, i], goal, shape) for op, i in readers]
        total: Buffers = {}
        for layout in join_gradients([part for part, _ in parts]):
            joined: Buffers = {}
            for part, buffers in parts:
                if part.cuts == layout.cuts:
                    n = self.mesh.size(layout.partial - part.partial) if self.algebra.promotes else 1
                    joined = {r: joined.get(r, 0.0) + buffers[r] / n for r in self.mesh.ranks}
            sent = self._send("backward", tensor, layout, goal, joined)
            total = {r: total.get(r, 0.0) + sent[r] for r in self.mesh.ranks}
        return total

    def _slice(self, layout: Layout, buffers: Buffers, goal: Layout, shape: tuple[int, ...]) -> tuple[Layout, Buffers]:
        """Takes cuts of the goal, inside those that are there, on axes where all copies are equal."""
        cuts = [list(cut) for cut in layout.cuts]
        for have, want in zip(cuts, goal.cuts, strict=True):
            for axis in want[len(have) :] if list(want[: len(have)]) == have else ():
                if axis in layout.cut_axes | layout.partial:
                    break
                have.append(axis)
        result = Layout(cuts=tuple(map(tuple, cuts)), partial=layout.partial)
        sliced = {}
        for rank, values in buffers.items():
            pairs = zip(held(self.mesh, layout, shape, rank), held(self.mesh, result, shape, rank), strict=True)
            sliced[rank] = values[np.ix_(*(np.searchsorted(have, want) for have, want in pairs))]
        return result, sliced

    def check_parameters(self, derivation: ShardedGraph) -> None:
        """The gradient of a parameter, summed over its gradient axes, is the true gradient's part."""
        for parameter in derivation.parameters:
            joined: Buffers = {}
            for op, i in self.graph.consumers(parameter.name):
                layout, buffers = self.gradients[op.name, i]
                n = self.mesh.size(parameter.gradient_axes - layout.partial)
                joined = {r: joined.get(r, 0.0) + buffers[r] / n for r in self.mesh.ranks}
            unreduced = Layout(cuts=layout.cuts, partial=parameter.gradient_axes)
            check_reassembles(self.mesh, unreduced, joined, self.gradient[parameter.name])


def amount_on(mesh: SimulatedMesh, amount: Amount) -> float:
    """An amount with the sizes of a mesh put in (one sequence)."""
    return amount.base * ceil(amount.padded_size / mesh.size(amount.padded_axes)) / mesh.size(amount.axes)


def derived(mesh: SimulatedMesh, derivation: ShardedGraph) -> Counter[Sent]:
    return Counter(
        (str(t.phase), t.tensor, str(t.kind), t.axes, amount_on(mesh, t.amount)) for t in derivation.traffic for _ in range(t.repeats)
    )


__all__ = ["Algebra", "GraphRun", "amount_on", "backward", "derived", "forward"]
