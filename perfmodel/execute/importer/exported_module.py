"""A module as an exported program: the values that its operators read, the views between them, and the nodes of each vertex."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from perfmodel.execute.local import tensors_in
from perfmodel.workload.imported.graph import ImportedGraph
from perfmodel.workload.imported.views import Position

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node


@dataclass(frozen=True, slots=True)
class ViewStep:
    """Output `number` of a view node, with the resulting view. `function`: torch name without namespace."""

    node: Node
    function: str
    number: int
    view: tuple[Position, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedValue:
    """A tensor of the exported graph: a vertex output under a view, or a parameter or buffer (`vertex` is None).

    The dims of the view are the positions of that output or parameter, as strings.

    path     views from that output, parameter or buffer to this value
    stored   placeholder of a parameter or buffer
    """

    view: tuple[Position, ...]
    vertex: int | None = None
    output: int = 0
    parameter: str = ""
    is_whole: bool = True
    path: tuple[ViewStep, ...] = ()
    stored: Node | None = None

    def seen(self, node: Node, function: str, view: tuple[Position, ...], number: int = 0) -> ExportedValue:
        """Return the value under one more view."""
        return replace(self, view=view, is_whole=False, path=(*self.path, ViewStep(node, function, number, view)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexCalls:
    """Nodes that a vertex represents.

    nodes   in order, each with the input number for each of its arguments; other arguments are the previous node
    reads   values of the vertex's inputs
    """

    nodes: tuple[tuple[Node, Mapping[Node, int]], ...]
    reads: tuple[ExportedValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModule:
    """A module as an imported graph, with the underlying torch operators.

    calls       torch nodes of each vertex
    outputs     outputs of forward in program order; None for an output that is not a tensor
    canonical   first name of each parameter
    num_shares  sizes that depend on values, replaced by even shares
    """

    graph: ImportedGraph
    program: ExportedProgram
    calls: tuple[VertexCalls, ...]
    outputs: tuple[ExportedValue | None, ...]
    canonical: Mapping[str, str]
    num_shares: int


def operator_name(node: Node) -> str:
    """Return the name of a node's operator without namespace and overload; "" for what is no operator of torch."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name.rpartition("::")[2])


def arguments_of(node: Node) -> dict[str, Any]:
    """Return every argument by its schema name, defaults included. A list of tensors becomes `name.0`, `name.1`, ..."""
    bindings: dict[str, Any] = {}
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        has_default = argument.has_default_value()
        value = (
            node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value if has_default else None)
        )
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.fx.Node) for item in value):
            bindings |= {f"{argument.name}.{index}": item for index, item in enumerate(value)}
        else:
            bindings[argument.name] = value
    return bindings


def torch_flops(node: Node, mode: FakeTensorMode) -> float:
    """Return torch's FLOP count of a node; 0 if it cannot be run by itself. mode: for a node without tensors."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    with suppress(Exception):
        # The values carry the fake mode of the export, which differs from the current one.
        modes = [tensor.fake_mode for tensor in tensors_in(args) if hasattr(tensor, "fake_mode")]
        with modes[0] if modes else mode, FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)
        return float(counter.get_total_flops())
    return 0.0
