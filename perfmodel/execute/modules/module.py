"""A user's module for execution: exported program, planned network, weights and data."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from perfmodel.execute.importer.exported_module import ExportedModule, ExportedValue, arguments_of
from perfmodel.execute.importer.import_graph import export_module, find_factory
from perfmodel.execute.modules.calls import FurtherOutput, ModuleOperator
from perfmodel.execute.modules.views import Grouping, viewed
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.functions import NetworkFunction
from perfmodel.execute.per_operator.mesh import NetworkMesh
from perfmodel.foundation.errors import bad_field
from perfmodel.workload.graph import Graph, Operator, TensorRole
from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.input_spec import InputSpec, parse_inputs
from perfmodel.workload.imported.network import Computed, ImportedNetwork, network_of, synchronised


@dataclass(slots=True, eq=False)
class UserModule:
    """`module` with its weights, exported and converted to a network.

    drops   dropout is active; otherwise disabled, so that gradients can be compared
    """

    module: nn.Module
    exported: ExportedModule
    imported: ImportedNetwork
    specs: tuple[InputSpec, ...]
    drops: bool = False
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    generators: dict[tuple[int, ...], torch.Generator] = field(default_factory=dict)

    @classmethod
    def named(cls, reference: str, inputs: Sequence[str], *, seed: int = 0) -> UserModule:
        """Build the module that `package.module:factory` returns, with random weights from the seed."""
        make = find_factory(reference)
        specs = parse_inputs(inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make()
        return cls.of(module, specs, name=reference)

    @classmethod
    def read(cls, reference: str, inputs: Sequence[str]) -> UserModule:
        """Build the module without weights, which suffices to check a plan."""
        specs = parse_inputs(inputs)
        exported = export_module(find_factory(reference), specs, name=reference)
        return cls(nn.Module(), exported, synchronised(network_of(exported.graph)), specs)

    @classmethod
    def of(cls, module: nn.Module, specs: Sequence[InputSpec], *, name: str, drops: bool = False) -> UserModule:
        exported = export_module(lambda: module, specs, name=name)
        user = cls(module, exported, synchronised(network_of(exported.graph)), tuple(specs), drops)
        for parameter, value in user._parameter_reads():
            if parameter not in user.parameters:
                user.parameters[parameter] = user._read_part(module.get_parameter(value.parameter).detach(), parameter, value)
        for index, vertex in enumerate(user.imported.graph.vertices):
            tensor = user.imported.tensor(index, 0) if vertex.outputs else ""
            if vertex.kind is ImportedKind.INPUT and vertex.outputs:
                named = [position for position, spec in enumerate(specs) if spec.name == vertex.name]
                user.inputs[tensor] = named[0] if named else len(user.inputs)
            elif vertex.kind is ImportedKind.CONSTANT:
                node = exported.calls[index].nodes[0][0]
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, node.kwargs), lambda argument: torch.empty(argument.meta["val"].shape, dtype=argument.meta["val"].dtype)
                )
                user.constants[tensor] = node.target(*args, **kwargs).reshape(user.network.tensors[tensor].shape)
        return user

    @property
    def network(self) -> Graph:
        return self.imported.network

    # ---------------------------------------------------------------------------------------------------- exported program

    def added(self, vertex: int) -> int:
        """Return the input of a vertex that is added to its product as a separate operator; -1 for none."""
        from perfmodel.workload.imported.kinds import added_input

        return added_input(self.imported.graph.vertices[vertex])

    def arguments(self, vertex: int) -> Mapping[str, Any]:
        """Return the arguments of a vertex's last node by their schema names; nodes represent tensors."""
        return arguments_of(self.exported.calls[vertex].nodes[-1][0])

    def grouping(self, vertex: int, output: int) -> Grouping:
        return self.imported.pieces.of_output(vertex, output)

    def further_outputs(self, vertex: int) -> Iterator[int]:
        for number in range(1, len(self.imported.graph.vertices[vertex].outputs)):
            if self.imported.tensor(vertex, number) in self.network.tensors:
                yield number

    def stored(self, value: ExportedValue) -> torch.Tensor:
        """Return a buffer or an unsharded parameter, or the part of it that `value` views."""
        assert value.stored is not None
        signature = self.exported.program.graph_signature
        name = value.stored.name
        if name in signature.inputs_to_parameters:
            tensor = self.module.get_parameter(self.exported.canonical[signature.inputs_to_parameters[name]])
        elif name in signature.inputs_to_buffers:
            tensor = self.module.get_buffer(signature.inputs_to_buffers[name])
        else:
            tensor = self.exported.program.constants[signature.inputs_to_lifted_tensor_constants[name]]
        return viewed(tensor, value, [[None]] * tensor.dim())

    # ------------------------------------------------------------------------------------------------------------- values

    def _parameter_reads(self) -> Iterator[tuple[str, ExportedValue]]:
        """Yield the parameters (or parts of one) that operators read, in the order of the operators."""
        for vertex, calls in zip(self.imported.graph.vertices, self.exported.calls, strict=True):
            for operand, value in zip(vertex.inputs, calls.reads, strict=True):
                if operand.parameter:
                    yield operand.parameter, value

    def _read_part(self, tensor: torch.Tensor, name: str, value: ExportedValue) -> torch.Tensor:
        """Return a parameter (or its gradient), or the part of one that an operator reads, in the network's shape."""
        part = tensor if name == value.parameter else tensor.reshape(-1)[self.part(name, value)]
        return part.reshape(self.network.tensors[name].shape)

    def part(self, name: str, value: ExportedValue) -> torch.Tensor:
        """Return the flat indices of a parameter's entries that belong to a part of it."""
        parameter = self.module.get_parameter(value.parameter)
        entries = torch.arange(parameter.numel()).view(parameter.shape)
        return viewed(entries, value, [[None]] * parameter.dim()).flatten().sort().values

    def draw(self, name: str, seed: int, dtype: torch.dtype, microbatch: int) -> torch.Tensor:
        """Return a tensor that no operator computes, at full size: a weight, a constant, or data seeded by its name."""
        shape = self.network.tensors[name].shape
        if name in self.parameters:
            value = self.parameters[name]
        elif name in self.constants:
            value = self.constants[name]
        else:
            spec = self.specs[self.inputs[name]]
            value = self.data(spec, name, seed, microbatch).reshape(shape)
        return value.to(dtype) if value.dtype.is_floating_point else value

    def data(self, spec: InputSpec, name: str, seed: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(f"{name} of microbatch {microbatch}".encode()))
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(spec.shape, generator=generator).to(dtype)
        # upper bound: rows of a table or number of classes; 0 if the integers index nothing
        graph = self.imported.graph
        reached = {index for index, vertex in enumerate(graph.vertices) if vertex.outputs and self.imported.tensor(index, 0) == name}
        limits: list[int] = []
        for index, vertex in enumerate(graph.vertices):
            numbers = [number for number, operand in enumerate(vertex.inputs) if operand.producer and operand.producer[0] in reached]
            for number in numbers:
                if "v" in vertex.dims and vertex.kind in (ImportedKind.EMBEDDING, ImportedKind.CROSS_ENTROPY):
                    limits.append(vertex.dims["v"])
                elif (vertex.function == "gather" and number == 1) or (vertex.function == "index" and number > 0):
                    limits.append(min(vertex.inputs[0].shape))
                elif vertex.outputs and vertex.outputs[0].is_index:
                    reached.add(index)
        limit = min(limits, default=0)
        return torch.randint(limit, spec.shape, generator=generator).to(dtype) if limit else torch.ones(spec.shape, dtype=dtype)

    # -------------------------------------------------------------------------------------------------------------- runs

    def functions(self, network: Graph) -> dict[str, NetworkFunction]:
        """Return the function of each operator of the network, by name; `network`: with padded sizes."""
        further: dict[tuple[int, int], torch.Tensor] = {}
        functions: dict[str, NetworkFunction] = {}
        for operator in network.operators:
            source, shape = self.imported.sources[operator.name], network.tensors[operator.output.tensor].shape
            if source.computed is Computed.FURTHER:
                node = self.exported.calls[source.vertex].nodes[-1][0]
                dtype = [value for value in node.meta["val"] if isinstance(value, torch.Tensor)][source.number].dtype
                functions[operator.name] = FurtherOutput(source, shape, dtype, further)
            else:
                functions[operator.name] = ModuleOperator(self, operator, source, shape, further)
        return functions

    def known_operators(self) -> list[Operator]:
        """Return the operators on data and constants alone, without gradient: every rank computes them in full."""
        tensors, producers = self.network.tensors, self.network.producers()
        known: dict[str, Operator] = {}
        for operator in self.network.operators:
            reads = [operand.tensor for operand in operator.inputs]
            is_known = all(tensors[tensor].role is TensorRole.INDEX and (tensor in known or tensor not in producers) for tensor in reads)
            if is_known and tensors[operator.output.tensor].role is TensorRole.INDEX:
                known[operator.output.tensor] = operator
        return list(known.values())

    def known_inputs(self) -> list[str]:
        """Return the inputs of `known_operators` that no operator computes."""
        operators, producers = self.known_operators(), self.network.producers()
        reads = (operand.tensor for operator in operators for operand in operator.inputs)
        return list(dict.fromkeys(tensor for tensor in reads if tensor not in producers))

    def known(self, given: Mapping[str, torch.Tensor], mesh: NetworkMesh) -> dict[str, torch.Tensor]:
        """Return the outputs of `known_operators`, from unsharded tensors."""
        functions, values = self.functions(self.network), dict(given)
        operators = self.known_operators()
        for operator in operators:
            context = OperatorContext(mesh, operator, {}, dict(operator.dims))
            values[operator.output.tensor] = functions[operator.name]([values[operand.tensor] for operand in operator.inputs], context)
        return {operator.output.tensor: values[operator.output.tensor] for operator in operators}

    def kept_entries(self, x: torch.Tensor, p: float, context: OperatorContext) -> torch.Tensor:
        """Return the dropout factors of `x`: 0 with probability p, else 1 / (1 - p). Replicas of a shard get the same factors."""
        part = tuple(context.index(dim) for dim in context.operator.output.dims if dim)
        if part not in self.generators:
            self.generators[part] = torch.Generator(x.device).manual_seed(zlib.crc32(repr((self.seed, part)).encode()))
        return torch.empty_like(x).bernoulli_(1.0 - p, generator=self.generators[part]) / (1.0 - p)

    def outputs(self) -> list[str]:
        """Return the tensors of the network that forward returns and that depend on weights."""
        names = []
        for number, value in enumerate(self.exported.outputs):
            if value is None or value.vertex is None:
                continue
            name = self.imported.tensor(value.vertex, value.output)
            tensor = self.network.tensors[name]
            if name in self.network.producers() and self.imported.gradient[name]:
                if prod(run.size for position in value.view for run in position if run.dim) != tensor.num_elements:
                    rule = "is a broadcast or a part of a tensor"
                    raise bad_field("network", f"output {number + 1} of {self.network.name}", rule, "return the tensor itself")
                names.append(name)
        return list(dict.fromkeys(names))

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter requires a gradient."""
        return self.module.get_parameter(name.partition("[")[0]).requires_grad

    def loss_weight(self, name: str, seed: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return fixed random weights: the loss is their dot product with an output. A plain mean may be independent of earlier layers."""
        if prod(shape) == 1:
            return torch.ones(tuple(shape), dtype=dtype)
        generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(f"loss of {name}".encode()))
        return torch.randn(tuple(shape), generator=generator).to(dtype)

    def unsharded_step(self, seed: int, num_microbatches: int, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
        """Return loss and gradients of the module itself, by the names and in the shapes of the network's parameters."""
        names = self.outputs()
        places = {
            self.imported.tensor(value.vertex, value.output): index
            for index, value in enumerate(self.exported.outputs)
            if value is not None and value.vertex is not None
        }
        total = 0.0
        for parameter in self.module.parameters():
            parameter.grad = None
        for microbatch in range(num_microbatches):
            drawn = {index: self.data(self.specs[index], name, seed, microbatch) for name, index in self.inputs.items()}
            data = [drawn[index] for index in range(len(self.specs))]
            positional = [tensor for tensor, spec in zip(data, self.specs, strict=True) if not spec.name]
            named = {spec.name: tensor for tensor, spec in zip(data, self.specs, strict=True) if spec.name}
            with without_dropout():
                flat, _ = torch.utils._pytree.tree_flatten(self.module(*positional, **named))
            loss = torch.zeros((), dtype=torch.float64)
            for name in names:
                output = flat[places[name]]
                shape = self.network.tensors[name].shape
                weight = self.loss_weight(name, seed, dtype, shape)
                loss = loss + (self.in_network_shape(output, name, places[name]) * weight).double().sum() / (prod(shape) * num_microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        gradients = {}
        for name, value in self._parameter_reads():
            parameter = self.module.get_parameter(value.parameter)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = self._read_part(gradient, name, value)
        return total, gradients

    def in_network_shape(self, output: torch.Tensor, name: str, index: int) -> torch.Tensor:
        """Return an output of forward in the network's shape, with its views undone."""
        value = self.exported.outputs[index]
        assert value is not None
        assert value.vertex is not None
        shape = self.network.tensors[name].shape
        if not value.path:
            return output.reshape(shape)
        entries = viewed(torch.arange(prod(shape)).view(shape), value, self.grouping(value.vertex, value.output)).flatten()
        return output.flatten()[entries.argsort()].reshape(shape)


#: Position of the dropout probability among the arguments of torch's functions.
_DROPOUT_PLACES = {"multi_head_attention_forward": 10, "lstm": 5, "gru": 5, "rnn_tanh": 5, "rnn_relu": 5}


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").removesuffix("_")
        if name in ("dropout", "feature_dropout", "alpha_dropout"):
            return args[0]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        position = _DROPOUT_PLACES.get(name, len(args))
        if position < len(args):
            args = (*args[:position], 0.0, *args[position + 1 :])
        return func(*args, **kwargs)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Disable dropout."""
    with _WithoutDropout():
        yield
