"""Layers of a list that compute the same: only the first one is traced, and its nodes are copied for the others.

Tracing takes milliseconds for each operator: a loop over 256 experts in 58 layers has 200,000. Two layers compute the same if they have
the same class, shapes and plain attributes, and are called with equal arguments. A number that follows the position in the list, such as
`layer_idx`, may differ if `forward` does not use it. It is watched during the trace: a module that uses one is exported in full.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.fx.graph import _Namespace as Namespace
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from perfmodel.execute.layers.kernel import operator

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

#: Attributes that every module has.
_STANDARD = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class _Watched(int):
    """Number that notes whether it is used."""

    used = False


def _noting(name: str) -> Callable[..., Any]:
    def method(self: _Watched, *args: Any) -> Any:
        self.used = True
        return getattr(int, name)(self, *args)

    return method


for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__rfloordiv__", "__truediv__", "__rtruediv__",
    "__mod__", "__rmod__", "__divmod__", "__pow__", "__rpow__", "__and__", "__rand__", "__or__", "__ror__", "__xor__", "__lshift__",
    "__rshift__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__bool__", "__index__", "__int__", "__float__",
    "__neg__", "__abs__", "__str__", "__repr__", "__format__",
):  # fmt: skip
    setattr(_Watched, _name, _noting(_name))


class _Watching(TorchFunctionMode):
    """Mode that notes watched numbers among the arguments of torch functions, which read them without a method of theirs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, _Watched):
                argument.used = True
        return func(*args, **(kwargs or {}))


def _like(tensors: Sequence[torch.Tensor], *_: object) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


@operator("enter", _like)
def enter(tensors: Sequence[torch.Tensor], path: str) -> list[torch.Tensor]:
    """Mark the inputs of the traced layer `path`."""
    return [tensor.clone() for tensor in tensors]


@operator("leave", _like)
def leave(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Mark the outputs of a traced layer."""
    return [tensor.clone() for tensor in tensors]


@operator("repeat", lambda tensors, like, path: _like(like))
def repeat(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor], path: str) -> list[torch.Tensor]:
    """Stand for the layer `path`, which computes as the traced layer with the outputs `like`."""
    raise NotImplementedError("a traced layer replaces it before a program runs")


# ---------------------------------------------------------------------------------------------------------------------------------
# Export: trace the first layer, mark the others
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Layers that compute the same.

    paths       of the layers; the first one is traced
    positions   (module, attribute) of the first layer whose number follows the position in the list
    arguments   form of the arguments of the traced call; None before it
    result      leaves of its result, with None for a tensor; `indices`: of the tensors among them, `outputs`: these
    """

    layers: list[nn.Module]
    paths: list[str]
    positions: list[tuple[nn.Module, str]]
    arguments: Hashable = None
    result: list[Any] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    spec: TreeSpec | None = None

    def with_outputs(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the result of the traced call with other tensors."""
        leaves = list(self.result)
        for index, tensor in zip(self.indices, outputs, strict=True):
            leaves[index] = tensor
        assert self.spec is not None
        return tree_unflatten(leaves, self.spec)

    def traced(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` of a layer: marked in the first one, a `repeat` in the others."""

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            tensors = [leaves[index] for index in indices]
            form = (spec, tuple((*leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else _value(leaf) for leaf in leaves))
            if path != self.paths[0]:
                is_same = bool(self.outputs) and form == self.arguments
                return self.with_outputs(repeat(tensors, self.outputs, path)) if is_same else forward(*args, **kwargs)
            if self.arguments is not None or not tensors:
                return forward(*args, **kwargs)
            self.arguments = form
            for index, tensor in zip(indices, enter(tensors, path), strict=True):
                leaves[index] = tensor
            args, kwargs = tree_unflatten(leaves, spec)
            with _Watching():
                result, self.spec = tree_flatten(forward(*args, **kwargs))
            self.indices = [index for index, leaf in enumerate(result) if isinstance(leaf, torch.Tensor)]
            self.outputs = leave([result[index] for index in self.indices]) if self.indices else []
            self.result = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in result]
            return self.with_outputs(self.outputs)

        return call


class Repeats:
    """Layers of a module that are traced once."""

    def __init__(self, module: nn.Module) -> None:
        self.groups = list(_groups(module))
        self.watched: list[_Watched] = []

    @property
    def is_exact(self) -> bool:
        """Whether no traced layer used its position."""
        return not any(number.used for number in self.watched)

    @contextmanager
    def traced_once(self) -> Iterator[None]:
        """Replace `forward` of the layers during an export."""
        with ExitStack() as stack:
            for group in self.groups:
                for module, name in group.positions:
                    self.watched.append(_Watched(getattr(module, name)))
                    stack.callback(setattr, module, name, int(self.watched[-1]))
                    setattr(module, name, self.watched[-1])
                for layer, path in zip(group.layers, group.paths, strict=True):
                    stack.enter_context(replaced_forward(layer, group.traced(path, layer.forward)))
            for number in self.watched:
                number.used = False
            yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call `forward` instead of that of the module, with its signature."""
    before = vars(module).get("forward")
    vars(module)["forward"] = functools.wraps(module.forward)(forward)
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


def _groups(module: nn.Module) -> Iterator[_Group]:
    """Yield the layers of lists that compute the same. Lists inside of a list are traced as part of its layers."""
    inside: set[int] = set()
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    shared = {tensor for tensor, number in Counter(id(tensor) for _, tensor in tensors).items() if number > 1}
    for name, layers in module.named_modules():
        if not isinstance(layers, nn.ModuleList) or id(layers) in inside:
            continue
        inside |= {id(child) for child in layers.modules()}
        by_form: dict[Hashable, list[int]] = defaultdict(list)
        for position, layer in enumerate(layers):
            by_form[_form(layer, shared)].append(position)
        for alike in by_form.values():
            numbers = np.array([[getattr(module, key) for module, key in _integers(layers[position])] for position in alike], dtype=object)
            follows = (numbers - np.array(alike, dtype=object)[:, None] == numbers[0] - alike[0]).all(axis=0)
            same: dict[Hashable, list[int]] = defaultdict(list)
            for row, position in zip(numbers, alike, strict=True):
                same[tuple(row[~follows])].append(position)
            for positions in same.values():
                chosen = {id(layers[position]): layers[position] for position in positions}
                if len(chosen) == len(positions) > 1:
                    yield _Group(
                        layers=list(chosen.values()),
                        paths=[f"{name}.{position}".lstrip(".") for position in positions],
                        positions=[held for held, moves in zip(_integers(layers[positions[0]]), follows, strict=True) if moves],
                    )


def _form(layer: nn.Module, shared: Collection[int]) -> Hashable:
    """Return what decides whether two layers compute the same, without their integers. Tensors of several modules have to be the same."""
    form: list[Hashable] = []
    for name, module in layer.named_modules():
        tensors = tuple(
            (key, tensor if tensor is None else id(tensor) if id(tensor) in shared else (*tensor.shape, tensor.dtype))
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
        )
        attributes = tuple((key, int if type(value) is int else _value(value)) for key, value in _attributes(module))
        hooks = tuple(id(hook) for key, held in vars(module).items() if "hooks" in key and held for hook in held)
        form.append((name, type(module), module.training, tensors, attributes, hooks))
    return tuple(form)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if key not in _STANDARD]


def _integers(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, attribute) of each integer of a layer."""
    return [(module, key) for module in layer.modules() for key, value in _attributes(module) if type(value) is int]


def _value(value: object) -> Hashable:
    """Return a plain value for comparison; for any other object its identity."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_value(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((_value(key), _value(item)) for key, item in value.items())
    return id(value)


# ---------------------------------------------------------------------------------------------------------------------------------
# Program: copy the nodes of the traced layer
# ---------------------------------------------------------------------------------------------------------------------------------


def write_out(program: ExportedProgram) -> bool:
    """Replace each `repeat` of the program by the nodes of its traced layer, and drop the marks.

    Return False if the traced layer reads a value that it is not called with, or leaves one that it does not return: the others may read or
    leave another one.
    """
    graph, signature = program.graph, program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    stored = {names[node.name]: node for node in graph.nodes if node.name in names}
    names |= signature.inputs_to_lifted_tensor_constants
    traced: dict[Node, tuple[Node, list[Node]]] = {}  # mark of the end -> mark of the start, and the nodes between them
    body: list[Node] = []
    for node in list(graph.nodes):
        if node.target is _ENTER:
            start, body = node, []
        elif node.target is _LEAVE:
            inside = {*body, node}
            if any(user not in inside for left in body for user in left.users):
                return False
            traced[node], body = (start, body), []
        elif node.target is _REPEAT:
            end = node.args[1][0].args[0]
            if not _copy(graph, node, *traced[end], end, names, stored):
                return False
        elif node.op != "placeholder":
            body.append(node)
    for mark in [node for node in graph.nodes if node.target in (_LEAVE, _ENTER)]:
        _replace_outputs(graph, mark, mark.args[0])
    named = Namespace()
    for node in graph.nodes:  # as without the shortcut: numbered in order
        node.name = named.create_name(node.name if node.op == "placeholder" else re.sub(r"_\d+$", "", node.name), node)
    return True


_ENTER, _LEAVE, _REPEAT = (torch.ops.perfmodel.enter.default, torch.ops.perfmodel.leave.default, torch.ops.perfmodel.repeat.default)


def _copy(
    graph: Graph, node: Node, start: Node, body: Sequence[Node], end: Node, names: Mapping[str, str], stored: Mapping[str, Node]
) -> bool:
    """Replace `node` by copies of `body`, the nodes between the marks `start` and `end`."""
    first, path = start.args[1], node.args[2]
    copies: dict[Node, Node] = {user: node.args[0][user.args[1]] for user in start.users}
    with graph.inserting_before(node):
        for original in body:
            if original in copies:
                continue
            for source in original.all_input_nodes:
                if source in copies:
                    continue
                if source.name not in names:
                    return False
                name = names[source.name]
                copies[source] = stored.get(path + name.removeprefix(first), source) if name.startswith(f"{first}.") else source
            copies[original] = copy = graph.node_copy(original, lambda source: copies.get(source, source))
            stack = copy.meta.get("nn_module_stack", {})
            copy.meta["nn_module_stack"] = {
                key: (path + at.removeprefix(first) if at == first or at.startswith(f"{first}.") else at, kind)
                for key, (at, kind) in stack.items()
            }
    _replace_outputs(graph, node, [copies.get(output, output) for output in end.args[0]])
    return True


def _replace_outputs(graph: Graph, node: Node, outputs: Sequence[Node]) -> None:
    """Drop a node with a list of outputs for other nodes."""
    for user in list(node.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
