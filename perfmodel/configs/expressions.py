"""Evaluator of expressions in config tables, shell scripts and Python configs: arithmetic, comparisons, a few functions; no execution."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from perfmodel.configs.functions import FUNCTIONS
from perfmodel.foundation.errors import one_line

_MOST_DIGITS = 40
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda left, right: _number(left) * _number(right),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _number(base) ** min(_number(exponent), 64),
}
_COMPARED: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


class Unknown(ValueError):
    """A name of the expression has no value, or a node is not arithmetic."""


#: Errors of `value_of`.
FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or None if a required name has no value.

    `and`, `or` and `==` treat names without a value as None; arithmetic does not.
    """
    try:
        return value_of(_parsed(expression), names)
    except (SyntaxError, RecursionError, *FAULTS):
        return None


def filled(text: str, names: Mapping[str, Any], width: int = 120) -> str:
    """Return the text with the values of the expressions in its braces. width: most characters of a value."""
    return re.sub(r"\{([^{}]+)\}", lambda match: one_line(evaluate(match[1], names), width), text)


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression.strip(), mode="eval").body


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a parsed expression. Raises one of `FAULTS`."""

    def value(operand: ast.expr) -> Any:
        return value_of(operand, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return names.get(ast.unparse(node))
        case ast.Tuple() | ast.List():
            return [value(element) for element in node.elts]
        case ast.Dict(keys=keys) if None not in keys:
            return {value(key): value(entry) for key, entry in zip(keys, node.values, strict=True) if key is not None}
        case ast.BinOp(op=op) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](value(node.left), value(node.right)))
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return not value(node.operand)
        case ast.BoolOp(op=op):
            result = None
            for operand in node.values:
                result = value(operand)
                if bool(result) is isinstance(op, ast.Or):
                    break
            return result
        case ast.Compare():
            left = value(node.left)
            for comparison, right in zip(node.ops, map(value, node.comparators), strict=True):
                if not _COMPARED[type(comparison)](left, right):
                    return False
                left = right
            return True
        case ast.IfExp():
            return value(node.body if value(node.test) else node.orelse)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(value, node.args))
        case ast.Subscript():
            return value(node.value)[value(node.slice)]
    raise Unknown


def _number(value: object) -> Any:
    if not isinstance(value, (int, float)):
        raise Unknown
    return value


def _checked(result: object) -> Any:
    """Refuse numbers and texts that grow without bound."""
    if isinstance(result, int) and result.bit_length() > 4 * _MOST_DIGITS:
        raise Unknown
    if isinstance(result, (str, list)) and len(result) > 1 << 16:
        raise Unknown
    return result
