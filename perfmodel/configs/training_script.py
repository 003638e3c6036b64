"""Training scripts in Python: the arguments of the calls that set up a trainer. No script is executed.

The calls and the keys of their arguments are in strategies/configs/common.yaml.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel.configs.expressions import Unknown, value_of

CALLS = "python.calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """A call whose arguments are keys of the job.

    name      pattern of the called name
    argument  key of the first argument, if it is given without its name
    defaults  keys that the call sets by default
    """

    name: str
    argument: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def script_keys(tree: ast.Module, known: tuple[ScriptCall, ...], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the constant arguments of the known calls, and the names of these calls as `python.calls`.

    names  argument -> key, where they differ
    """
    constants: dict[str, Any] = {}
    calls: list[str] = []
    keys: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = _constant(node.value, constants)
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        call = next((call for call in known if name and re.search(call.name, name)), None)
        if call is not None and isinstance(node, ast.Call):
            calls.append(name)
            defaults |= call.defaults
            keys |= {names.get(key, key): value for key, value in _arguments(node, call, constants) if value is not None}
    return {CALLS: " ".join(calls), **defaults, **keys} if calls else {}


def _arguments(node: ast.Call, call: ScriptCall, constants: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if call.argument and node.args:
        yield call.argument, _constant(node.args[0], constants)
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, _constant(keyword.value, constants)


def _constant(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of an expression of constants, the last component of `torch.bfloat16`, or None."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    try:
        return value_of(node, constants)
    except (Unknown, ArithmeticError, TypeError, ValueError, LookupError):
        return None
