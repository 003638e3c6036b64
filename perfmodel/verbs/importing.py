"""`import_graph`: the graph of a torch module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.resources import require_torch

if TYPE_CHECKING:
    from perfmodel.workload.imported.graph import ImportedGraph


def import_graph(module: str | Callable[[], Any], inputs: str | Sequence[str] = ()) -> ImportedGraph:
    """Return the operators of any `torch.nn.Module` as named iteration spaces, extracted with `torch.export` under fake tensors.

    module   `package.module:factory`, optionally with literal arguments (`torch.nn:Linear(8, 8)`), or a callable that makes the module;
             an existing module is used directly
    inputs   arguments of `forward`: `tokens=int64[1,2048]`; without a name the next argument by position
    """
    require_torch("import a module")
    from perfmodel.execute.importer.import_graph import find_factory, import_module
    from perfmodel.workload.imported.input_spec import parse_inputs

    specs = parse_inputs([inputs] if isinstance(inputs, str) else inputs)
    if isinstance(module, str):
        return import_module(find_factory(module), specs, name=module)
    if hasattr(module, "named_parameters") and not isinstance(module, type):
        return import_module(lambda: module, specs, name=type(module).__name__)
    if not callable(module):
        raise bad_field("module", module, "must be module:factory, a torch.nn.Module or a callable that makes one")
    return import_module(module, specs, name=getattr(module, "__name__", type(module).__name__))
