"""How results leave the program: one JSON object, or tables with units."""

import dataclasses
import enum
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
_NO_TERMINAL_WIDTH = 10_000


def to_plain(value: Any) -> Any:
    """`value` as JSON has it: records and mappings become objects, sequences arrays, numpy numbers plain ones; nan and inf become null."""
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, enum.StrEnum) else value
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(entry) for key, entry in value.items()}
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if isinstance(value, Iterable):
        return [to_plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_json(content: Mapping[str, Any]) -> None:
    """One object on standard output, in SI units, with `schema_version` first."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **to_plain(content)}, indent=2, allow_nan=False, ensure_ascii=False))


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    right: Iterable[str] = (),
    fold: Iterable[str] = (),
) -> None:
    """A table for people. `right` names the columns of numbers, `fold` those that may break into lines on a narrow terminal."""
    from rich import box
    from rich.table import Table

    to_the_right, may_fold = set(right), set(fold)
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header in to_the_right else "left", no_wrap=header not in may_fold, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _show(table)


def print_sources(sources: Iterable[str]) -> None:
    """The list that the marks of `cite` point to."""
    print("\nsources")
    for number, source in enumerate(sources, 1):
        print(f"[{number}] {' '.join(source.split())}")


def cite(sources: Iterable[str]) -> dict[str, str]:
    """A mark such as "[1]" for each different source, in order of appearance."""
    return {source: f"[{number}]" for number, source in enumerate(dict.fromkeys(sources), 1)}


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """A title and one `name  value` line for each fact."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    _show(table)


def _show(table: Any) -> None:
    """Print as wide as the terminal; where no terminal says how wide it is, wide enough for every line, with no blanks at its end."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        console.print(table)
        return
    text = io.StringIO()
    Console(file=text, markup=False, highlight=False, emoji=False, width=_NO_TERMINAL_WIDTH).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))
