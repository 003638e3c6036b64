"""Conversion of an exported program to an `ImportedGraph`: walk over the nodes, follow views, recognise operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from perfmodel.execute.importer.attention_mask import Masks
from perfmodel.execute.importer.exported_module import (
    ExportedModule,
    ExportedValue,
    VertexCalls,
    arguments_of,
    operator_name,
    torch_flops,
)
from perfmodel.execute.importer.node_views import node_view
from perfmodel.execute.importer.value_sizes import EVEN_SHARE
from perfmodel.execute.local import num_bytes, tensors_in
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.session import session_cache
from perfmodel.workload.imported.aten_rules import operand_dims, recognise
from perfmodel.workload.imported.graph import (
    DimLink,
    ImportedGraph,
    ImportedKind,
    ImportedOperand,
    ImportedParameter,
    ImportedVertex,
    SeenKeys,
    Shape,
)
from perfmodel.workload.imported.iteration_space import Call, IterationSpace, sizes_of
from perfmodel.workload.imported.views import Position, expanded, identity_view, lost, reshaped

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

#: Namespaces of operators whose names have a known meaning; another library may use the same name for something else.
_NAMESPACES = ("aten", "perfmodel")


def read_program(module: nn.Module, program: ExportedProgram, mode: FakeTensorMode, *, name: str) -> ExportedModule:
    """Convert `program`, the result of torch.export for `module` under `mode`."""
    num_shares = sum(EVEN_SHARE in node.meta for node in program.graph.nodes)
    shares = f"; {num_shares} sizes that only values tell are even shares" if num_shares else ""
    reader = _Reader(module, program, mode)
    graph = reader.read(name)
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]
    return ExportedModule(
        graph=replace(graph, source=graph.source + shares),
        program=program,
        calls=tuple(reader.calls),
        outputs=tuple(reader.values[node][0] if node in reader.values else None for node in outputs),
        canonical=reader.canonical,
        num_shares=num_shares,
    )


class _Reader:
    """Reader that walks the nodes once. `values`: one value per output of each node; `calls`: nodes of each vertex."""

    def __init__(self, module: nn.Module, program: ExportedProgram, mode: FakeTensorMode) -> None:
        self.program, self.mode, self.masks = program, mode, Masks()
        self.vertices: list[ImportedVertex] = []
        self.calls: list[VertexCalls] = []
        self.values: dict[Any, list[ExportedValue]] = {}
        first_name: dict[int, str] = {}
        self.canonical = {path: first_name.setdefault(id(tensor), path) for path, tensor in module.named_parameters(remove_duplicate=False)}
        self.parameters = tuple(
            ImportedParameter(name=path, shape=_shape(tensor), itemsize=tensor.element_size()) for path, tensor in module.named_parameters()
        )
        self.buffer_bytes = num_bytes(module.buffers())

    def read(self, name: str) -> ImportedGraph:
        signature = self.program.graph_signature  # its mappings are built at each access
        parameters, stored = signature.inputs_to_parameters, {*signature.inputs_to_buffers, *signature.inputs_to_lifted_tensor_constants}
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function":
                self._call(node)
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            shape = _shape(value)
            parameter = parameters.get(node.name)
            if parameter is not None:
                parameter = self.canonical.get(parameter, parameter)
                self.values[node] = [ExportedValue(view=_by_position(shape), parameter=parameter, stored=node)]
            elif node.name in stored:
                self.values[node] = [ExportedValue(view=lost(shape), stored=node)]
            else:
                names = tuple(chr(ord("a") + index) for index in range(len(shape)))
                space = IterationSpace(kind=ImportedKind.INPUT, dims=sizes_of(names, shape), reads={}, writes=(names,), is_view=True)
                self._vertex(node, "input", space, {}, [value])
        return ImportedGraph(
            name=name,
            source=f"torch {torch.__version__}, torch.export under fake tensors, one forward pass",
            vertices=tuple(self.vertices),
            parameters=self.parameters,
            buffer_bytes=self.buffer_bytes,
        )

    def _call(self, node: Node) -> None:
        target = node.target
        if target is operator.getitem:
            source = self.values.get(node.args[0])
            if source is not None and node.args[1] < len(source):
                self.values[node] = [source[node.args[1]]]
            return
        results = list(tensors_in(node.meta.get("val")))
        if not results:
            return  # for example assertions
        schema = getattr(target, "_schema", None)
        if schema is None:
            self._unknown(node, str(getattr(target, "__name__", target)), results)
            return
        namespace, _, name = schema.name.partition("::")
        arguments = arguments_of(node)
        sources = {key: argument for key, argument in arguments.items() if isinstance(argument, torch.fx.Node)}
        if name.endswith("_") and "self" in sources and self._is_stored(sources["self"]):
            return  # bookkeeping of the module, such as the number of batches seen
        if namespace in _NAMESPACES and self._view(node, name, arguments, results):
            return
        call = Call(
            name=name,
            tensors={key: _shape(node.meta["val"]) for key, node in sources.items() if isinstance(node.meta.get("val"), torch.Tensor)},
            values={key: value for key, value in arguments.items() if not isinstance(value, torch.fx.Node)},
            outputs=tuple(_shape(result) for result in results),
            is_pointwise=torch.Tag.pointwise in target.tags,
        )
        views = self._unflattened(call, sources) if name == "linear" else {}
        if views:
            rows = _sizes_of(views["input"])
            call = replace(call, tensors={**call.tensors, "input": rows}, outputs=((*rows[:-1], call.outputs[0][-1]),))
        space = recognise(call) if namespace in _NAMESPACES else None
        if space is None:
            self._unknown(node, str(target), results, sources)
            return
        if space.is_view and all(self._is_stored(source) for source in sources.values()):
            (source,) = sources.values()  # a slice of a parameter counts as that parameter for all readers
            stored = self.values[source][0]
            axis = int(arguments.get("dim") or 0) % len(stored.view)
            self.values[node] = [
                stored.seen(node, name, _part(stored.view, axis, _shape(result)), number) for number, result in enumerate(results)
            ]
            return
        self._vertex(node, str(target), space, sources, results, arguments=arguments, views=views)
        if name.endswith("_") and "self" in sources:
            self.values[sources["self"]] = self.values[node]  # later readers of the old tensor see the new one

    def _unflattened(self, call: Call, sources: Mapping[str, Any]) -> dict[str, tuple[Position, ...]]:
        """Return the flattened rows of a linear layer as separate dims, so that any of them can be sharded, not only the outermost."""
        values = self.values.get(sources["input"], [])
        runs = [run for position in values[0].view[:-1] for run in position] if values and len(call.tensors["input"]) > 1 else []
        is_product = any(len(position) > 1 for position in values[0].view[:-1]) if runs else False
        if not is_product or not all(run.dim for run in runs):
            return {}
        return {"input": (*((run,) for run in runs), values[0].view[-1])}

    def _is_stored(self, node: Node) -> bool:
        values = self.values.get(node, [])
        return bool(values) and values[0].vertex is None

    def _view(self, node: Node, name: str, arguments: Mapping[str, Any], results: Sequence[torch.Tensor]) -> bool:
        """Record a reshape, permutation or expansion as a view of the same value. Return False for other operators, such as dtype casts."""
        first = next(iter(arguments.values()), None)
        if not isinstance(first, torch.fx.Node) or first not in self.values:
            return False
        if name == "broadcast_tensors" and all(isinstance(item, torch.fx.Node) and item in self.values for item in arguments.values()):
            pairs = zip((self.values[item][0] for item in arguments.values()), results, strict=True)
            self.values[node] = [value.seen(node, "expand", expanded(value.view, _shape(result))) for value, result in pairs]
            return True
        value = self.values[first][0]
        keeps_dtype = first.meta["val"].dtype == results[0].dtype
        view = node_view(name, value.view, arguments, _shape(results[0]), keeps_dtype=keeps_dtype)
        if view is not None:
            self.values[node] = [value.seen(node, name, view)]
        return view is not None

    def _inputs(
        self,
        space: IterationSpace,
        sources: Mapping[str, Any],
        *,
        first: int = 0,
        views: Mapping[str, tuple[Position, ...]] = MappingProxyType({}),
    ) -> tuple[list[ImportedOperand], dict[Node, int], list[ExportedValue]]:
        operands: list[ImportedOperand] = []
        bound: dict[Node, int] = {}
        reads: list[ExportedValue] = []
        for key, source in sources.items():
            tensors = list(tensors_in(source.meta.get("val")))
            for tensor, value in zip(tensors[:1], self.values.get(source, [])[:1], strict=False):
                view = views.get(key, value.view)
                shape = _sizes_of(view) if key in views else _shape(tensor)
                dims = operand_dims(space, key, shape)
                produced = () if value.vertex is None else self.vertices[value.vertex].outputs[value.output].dims
                bound[source] = first + len(operands)
                reads.append(replace(value, view=view))
                operands.append(
                    ImportedOperand(
                        shape=shape,
                        itemsize=tensor.element_size(),
                        dims=dims,
                        producer=() if value.vertex is None else (value.vertex, value.output),
                        parameter=value.parameter,
                        is_index=_is_index(tensor),
                        links=_links(view, dims, produced) if value.parameter or value.vertex is not None else (),
                    )
                )
        return operands, bound, reads

    def _vertex(
        self,
        node: Node,
        target: str,
        space: IterationSpace,
        sources: Mapping[str, Any],
        results: Sequence[torch.Tensor],
        *,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        views: Mapping[str, tuple[Position, ...]] = MappingProxyType({}),
    ) -> None:
        """Add a vertex. `views`: views of operands whose shape in the iteration space differs from torch's, as does then the output's."""
        is_in_place = operator_name(node).endswith("_") and space.kind is not ImportedKind.UNRECOGNISED
        written = 0.0 if space.is_view or is_in_place else num_bytes(results)
        outputs = tuple(
            ImportedOperand(
                shape=tuple(space.dims[dim] for dim in dims) if views else _shape(result),
                itemsize=result.element_size(),
                dims=dims,
                is_index=_is_index(result),
            )
            for result, dims in zip(results, space.writes, strict=True)
        )
        if space.kind is ImportedKind.ELEMENTWISE and self._join(node, target, space, sources, outputs, written):
            return
        operands, bound, reads = self._inputs(space, sources, views=views)
        seen = SeenKeys()
        if space.kind is ImportedKind.SOFTMAX:
            seen = self.masks.under(node)
        elif space.kind is ImportedKind.ATTENTION:
            seen = self.masks.seen_by(node, arguments)
        vertex = ImportedVertex(
            name=node.name,
            operator=target,
            module=_module_path(node),
            kind=space.kind,
            dims=dict(space.dims),
            inputs=tuple(operands),
            outputs=outputs,
            flops=space.flops,
            activation_bytes=written,
            reduced=space.reduced,
            unsplit=space.unsplit,
            seen=seen,
        )
        self.vertices.append(vertex)
        self.calls.append(VertexCalls(nodes=((node, bound),), reads=tuple(reads)))
        self.values[node] = _output_values(vertex, len(self.vertices) - 1)
        if views:
            output = self.values[node][0]
            self.values[node] = [output.seen(node, "reshape", reshaped(output.view, _shape(results[0])))]

    def _join(
        self,
        node: Node,
        target: str,
        space: IterationSpace,
        sources: Mapping[str, Any],
        outputs: tuple[ImportedOperand, ...],
        written: float,
    ) -> bool:
        """Fuse an elementwise operator into the elementwise vertex before it if that vertex has no other reader."""
        last = len(self.vertices) - 1
        if not self.vertices or self.vertices[last].kind is not ImportedKind.ELEMENTWISE or len(outputs) != 1:
            return False
        chain, calls = self.vertices[last], self.calls[last]
        inner = {
            key: source
            for key, source in sources.items()
            if [(value.vertex, value.is_whole) for value in self.values.get(source, [])] == [(last, True)]
        }
        if not inner or any(len(source.users) > 1 for source in inner.values()) or chain.outputs[0].shape != outputs[0].shape:
            return False
        if dict(space.dims) != dict(chain.dims) or len(chain.outputs) != 1:
            return False
        others = {key: source for key, source in sources.items() if key not in inner}
        operands, bound, reads = self._inputs(space, others, first=len(chain.inputs))
        if any(operand.producer and operand.producer[0] >= last for operand in operands):
            return False
        joined = replace(
            chain,
            name=node.name,
            operator=target,
            module=_module_path(node),
            inputs=(*chain.inputs, *operands),
            outputs=outputs,
            flops=chain.flops + space.flops,
            activation_bytes=chain.activation_bytes + written,
            chain=chain.chain + 1,
            joined=(*chain.joined, chain.operator),
        )
        self.vertices[last] = joined
        self.calls[last] = VertexCalls(nodes=(*calls.nodes, (node, bound)), reads=(*calls.reads, *reads))
        self.values[node] = _output_values(joined, last)
        return True

    def _unknown(self, node: Node, target: str, results: Sequence[torch.Tensor], sources: Mapping[str, Any] | None = None) -> None:
        """Add an unrecognised operator: no dims, so every chip computes it in full. Its work is torch's FLOP count."""
        if sources is None:
            sources = {str(index): source for index, source in enumerate(node.all_input_nodes)}
        writes = tuple(("",) * result.ndim for result in results)
        space = IterationSpace(kind=ImportedKind.UNRECOGNISED, dims={}, reads={}, writes=writes, flops=torch_flops(node, self.mode))
        self._vertex(node, target, space, sources, results)


def _output_values(vertex: ImportedVertex, index: int) -> list[ExportedValue]:
    return [ExportedValue(view=_by_position(operand.shape), vertex=index, output=number) for number, operand in enumerate(vertex.outputs)]


@session_cache(maxsize=4096)
def _by_position(shape: Shape) -> tuple[Position, ...]:
    return identity_view(shape, [str(index) for index in range(len(shape))])


def _part(view: Sequence[Position], axis: int, shape: Shape) -> tuple[Position, ...]:
    """Return the view of a slice along one axis, which becomes untracked or is removed; the other positions stay."""
    if len(shape) < len(view):
        return (*view[:axis], *view[axis + 1 :])
    return (*view[:axis], *lost(shape[axis : axis + 1]), *view[axis + 1 :])


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _shape(tensor: torch.Tensor) -> Shape:
    # torch keeps a size that turned out to be constant, such as that of a bincount, as an expression
    sizes = tuple(int(size) if isinstance(size, torch.SymInt) and size.node.expr.is_Integer else size for size in tensor.shape)
    if not all(isinstance(size, int) for size in sizes):
        raise InputError(f"module: a tensor of shape {tuple(map(str, sizes))} depends on values; give the module inputs of fixed shapes")
    return sizes


def _sizes_of(view: Sequence[Position]) -> Shape:
    return tuple(prod(run.size for run in position) for position in view)


@session_cache(maxsize=4096)  # equal layers have equal links
def _links(view: tuple[Position, ...], dims: tuple[str, ...], producer_dims: tuple[str, ...]) -> tuple[DimLink, ...]:
    """Return the links between producer and consumer dims. `producer_dims`: by position of the tensor; empty for a parameter."""
    links = []
    for position, dim in zip(view, dims, strict=True):
        inner = 1
        of_position = []
        for run in reversed(position):
            of_position.append(
                DimLink(
                    producer=producer_dims[int(run.dim)] if run.dim and producer_dims else "",
                    producer_inner=run.inner,
                    consumer=dim,
                    consumer_inner=inner,
                    size=run.size,
                    positions=(int(run.dim),) if run.dim else (),
                )
            )
            inner *= run.size
        links += of_position[::-1]
    return tuple(links)


def _module_path(node: Node) -> str:
    """Return the innermost submodule of the operator, as named by `named_modules`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return re.sub(r"^L\['self'\]\.?|\['|'\]", "", path)
