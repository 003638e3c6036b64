"""A network as a program on one rank: its operators in order, each on the layouts that the plan says.

Inputs and parameters are made at full size from a seed, the same on every rank and in one process, and cut to what their readers need. The
loss is the mean of what nobody reads. A tensor with several readers goes by way of the layout that holds it; the gradient of a parameter is
reduced once, after backward, over the axes on which it is partial.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod, sqrt
from types import MappingProxyType

import torch

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.functions import FUNCTIONS, NetworkFunction
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose, begin_all_reduce
from perfmodel.execute.per_operator.padding import padded_network
from perfmodel.execute.per_operator.redistribute import Redistribution, Transition, local_part
from perfmodel.execute.per_operator.refuse import check_runnable, parameter_layouts
from perfmodel.parallel.algebra.sharding import Layout, gradient_layout, input_layout, output_layout
from perfmodel.parallel.per_operator.plan import Held, NetworkPlan
from perfmodel.workload.graph import Graph, Operator, Pass, TensorRole

NO_FUNCTIONS: Mapping[str, NetworkFunction] = MappingProxyType({})


def one_process(network: Graph, plan: NetworkPlan) -> NetworkPlan:
    """The plan in which nothing is cut."""
    held = {tensor: Held(cuts=((),) * len(network.tensors[tensor].shape)) for tensor in plan.held}
    return replace(plan, axes=(), shardings={operator.name: {} for operator in network.operators}, held=held)


def index_limit(network: Graph, tensor: str) -> int:
    """Indices of a tensor lie below this: the rows of the smallest table that it names, or the classes of the loss."""
    limits = []
    for index, position in network.readers().get(tensor, []):
        operator = network.operators[index]
        named = operator.settings.get("over", "") if position else operator.inputs[1].dims[0] if len(operator.inputs) > 1 else ""
        limits.append(operator.dims[str(named)] if named else 2)
    return min(limits, default=2)


def make_tensor(network: Graph, name: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that no operator makes, at full size, drawn by its name: weights about as large as keep activations near one."""
    tensor = network.tensors[name]
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    if tensor.role is TensorRole.INDEX:
        return torch.randint(index_limit(network, name), tensor.shape, generator=generator)
    values = torch.randn(tensor.shape, generator=generator)
    if tensor.role is TensorRole.PARAMETER:
        if len(tensor.shape) > 1:
            values /= sqrt(prod(tensor.shape[1:]))
        else:
            values = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    return values.to(dtype)


class NetworkProgram:
    """One rank's part of the training step. `network` must be the one that the plan is for.

    functions   kind -> torch function, besides `FUNCTIONS` and before them
    imitate     shardings that one process is compared with (`OperatorContext.imitate`)
    """

    def __init__(
        self,
        worker: Worker,
        network: Graph,
        plan: NetworkPlan,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        learning_rate: float = 0.0,
        functions: Mapping[str, NetworkFunction] = NO_FUNCTIONS,
        imitate: NetworkPlan | None = None,
        uses_dtensor: bool = True,
    ) -> None:
        check_runnable(network, plan, functions)
        self.worker, self.plan, self.given = worker, plan, network
        self.network = padded_network(network, plan)
        self.mesh = NetworkMesh(worker, plan.axes, uses_dtensor=uses_dtensor)
        self.learning_rate = learning_rate
        self.dtype = dtype
        known = {**FUNCTIONS, **functions}
        self.calls: list[NetworkFunction] = []
        self.contexts: list[OperatorContext] = []
        for operator, original in zip(self.network.operators, network.operators, strict=True):
            copied = {} if imitate is None else {dim: imitate.size(tuple(axes)) for dim, axes in imitate.shardings[operator.name].items()}
            self.calls.append(known[operator.kind])
            self.contexts.append(OperatorContext(self.mesh, operator, plan.shardings[operator.name], dict(original.dims), copied))
        self.producers, self.readers = self.network.producers(), self.network.readers()
        self.outputs = [op.output.tensor for op in self.network.operators if op.output.tensor not in self.readers]
        layouts = parameter_layouts(self.network, plan)
        self.layouts = {name: layout.resolved() for name, layout in layouts.items()}
        self.partial = {name: layout.partial for name, layout in layouts.items()}
        self.parameters: dict[str, torch.Tensor] = {}
        self._fill(seed)
        self._compile()

    # ------------------------------------------------------------------------------------------------ parameters and data

    def _whole(self, name: str, seed: int) -> torch.Tensor:
        """At full size, padded with zeros."""
        whole = make_tensor(self.given, name, seed, self.dtype)
        padding = [extra for old, new in zip(whole.shape, self.network.tensors[name].shape, strict=True) for extra in (new - old, 0)]
        return torch.nn.functional.pad(whole, padding[::-1]) if any(padding) else whole

    def _fill(self, seed: int) -> None:
        self.inputs: dict[tuple[str, Layout], torch.Tensor] = {}
        for name, tensor in self.network.tensors.items():
            if name in self.producers or name not in self.readers:
                continue
            self.worker.beat(f"making {name}")
            whole = self._whole(name, seed)
            if tensor.role is TensorRole.PARAMETER:
                local = local_part(whole, self.layouts[name], self.mesh).clone().to(self.worker.device)
                self.parameters[name] = local.requires_grad_()
                continue
            for index, position in self.readers[name]:
                operator = self.network.operators[index]
                layout = input_layout(self.plan.shardings[operator.name], operator.inputs[position])
                if (name, layout) not in self.inputs:
                    self.inputs[name, layout] = local_part(whole, layout, self.mesh).clone().to(self.worker.device)

    # ------------------------------------------------------------------------------------------------------------ edges

    def _compile(self) -> None:
        """What each input of each operator takes, and what becomes of each output before it is read."""
        self.edges: list[list[Transition | torch.Tensor]] = []
        self.shared: dict[str, Transition] = {}
        last_reader = {tensor: reading[-1][0] for tensor, reading in self.readers.items() if tensor in self.producers}
        self.dead: list[list[str]] = [[] for _ in self.network.operators]
        for tensor, index in last_reader.items():
            self.dead[index].append(tensor)
        for operator in self.network.operators:
            self.worker.beat(f"preparing {operator.name}")
            self.edges.append([self._edge(operator, position) for position in range(len(operator.inputs))])
            tensor = operator.output.tensor
            if tensor in self.plan.held and tensor in self.readers:
                held, left = self.plan.held[tensor], output_layout(operator, self.plan.shardings[operator.name])
                self.shared[tensor] = Transition(
                    self._redistribution(left, held.layout, tensor, operator.name, Pass.FORWARD),
                    self._redistribution(held.gradient, left.resolved(), tensor, operator.name, Pass.BACKWARD),
                )

    def _redistribution(self, source: Layout, target: Layout, tensor: str, operator: str, phase: Pass) -> Redistribution:
        shape = self.network.tensors[tensor].shape
        return Redistribution(source, target, shape, self.mesh, Purpose(phase, tensor, operator, "edge"))

    def _edge(self, operator: Operator, position: int) -> Transition | torch.Tensor:
        operand = operator.inputs[position]
        tensor, sharding = operand.tensor, self.plan.shardings[operator.name]
        needed, gradient = input_layout(sharding, operand), gradient_layout(sharding, operand)
        if tensor in self.parameters:
            same = self._redistribution(needed, needed, tensor, operator.name, Pass.FORWARD)
            return Transition(same, same, self.mesh.size(self.partial[tensor] - gradient.partial))
        if tensor not in self.producers:
            return self.inputs[tensor, needed]
        if tensor in self.plan.held:
            held = self.plan.held[tensor]
            source, goal = held.layout, Layout(cuts=held.cuts, partial=held.partial & gradient.partial)
            ways = self.mesh.size(held.partial - gradient.partial)
        else:
            producer = self.network.operators[self.producers[tensor]]
            source = output_layout(producer, self.plan.shardings[producer.name])
            goal, ways = source.resolved(), 1
        return Transition(
            self._redistribution(source, needed, tensor, operator.name, Pass.FORWARD),
            self._redistribution(gradient, goal, tensor, operator.name, Pass.BACKWARD),
            ways,
        )

    # ------------------------------------------------------------------------------------------------------------- steps

    def forward(self, *, keep: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """What nobody reads, as it is left here; `keep` gets every operator's output."""
        values: dict[str, torch.Tensor] = {}
        for index, operator in enumerate(self.network.operators):
            self.worker.beat(operator.name)
            given = []
            for operand, edge in zip(operator.inputs, self.edges[index], strict=True):
                if isinstance(edge, torch.Tensor):
                    given.append(edge)
                else:
                    given.append(edge(self.parameters[operand.tensor] if operand.tensor in self.parameters else values[operand.tensor]))
            for tensor in self.dead[index]:
                del values[tensor]
            tensor = operator.output.tensor
            try:
                values[tensor] = self.calls[index](given, self.contexts[index])
            except RuntimeError as error:
                raise type(error)(f"operator {operator.name} ({operator.kind}): {error}") from error
            if keep is not None:
                keep[tensor] = values[tensor].detach()
            if tensor in self.shared:
                values[tensor] = self.shared[tensor](values[tensor])
        return values

    def forward_backward(self) -> torch.Tensor:
        """The local share of the loss; gradients of the parameters are complete."""
        outputs = self.forward()
        self.worker.beat("backward")
        shares = [tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor for tensor in outputs.values()]
        counts = [self.given.tensors[name].num_elements for name in outputs]
        loss = torch.stack([share.sum() / count for share, count in zip(shares, counts, strict=True)]).sum()
        loss.backward()
        self._reduce_gradients()
        with torch.no_grad():
            copies = [self.mesh.num_ranks / self.mesh.size(self._left(name).cut_axes | self._left(name).partial) for name in outputs]
            return sum(
                (share.sum() / (count * ways) for share, count, ways in zip(shares, counts, copies, strict=True)), loss.new_zeros(())
            )

    def _left(self, tensor: str) -> Layout:
        operator = self.network.operators[self.producers[tensor]]
        return output_layout(operator, self.plan.shardings[operator.name])

    def _reduce_gradients(self) -> None:
        """All at once: the ranks meet once, not for each. In place, but where two parameters have one tensor as their gradient (both biases
        of a sum, a sample a rank)."""
        seen: set[int] = set()
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if (where := parameter.grad.untyped_storage().data_ptr()) in seen:
                parameter.grad = parameter.grad.clone()
            seen.add(where)
        under_way = []
        for name, parameter in self.parameters.items():
            if self.mesh.size(self.partial[name]) > 1 and parameter.grad is not None:
                reader = self.network.operators[self.readers[name][0][0]].name
                purpose = Purpose(Pass.BACKWARD, name, reader, "gradient")
                parameter.grad = parameter.grad.contiguous()
                under_way.append(begin_all_reduce(self.mesh, parameter.grad, self.partial[name], purpose))
        for work in under_way:
            work.wait()

    @torch.no_grad()
    def update(self) -> None:
        """Plain gradient descent."""
        for parameter in self.parameters.values():
            if self.learning_rate and parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self.learning_rate)

    def step(self) -> torch.Tensor:
        """One training step; the local share of its loss (the sum over ranks is the loss)."""
        for parameter in self.parameters.values():
            parameter.grad = None
        share = self.forward_backward()
        self.update()
        return share

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the last step, each in the layout of its parameter."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def release(self) -> None:
        """Free what lives between steps besides parameters and data."""
        for parameter in self.parameters.values():
            parameter.grad = None
