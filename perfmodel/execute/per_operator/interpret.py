"""The operators of one stage, in order, each on the layouts that the plan says: what a rank computes of one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.functions import NetworkFunction
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose
from perfmodel.execute.per_operator.redistribute import Redistribution, Transition
from perfmodel.parallel.algebra.derive import ShardedGraph
from perfmodel.parallel.algebra.sharding import Layout, ends_of_edge, gradient_layout
from perfmodel.parallel.layout import Recompute
from perfmodel.parallel.per_operator.recompute import recomputed_runs
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Operator, Pass

Values = dict[str, torch.Tensor]
#: What an operator reads, by its index and the place among its inputs.
Inputs = dict[tuple[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEnds:
    """Tensors at the ends of a user's module.

    outputs      leave the network though operators may read them
    known        operators make them of data alone: they are given, and their operators left out
    index_dtype  whole numbers that operators make are redistributed as this
    """

    outputs: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    index_dtype: torch.dtype = torch.int64


#: Of a network whose outputs are what no operator reads.
NETWORK_ENDS = NetworkEnds()


class Interpreter:
    """Operators [start, end) of a network.

    contexts    of the operators of the whole network, where these are inside
    parameter   this rank's part of a parameter, as it is to be read now
    given       this rank's part of a tensor that no operator makes, in a layout, of a microbatch
    functions   by kind, or by the name of an operator
    kept        where somebody wants it, every operator's output
    """

    def __init__(
        self,
        worker: Worker,
        derivation: ShardedGraph,
        plan: Plan,
        mesh: NetworkMesh,
        run: tuple[int, int],
        *,
        functions: Mapping[str, NetworkFunction],
        contexts: Mapping[int, OperatorContext],
        parameter: Callable[[str], torch.Tensor],
        given: Callable[[str, Layout, int], torch.Tensor],
        ends: NetworkEnds = NETWORK_ENDS,
    ) -> None:
        network = derivation.graph
        self.worker, self.network, self.plan, self.mesh, self.run_of = worker, network, plan, mesh, run
        self.derivation, self.contexts, self.parameter, self.given = derivation, contexts, parameter, given
        self.partial = {each.name: each.gradient_axes for each in derivation.parameters}
        self.producers, self.readers = network.producers(), network.readers()
        self.outputs, self.known, self.index_dtype = ends.outputs, ends.known, ends.index_dtype
        self.kept: Values | None = None
        operators = {index: network.operators[index] for index in range(*run)}
        self.calls = {index: functions.get(each.name) or functions[each.kind] for index, each in operators.items()}
        self.again = dict(recomputed_runs(network, plan, run))
        self._compile()

    def _compile(self) -> None:
        """Compile the transitions of each operator's inputs, and of each tensor before it is read."""
        start, end = self.run_of
        self.edges: dict[int, list[Transition | Layout]] = {}
        self.shared: dict[str, Transition] = {}
        self.dead: dict[int, list[str]] = {index: [] for index in range(start, end)}
        for tensor, reading in self.readers.items():
            if tensor in self.producers and tensor not in self.outputs and start <= reading[-1][0] < end:
                self.dead[reading[-1][0]].append(tensor)
        for index in range(start, end):
            operator = self.network.operators[index]
            self.worker.beat(f"preparing {operator.name}")
            self.edges[index] = [self._edge(operator, position) for position in range(len(operator.inputs))]
        for tensor, held in self.plan.cuts.held.items():
            # where it is read: what comes from another stage comes as it was left
            if (
                tensor in self.producers
                and tensor not in self.known
                and tensor in self.readers
                and start <= self.readers[tensor][0][0] < end
            ):
                producer, left = self.network.operators[self.producers[tensor]], self.derivation.left[tensor]
                self.shared[tensor] = Transition(
                    self._redistribution(left, held.layout, tensor, producer.name, Pass.FORWARD),
                    self._redistribution(held.gradient, left.resolved(), tensor, producer.name, Pass.BACKWARD),
                )

    def _redistribution(self, source: Layout, target: Layout, tensor: str, operator: str, phase: Pass) -> Redistribution:
        shape = self.network.tensors[tensor].shape
        return Redistribution(source, target, shape, self.mesh, Purpose(phase, tensor, operator, "edge"))

    def _edge(self, operator: Operator, position: int) -> Transition | Layout:
        operand = operator.inputs[position]
        tensor, needed = operand.tensor, self.derivation.needed[operator.name, position]
        gradient = gradient_layout(self.plan.cuts.shardings[operator.name], operand)
        if tensor in self.partial:
            same = self._redistribution(needed, needed, tensor, operator.name, Pass.FORWARD)
            return Transition(same, same, self.mesh.size(self.partial[tensor] - gradient.partial))
        if tensor not in self.producers or tensor in self.known:
            return needed
        held = self.plan.cuts.held.get(tensor)
        source, goal = ends_of_edge(self.derivation.left[tensor], held, gradient)
        ways = 1 if held is None else self.mesh.size(held.partial - gradient.partial)
        return Transition(
            self._redistribution(source, needed, tensor, operator.name, Pass.FORWARD),
            self._redistribution(gradient, goal, tensor, operator.name, Pass.BACKWARD),
            ways,
        )

    def enter(self, tensor: str, value: torch.Tensor) -> torch.Tensor:
        """A tensor that was just made, or came from another stage, in the layout of its readers."""
        return self.shared[tensor](value) if tensor in self.shared else value

    def run(self, start: int, end: int, values: Values, microbatch: int) -> None:
        """Operators [start, end), which take what they read from `values` and put what they make there; what nobody reads any more goes."""
        index = start
        while index < end:
            if self.network.operators[index].output.tensor in self.known:
                index += 1
                continue
            if index in self.again:
                self._recomputed(index, self.again[index], values, microbatch)
            else:
                self._operate(index, values, microbatch, {})
            index = self.again.get(index, index + 1)

    def _recomputed(self, start: int, end: int, values: Values, microbatch: int) -> None:
        """Operators [start, end) as a function that keeps its inputs alone and runs again in backward."""
        leaving = self.left_for_others(start, end)
        ready: Inputs = {}
        before: Values = {}
        if self.plan.recompute is Recompute.SELECTIVE:
            for index in range(start, end):
                for place, operand in enumerate(self.network.operators[index].inputs):
                    if self.producers.get(operand.tensor, start) < start:
                        ready[index, place] = self._input(operand.tensor, self.edges[index][place], values, microbatch)
        else:
            before = {tensor: values[tensor] for tensor in self.wanted_from_before(start, end)}

        def function(ready: Inputs, before: Values) -> tuple[torch.Tensor, ...]:
            own = dict(before)
            for index in range(start, end):
                self._operate(index, own, microbatch, ready)
            return tuple(own[tensor] for tensor in leaving)

        for index in range(start, end):
            for tensor in self.dead[index]:
                values.pop(tensor, None)
        found = checkpoint(function, ready, before, use_reentrant=False, preserve_rng_state=False)
        values |= zip(leaving, found, strict=True)

    def _operate(self, index: int, values: Values, microbatch: int, ready: Inputs) -> None:
        """One operator. `ready`: inputs that are there already as it reads them."""
        operator = self.network.operators[index]
        self.worker.beat(operator.name)
        taken, first = getattr(self.calls[index], "taken", None), operator.inputs[0].tensor if operator.inputs else ""
        at_hand = values if taken is None else {**values, first: self.enter(first, taken())}
        inputs = [
            ready[index, place] if (index, place) in ready else self._input(operand.tensor, self.edges[index][place], at_hand, microbatch)
            for place, operand in enumerate(operator.inputs)
        ]
        for tensor in self.dead[index]:
            values.pop(tensor, None)
        tensor = operator.output.tensor
        try:
            value = self.calls[index](inputs, self.contexts[index])
        except RuntimeError as error:
            raise type(error)(f"operator {operator.name} ({operator.kind}): {error}") from error
        if self.kept is not None:
            self.kept[tensor] = value.detach()
        values[tensor] = self.enter(tensor, value)

    def _input(self, tensor: str, edge: Transition | Layout, values: Values, microbatch: int) -> torch.Tensor:
        if isinstance(edge, Layout):
            return self.given(tensor, edge, microbatch)
        if tensor in self.partial:
            return edge(self.parameter(tensor))
        value = values[tensor]
        if value.dtype.is_floating_point or edge.there.is_identity:
            return edge(value)
        return edge(value.to(self.index_dtype)).to(value.dtype)

    def wanted_from_before(self, start: int, end: int) -> list[str]:
        """Tensors that operators [start, end) read and others make."""
        names = dict.fromkeys(operand.tensor for index in range(start, end) for operand in self.network.operators[index].inputs)
        return [name for name in names if self.producers.get(name, start) < start]

    def left_for_others(self, start: int, end: int) -> list[str]:
        """Tensors that operators [start, end) make and that are read later, or by nobody."""
        made = [self.network.operators[index].output.tensor for index in range(start, end)]
        return [tensor for tensor in made if tensor in self.outputs or tensor not in self.readers or self.readers[tensor][-1][0] >= end]

    def leave(self, tensor: str, needed: Layout | None = None) -> Transition:
        """How a tensor leaves the network: in a layout, or as it is; its gradient comes back so, whole where the tensor is partial."""
        held, producer = self.plan.cuts.held.get(tensor) if tensor in self.readers else None, self.network.operators[self.producers[tensor]]
        goal = needed or (held.layout if held else self.derivation.left[tensor])
        source, into = ends_of_edge(self.derivation.left[tensor], held, goal.resolved())
        return Transition(
            self._redistribution(source, goal, tensor, producer.name, Pass.FORWARD),
            self._redistribution(goal.resolved(), into, tensor, producer.name, Pass.BACKWARD),
            1 if held is None else self.mesh.size(held.partial),
        )


class Section(nn.Module):
    """Operators [start, end) as a module: tensors by name in, tensors by name out."""

    def __init__(self, interpreter: Interpreter, start: int, end: int) -> None:
        super().__init__()
        self.interpreter, self.start, self.end = interpreter, start, end

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        own = dict(values)
        self.interpreter.run(self.start, self.end, own, microbatch)
        return {tensor: own[tensor] for tensor in self.interpreter.left_for_others(self.start, self.end)}


class Chain(nn.Module):
    """Modules one after another, each with what it reads of what the others make; what none reads any more goes."""

    def __init__(self, modules: Iterable[nn.Module], wanted: Iterable[list[str]], left: list[str]) -> None:
        super().__init__()
        self.sections = nn.ModuleList(modules)
        self.wanted, self.left = list(wanted), left
        last = {tensor: number for number, names in enumerate(self.wanted) for tensor in names}
        self.dead = [[t for t in names if last[t] == number and t not in left] for number, names in enumerate(self.wanted)]

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        at_hand = dict(values)
        for number, section in enumerate(self.sections):
            taken = {tensor: at_hand[tensor] for tensor in self.wanted[number]}
            for tensor in self.dead[number]:
                del at_hand[tensor]
            at_hand |= section(taken, microbatch)
            del taken
        return {tensor: at_hand[tensor] for tensor in self.left}
