"""The files of the package, each parsed once for all that is asked of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import perfmodel

PACKAGE = Path(perfmodel.__file__).parent


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.relative_to(PACKAGE).parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))
