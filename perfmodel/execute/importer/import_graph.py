"""Import of any `torch.nn.Module` as an `ImportedGraph`: exported under fake tensors, so that its size needs no memory.

`torch.export` returns the operators of one forward pass with their shapes. `exported_graph.py` reads them,
`workload/imported/aten_rules.py` recognises each one, and `workload/imported/views.py` follows the dims through reshapes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import config as fx_config

from perfmodel.execute.importer.exported_graph import read_program
from perfmodel.execute.importer.exported_module import ExportedModule
from perfmodel.execute.importer.repeats import Repeats, replaced_forward, write_out
from perfmodel.execute.importer.value_sizes import EvenShares
from perfmodel.foundation.collection import without_collection
from perfmodel.foundation.errors import InputError, bad_field, one_line, suggest
from perfmodel.workload.imported.graph import ImportedGraph
from perfmodel.workload.imported.input_spec import InputSpec


def shipped(name: str) -> nn.Module:
    """Return the executor's own Transformer of a shipped model or of a config.json, without a loss. A factory for `perfmodel import`."""
    from perfmodel.execute.uniform.model import Transformer
    from perfmodel.workload.models import load_model

    return Transformer(load_model(name))


# ---------------------------------------------------------------------------------------------------------------------------------
# What to import
# ---------------------------------------------------------------------------------------------------------------------------------


def find_factory(reference: str) -> Callable[[], Any]:
    """Return `package.module:name`, or `package.module:name(1, key="value")` with literal arguments, as a callable without arguments."""
    where = "write module:factory, such as mynets:make_resnet or mynets:ResNet(50)"
    module_name, colon, call = reference.partition(":")
    if not colon or not module_name.strip() or not call.strip():
        raise bad_field("module", reference, "must be a Python module, a colon, and the name of a factory, class or module in it", where)
    try:
        tree = ast.parse(call.strip(), mode="eval").body
        name = ast.unparse(tree.func if isinstance(tree, ast.Call) else tree)
        arguments = [ast.literal_eval(argument) for argument in tree.args] if isinstance(tree, ast.Call) else []
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords} if isinstance(tree, ast.Call) else {}
        is_name = all(part.isidentifier() for part in name.split("."))
    except (SyntaxError, ValueError):
        is_name = False
    if not is_name:
        raise bad_field("module", reference, "after the colon must stand a name, or a call with plain numbers and strings", where)
    try:
        with _this_folder_first(), redirect_stdout(sys.stderr):
            target: object = importlib.import_module(module_name.strip())
    except ModuleNotFoundError as error:
        if error.name and (module_name.strip() + ".").startswith(error.name + "."):
            remedy = "give a module that is installed or in this folder"
            raise bad_field("module", reference, f"there is no Python module {error.name!r}", remedy) from None
        raise bad_field("module", reference, f"its Python module cannot be loaded: {_first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise bad_field("module", reference, f"its Python module cannot be loaded: {_first_line(error)}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            # candidates for the suggestion: factories, classes and modules, not the imports of the file
            known = [attribute for attribute, value in vars(target).items() if not attribute.startswith("_") and callable(value)]
            raise bad_field("module", reference, f"{module_name} has no {part!r}{suggest(part, known)}")
        target = getattr(target, part)
    if isinstance(target, nn.Module) and not isinstance(tree, ast.Call):
        return lambda: target
    if not callable(target):
        raise bad_field("module", reference, "is neither a torch.nn.Module nor something to call that makes one", where)

    def make() -> Any:
        with _this_folder_first():
            return target(*arguments, **named)

    return make


@contextmanager
def _this_folder_first() -> Iterator[None]:
    """Search the working folder for modules first, as `python -m` does."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, 300)


def _check_signature(module: nn.Module, specs: Sequence[InputSpec]) -> None:
    """Check names and number of the inputs against the signature of `forward` before the export."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    names = [name for name, item in signature.parameters.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    takes_any = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())
    for spec in specs:
        if spec.name and spec.name not in names and not takes_any:
            raise bad_field("inputs", spec.name, f"is no argument of {type(module).__name__}.forward{suggest(spec.name, names)}")
    try:
        signature.bind(*[None for spec in specs if not spec.name], **{spec.name: None for spec in specs if spec.name})
    except TypeError as error:
        shown = ", ".join(names) or "nothing"
        remedy = f"give the type and the sizes of each, such as {names[0]}=float32[8,64]" if names else "leave them out"
        raise bad_field("inputs", " ".join(map(str, specs)) or "none", f"{error}; forward takes {shown}", remedy) from None


# ---------------------------------------------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's log and its warnings about fake weights: a failure is reported as one sentence."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


@contextmanager
def _convertible() -> Iterator[None]:
    """Support `module.to(dtype)` and the like under fake tensors.

    torch 2.13 swaps tensors in place, and refuses because fake ones have references. Parameters are replaced instead; sharing is kept.
    """
    original = nn.Module._apply
    converted: dict[tuple[int, int], tuple[Any, ...]] = {}  # keeps the objects alive whose ids are the keys

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for key, parameter in self._parameters.items():
            if parameter is not None:
                if (id(fn), id(parameter)) not in converted:
                    with torch.no_grad():
                        new = nn.Parameter(fn(parameter), requires_grad=parameter.requires_grad)
                    converted[id(fn), id(parameter)] = (new, fn, parameter)
                self._parameters[key] = converted[id(fn), id(parameter)][0]
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    nn.Module._apply = _apply
    try:
        yield
    finally:
        nn.Module._apply = original


_OF_VALUES = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"}


def import_module(make: Callable[[], Any], inputs: Sequence[InputSpec], *, name: str) -> ImportedGraph:
    """Return the graph of one forward pass of the module that `make` returns."""
    return export_module(make, inputs, name=name).graph


def export_module(make: Callable[[], Any], inputs: Sequence[InputSpec], *, name: str) -> ExportedModule:
    """Return one forward pass of the module that `make` returns, as a graph and as torch nodes.

    The module is built under fake tensors: parameters have shapes but no memory. A module that exists already keeps its parameters.
    """
    with _quietly(), without_collection(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            with _convertible(), redirect_stdout(sys.stderr):
                module = make()
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            lacks_arguments = isinstance(error, TypeError) and "argument" in str(error)
            written = f"write its arguments behind it, as in {name.partition('(')[0]}(...)"
            remedy = written if lacks_arguments else "call it by itself to see where"
            raise bad_field("module", name, f"its factory failed: {_first_line(error)}", remedy) from error
        if not isinstance(module, nn.Module):
            raise bad_field("module", name, f"must give a torch.nn.Module, not {type(module).__name__}")
        _check_signature(module, inputs)
        first = next(iter(module.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        tensors = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in inputs]
        positional = tuple(tensor for tensor, spec in zip(tensors, inputs, strict=True) if not spec.name)
        named = {spec.name: tensor for tensor, spec in zip(tensors, inputs, strict=True) if spec.name}
        try:
            program = _export(module, positional, named)
        except Exception as error:
            names = {type(cause).__name__ for cause in (error, error.__cause__, error.__context__) if cause is not None}
            depends = bool(names & _OF_VALUES) or "data-dependent" in str(error).lower()
            what = "torch.export cannot follow it" if depends else "its forward fails on these inputs"
            shown = " ".join(map(str, inputs)) or "none"
            fitting = f"call it with types and sizes that it takes (inputs={shown})"
            remedy = "take out what depends on the values of tensors" if depends else fitting
            raise bad_field("module", name, f"{what}: {_first_line(error)}", remedy) from error
        return read_program(module, program, mode, name=name)


def _export(module: nn.Module, positional: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> ExportedProgram:
    """Export a module. Layers that compute the same are traced once, or each of them if that is not exact."""
    repeats = Repeats(module)
    if repeats.groups:
        with suppress(Exception):
            with repeats.traced_once():
                program = _traced(module, positional, named)
            if repeats.is_exact and write_out(program):
                return program
    return _traced(module, positional, named)


def _traced(module: nn.Module, positional: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> ExportedProgram:
    """Return torch's exported program, without what it prints and without the stack traces of its nodes."""
    forward = module.forward

    def with_even_shares(*args: Any, **kwargs: Any) -> Any:
        with EvenShares():  # only here: a mode sees each access to an attribute of a tensor, and torch reads those of all parameters
            return forward(*args, **kwargs)

    fx_config.do_not_emit_stack_traces = True
    try:
        with replaced_forward(module, with_even_shares), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return torch.export.export(module, positional, named, strict=False)
    finally:
        fx_config.do_not_emit_stack_traces = False
