"""Interpreter of one stage: its operators in order, each in the layouts of the plan, for one micro-batch on one rank."""

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
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.per_operator.recompute import recomputed_runs
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Operator
from perfmodel.workload.work import Pass

Values = dict[str, torch.Tensor]
#: Inputs of operators, by operator index and input position.
Inputs = dict[tuple[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEnds:
    """Boundary tensors of a user's module.

    outputs      leave the network, even if operators read them
    known        outputs of operators on data alone: passed in, and their operators are skipped
    index_dtype  integers computed by operators are redistributed in this type
    """

    outputs: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    index_dtype: torch.dtype = torch.int64


#: For a network whose outputs are the tensors that no operator reads.
NETWORK_ENDS = NetworkEnds()


class Interpreter:
    """Operators [start, end) of a network.

    contexts    context of each operator in this range, by index
    parameter   returns this rank's shard of a parameter, ready to read
    given       returns this rank's shard of an input tensor, in a layout, for a micro-batch
    functions   by kind, or by the name of an operator
    kept        collects every operator's output if it is not None
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
        self.partial = {sharded.name: sharded.gradient_axes for sharded in derivation.parameters}
        self.producers, self.readers = network.producers(), network.readers()
        self.outputs, self.known, self.index_dtype = ends.outputs, ends.known, ends.index_dtype
        self.kept: Values | None = None
        operators = {index: network.operators[index] for index in range(*run)}
        self.calls = {index: functions.get(operator.name) or functions[operator.kind] for index, operator in operators.items()}
        self.again = dict(recomputed_runs(network, plan, run))
        self.dead: dict[int, list[str]] = {index: [] for index in operators}
        for tensor, reading in self.readers.items():
            if tensor in self.producers and tensor not in self.outputs and reading[-1][0] in operators:
                self.dead[reading[-1][0]].append(tensor)
        #: Transitions of the inputs of each operator, and of each tensor before its first reader.
        self.edges: dict[int, list[Transition | Layout]] = {}
        self.shared: dict[str, Transition] = {}
        for index, operator in operators.items():
            worker.beat(f"preparing {operator.name}")
            self.edges[index] = [self._edge(operator, position) for position in range(len(operator.inputs))]
        for tensor, held in plan.cuts.held.items():
            # done on the stage of the first reader: a tensor is sent between stages in the layout of its producer
            is_computed = tensor in self.producers and tensor not in self.known
            if is_computed and tensor in self.readers and self.readers[tensor][0][0] in operators:
                producer, left = network.operators[self.producers[tensor]], derivation.left[tensor]
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
        """Return a tensor, computed here or received from another stage, in the layout of its readers."""
        return self.shared[tensor](value) if tensor in self.shared else value

    def run(self, start: int, end: int, values: Values, microbatch: int) -> None:
        """Run operators [start, end): read inputs from `values`, store outputs there, and free each tensor after its last reader."""
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
        """Run operators [start, end) under activation checkpointing: only their inputs are saved, and backward runs them again."""
        leaving = self.external_outputs(start, end)
        ready: Inputs = {}
        before: Values = {}
        if self.plan.recompute is Recompute.SELECTIVE:
            for index in range(start, end):
                for position, operand in enumerate(self.network.operators[index].inputs):
                    if self.producers.get(operand.tensor, start) < start:
                        ready[index, position] = self._input(operand.tensor, self.edges[index][position], values, microbatch)
        else:
            before = {tensor: values[tensor] for tensor in self.external_inputs(start, end)}

        def function(ready: Inputs, before: Values) -> tuple[torch.Tensor, ...]:
            inner = dict(before)
            for index in range(start, end):
                self._operate(index, inner, microbatch, ready)
            return tuple(inner[tensor] for tensor in leaving)

        for index in range(start, end):
            for tensor in self.dead[index]:
                values.pop(tensor, None)
        outputs = checkpoint(function, ready, before, use_reentrant=False, preserve_rng_state=False)
        values |= zip(leaving, outputs, strict=True)

    def _operate(self, index: int, values: Values, microbatch: int, ready: Inputs) -> None:
        """Run one operator. `ready`: inputs that are already in the operator's layout."""
        operator = self.network.operators[index]
        self.worker.beat(operator.name)
        taken, first = getattr(self.calls[index], "taken", None), operator.inputs[0].tensor if operator.inputs else ""
        live = values if taken is None else {**values, first: self.enter(first, taken())}
        inputs = [
            ready[index, number] if (index, number) in ready else self._input(operand.tensor, self.edges[index][number], live, microbatch)
            for number, operand in enumerate(operator.inputs)
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

    def external_inputs(self, start: int, end: int) -> list[str]:
        """Return the tensors that operators [start, end) read and earlier operators compute; known ones are given."""
        names = dict.fromkeys(operand.tensor for index in range(start, end) for operand in self.network.operators[index].inputs)
        return [name for name in names if self.producers.get(name, start) < start and name not in self.known]

    def external_outputs(self, start: int, end: int) -> list[str]:
        """Return the outputs of operators [start, end) that are read later or not at all."""
        outputs = [self.network.operators[index].output.tensor for index in range(start, end)]
        produced = [tensor for tensor in outputs if tensor not in self.known]
        return [tensor for tensor in produced if tensor in self.outputs or tensor not in self.readers or self.readers[tensor][-1][0] >= end]

    def leave(self, tensor: str, needed: Layout | None = None) -> Transition:
        """Return the transitions of an output to a layout (default: its own) and of its gradient, replicated if the output is partial."""
        held, producer = self.plan.cuts.held.get(tensor) if tensor in self.readers else None, self.network.operators[self.producers[tensor]]
        goal = needed or (held.layout if held else self.derivation.left[tensor])
        source, into = ends_of_edge(self.derivation.left[tensor], held, goal.resolved())
        return Transition(
            self._redistribution(source, goal, tensor, producer.name, Pass.FORWARD),
            self._redistribution(goal.resolved(), into, tensor, producer.name, Pass.BACKWARD),
            1 if held is None else self.mesh.size(held.partial),
        )


class Section(nn.Module):
    """Operators [start, end) as a module: maps input tensors to output tensors, by name."""

    def __init__(self, interpreter: Interpreter, start: int, end: int) -> None:
        super().__init__()
        self.interpreter, self.start, self.end = interpreter, start, end

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        live = dict(values)
        self.interpreter.run(self.start, self.end, live, microbatch)
        return {tensor: live[tensor] for tensor in self.interpreter.external_outputs(self.start, self.end)}


class Chain(nn.Module):
    """Sequence of modules. Each receives the tensors that it reads; a tensor is freed after its last reader."""

    def __init__(self, modules: Iterable[nn.Module], wanted: Iterable[list[str]], left: list[str]) -> None:
        super().__init__()
        self.sections = nn.ModuleList(modules)
        self.wanted, self.left = list(wanted), left
        last = {tensor: number for number, names in enumerate(self.wanted) for tensor in names}
        self.dead = [[t for t in names if last[t] == number and t not in left] for number, names in enumerate(self.wanted)]

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        live = dict(values)
        for number, section in enumerate(self.sections):
            taken = {tensor: live[tensor] for tensor in self.wanted[number]}
            for tensor in self.dead[number]:
                del live[tensor]
            live |= section(taken, microbatch)
            del taken
        return {tensor: live[tensor] for tensor in self.left}
