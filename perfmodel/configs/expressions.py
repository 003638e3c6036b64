"""Evaluator of expressions in config tables, shell scripts and Python configs: arithmetic, comparisons, a few functions; no execution.

Functions find models by name, and read and write the notation of frameworks for stages and adapters.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from perfmodel.configs.adapter_targets import adapter_targets, peft_targets
from perfmodel.foundation.errors import one_line
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.layout import shorter_ends_stage_layers
from perfmodel.workload.models import is_model, list_models
from perfmodel.workload.quantization import format_in_name

_MOST_DIGITS = 40
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda left, right: _number(left) * _number(right),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _number(base) ** min(_number(exponent), 64),
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


@session_cache(maxsize=4096)
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
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](value(node.left), value(node.right))
            if isinstance(result, int) and result.bit_length() > 4 * _MOST_DIGITS:
                raise Unknown
            if isinstance(result, (str, list)) and len(result) > 1 << 16:
                raise Unknown
            return result
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return not value(node.operand)
        case ast.BoolOp(op=op):
            for operand in node.values:
                result = value(operand)
                if bool(result) is isinstance(op, ast.Or):
                    break
            return result
        case ast.Compare():
            operands = pairwise(map(value, (node.left, *node.comparators)))
            return all(_OPERATORS[type(op)](left, right) for op, (left, right) in zip(node.ops, operands, strict=True))
        case ast.IfExp():
            return value(node.body if value(node.test) else node.orelse)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(value, node.args))
        case ast.Subscript():
            return value(node.value)[value(node.slice)]
    raise Unknown


def _number(value: object) -> Any:
    if not isinstance(value, (int, float)):
        raise Unknown
    return value


# --- functions of expressions ---------------------------------------------------------------------------------------------


def _shipped(*parts: Any) -> str | None:
    """Return the shipped model with the name of these parts; of a path the last component counts."""
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in list_models()}
    text = "".join(str(part).rstrip("/").rpartition("/")[2] for part in parts if part is not None).lower()
    text = re.sub(r"[^a-z0-9]", "", text)
    while text not in known:
        shorter = re.sub(r"(hf|instruct|base|chat|thinking|fp8|bf16|fp16|25\d\d|v01|it|pt)$", "", text)
        shorter = re.sub(r"^meta(?=llama)", "", shorter) if shorter == text else shorter
        if shorter == text:
            return None
        text = shorter
    return known[text]


def _first_group(pattern: str, text: object) -> str | None:
    """Return the first group of a pattern in a text."""
    match = re.search(pattern, str(text), re.IGNORECASE)
    return match[1] if match else None


def _layout(text: str) -> list[int]:
    """Return the layers of each stage of Megatron's layout: `Et*7|t*9|t*9|t*7L`."""
    expanded = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), text)
    expanded = re.sub(r"([a-zA-Z])\*(\d{1,4})", lambda match: match[1] * int(match[2]), expanded)
    return [stage.count("t") for stage in expanded.split("|")]


def _module_layers(names: object) -> list[int] | None:
    """Return the layers of each stage of torchtitan's module_fqns_per_model_part."""
    if not isinstance(names, list) or not all(isinstance(stage, list) for stage in names):
        return None
    return [sum(str(name).startswith("layers.") for name in stage) for stage in names]


def _module_names(stage_layers: Sequence[int], head: str = "output") -> list[list[str]]:
    """Return torchtitan's modules of each stage: embedding first, norm and head last."""
    ends = zip(stage_layers, accumulate(stage_layers), strict=True)
    modules = [[f"layers.{index}" for index in range(end - count, end)] for count, end in ends]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", head]
    return modules


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "max": max,
    "int": int,
    "len": len,
    "text": str,
    "lower": lambda text: None if text is None else str(text).lower(),
    "split": lambda text: str(text).strip("[]").replace("+", ",").split(",") if not isinstance(text, list) else text,
    "joined": lambda separator, items: separator.join(map(str, items)),
    "list_of": lambda count, item: [item] * min(count, 4096),
    "found": _first_group,
    "shipped": _shipped,
    "format_in_name": lambda name: None if name is None else format_in_name(str(name)),
    "hub": lambda name: str(name) if is_model(str(name)) else _shipped(name) or str(name),
    "layout": _layout,
    "megatron_layout": lambda stage_layers: f"E{'|'.join(f't*{count}' if count else '' for count in stage_layers)}L",
    "module_layers": _module_layers,
    "module_names": _module_names,
    "chunks_of": lambda table: table.num_chunks,
    "split_with_ends": lambda layers, stages: list(shorter_ends_stage_layers(layers, stages)),
    "adapter_targets": adapter_targets,
    "peft_targets": peft_targets,
}
