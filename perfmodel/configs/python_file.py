"""Configs in Python, as in torchtitan: a function that returns nested calls with keywords; else the calls that set up a trainer.

The file is parsed, never executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perfmodel.configs.expressions import FAULTS, value_of
from perfmodel.configs.tables import common_rules
from perfmodel.foundation.errors import InputError, one_line, suggest

_MOST_DEPTH = 32


def read_python(text: str, *, where: str, wanted: str = "") -> dict[str, Any]:
    """Return the flat keys of the config that a function of the file returns.

    wanted   name of the function; required if there are several
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{one_line(where, 200)}: is not Python ({one_line(error, 80)}); correct the file") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _returned(node) is not None}
    location = one_line(where, 200)
    if wanted and wanted not in functions:
        raise InputError(f"{location}: has no function {wanted} that returns a config{suggest(wanted, functions)}")
    if not functions:
        keys = _script_keys(tree)
        if not keys:
            rule = "has no function that returns a config, and no call that sets up a trainer (such as TrainingArguments or SFTConfig)"
            raise InputError(f"{location}: {rule}; give its launch line or its config file")
        return keys
    if not wanted and len(functions) > 1:
        example = next((name for name in functions if not name.startswith("_")), next(iter(functions)))
        raise InputError(f"{location}: holds {len(functions)} configs; give one, as {location}:{example}")
    function = functions[wanted or next(iter(functions))]
    constants = _constants([*tree.body, *function.body])
    calls = dict(_assigned(function.body, ast.Name))
    result = _returned(function)
    if isinstance(result, ast.Name):
        result = calls.get(result.id, result)
    keys = {}
    if isinstance(result, ast.Call):
        base = ast.unparse(result.func)
        if base in functions and not result.keywords:  # a config that modifies another one of the file
            keys = read_python(text, where=where, wanted=base)
        for name, node in _keywords(result):
            keys |= dict(_entries(name, node, constants, calls))
    for name, node in _assigned(function.body, ast.Attribute):  # config.training.steps = 10
        keys |= dict(_entries(name.partition(".")[2], node, constants, calls))
    return {"python.function": function.name, **keys}


def _returned(function: ast.FunctionDef) -> ast.expr | None:
    results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return results[-1] if results and isinstance(results[-1], (ast.Call, ast.Name)) else None


def _assigned(body: Iterable[ast.AST], kind: type[ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Yield target and value of the assignments to one name or attribute."""
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], kind):
            yield ast.unparse(node.targets[0]), node.value


def _constants(nodes: Iterable[ast.AST]) -> dict[str, Any]:
    """Return the names that are assigned a number, a text or arithmetic of them; others have no value."""
    constants: dict[str, Any] = {}
    for name, node in _assigned(nodes, ast.Name):
        constants[name] = _constant(node, constants)
    return constants


def _keywords(call: ast.Call) -> list[tuple[str, ast.expr]]:
    return [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]


def _entries(
    key: str, node: ast.expr, constants: Mapping[str, Any], calls: Mapping[str, ast.expr], depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a value. The value of a call is its only argument or its function; its keywords are below it."""
    if isinstance(node, ast.Name) and isinstance(calls.get(node.id), ast.Call):
        node = calls[node.id]
    if isinstance(node, ast.Call) and depth < _MOST_DEPTH:
        arguments = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        yield key, arguments[0] if len(arguments) == 1 else ast.unparse(node.func)
        for name, value in _keywords(node):
            yield from _entries(f"{key}.{name}", value, constants, calls, depth + 1)
        return
    try:
        yield key, value_of(node, constants)
    except FAULTS:
        yield key, one_line(ast.unparse(node), 80)


def _script_keys(tree: ast.Module) -> dict[str, Any]:
    """Return the constant arguments of the calls that set up a trainer, and the names of these calls as `python.calls`.

    The calls and the keys of their arguments are in strategies/configs/common.yaml.
    """
    known, names = common_rules()["script_calls"], common_rules()["script_names"]
    constants = _constants(ast.walk(tree))
    calls: list[str] = []
    keys: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(node.func)
        call = next((call for call in known if re.search(call["name"], name)), None)
        if call is None:
            continue
        calls.append(name)
        defaults |= call.get("defaults", {})
        first = [(call["argument"], node.args[0])] if "argument" in call and node.args else []
        values = {names.get(argument, argument): _constant(value, constants) for argument, value in (*first, *_keywords(node))}
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
