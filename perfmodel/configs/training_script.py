"""Training scripts in Python: the arguments of the calls that set up a trainer. No script is executed.

The calls and the keys of their arguments are in strategies/configs/common.yaml.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from perfmodel.configs.expressions import FAULTS, value_of
from perfmodel.configs.tables import common_rules


def script_keys(tree: ast.Module) -> dict[str, Any]:
    """Return the constant arguments of the known calls, and the names of these calls as `python.calls`."""
    known, names = common_rules()["script_calls"], common_rules()["script_names"]
    constants: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = _constant(node.value, constants)
    calls: list[str] = []
    keys: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        call = next((call for call in known if re.search(call["name"], name)), None)
        if call is None:
            continue
        calls.append(name)
        defaults |= call.get("defaults", {})
        arguments = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        if "argument" in call and node.args:
            arguments.setdefault(call["argument"], node.args[0])
        values = {names.get(argument, argument): _constant(value, constants) for argument, value in arguments.items()}
        keys |= {key: value for key, value in values.items() if value is not None}
    return {"python.calls": " ".join(calls), **defaults, **keys} if calls else {}


def _constant(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of an expression of constants, the last component of `torch.bfloat16`, or None."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    try:
        return value_of(node, constants)
    except FAULTS:
        return None
