"""How results leave the program: one JSON object, or tables with units."""

import dataclasses
import enum
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

SCHEMA_VERSION = 1
_FOLDED_WIDTH = 30  # a column that may break into lines keeps this much
_COLUMN_GAP = 2


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
    plain = {"schema_version": SCHEMA_VERSION, **to_plain(content)}
    print(json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=not _is_unicode(sys.stdout.encoding)))


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    right: Iterable[str] = (),
    fold: Iterable[str] = (),
) -> None:
    """A table for people. `right` names the columns of numbers, `fold` those that may break into lines on a narrow terminal.

    A pipe gets plain lines as wide as they need; rich, which costs 40 ms to load, is for terminals.
    """
    to_the_right, may_fold = set(right), set(fold)
    title, cells = printable(title), [tuple(map(printable, row)) for row in (headers, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if not sys.stdout.isatty():
        lines = [_aligned(row, widths, [header in to_the_right for header in headers]) for row in cells]
        rule = "─" if _is_unicode(sys.stdout.encoding) else "-"
        print("\n".join([*([title] if title else []), lines[0], rule * (sum(widths) + _COLUMN_GAP * (len(widths) - 1)), *lines[1:]]))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for header in headers:
        table.add_column(header, justify="right" if header in to_the_right else "left", no_wrap=header not in may_fold, overflow="fold")
    for row in cells[1:]:
        table.add_row(*row)
    least = [min(width, _FOLDED_WIDTH) if header in may_fold else width for header, width in zip(headers, widths, strict=True)]
    _show(title, table, least_width=sum(least) + _COLUMN_GAP * len(headers))


def _is_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().startswith("utf")


def printable(text: str) -> str:
    """What a file holds, without what would steer a terminal."""
    return text if text.isprintable() else "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def _aligned(cells: Sequence[str], widths: Sequence[int], to_the_right: Sequence[bool]) -> str:
    placed = (f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width, right in zip(cells, widths, to_the_right, strict=True))
    return (" " * _COLUMN_GAP).join(placed).rstrip()


def print_tables(tables: Iterable[Any]) -> None:
    """Tables of `perfmodel.report`, each after a blank line."""
    for table in tables:
        print()
        print_table(table.headers, table.rows, title=table.title, right=table.right, fold=table.fold)


def print_sources(sources: Iterable[str]) -> None:
    """The list that the marks of `cite` point to."""
    print("\nsources")
    for number, source in enumerate(sources, 1):
        print(f"[{number}] {printable(' '.join(source.split()))}")


def cite(sources: Iterable[str]) -> dict[str, str]:
    """A mark such as "[1]" for each different source, in order of appearance."""
    return {source: f"[{number}]" for number, source in enumerate(dict.fromkeys(sources), 1)}


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """A title and one `name  value` line for each fact."""
    title, pairs = printable(title), [(printable(name), printable(value)) for name, value in facts]
    if not sys.stdout.isatty():
        width = max((len(name) for name, _ in pairs), default=0)
        print("\n".join([title, *(_aligned(pair, (width, 0), (False, False)) for pair in pairs)]))
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    _show(title, table, least_width=max((len(name) for name, _ in pairs), default=0) + 1 + _FOLDED_WIDTH)


@contextmanager
def first_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only answers the question whether there was one; the next interrupts as ever."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, previous)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:  # as a shell's jobs in the background have it
        signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)


class Progress:
    """A bar on standard error for work that has taken longer than two seconds; where that is no terminal, a line now and then.

    `share` takes the part that is done, in 0..1; `step` also what is being done now; `note` only that.
    """

    _PATIENCE = 2.0  # s
    _REDRAW = 0.1  # s
    _LINE_EVERY = 15.0  # s, where it is no terminal
    _WIDTH = 30

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = self._drawn_at = time.monotonic()
        self._is_watched = sys.stderr.isatty()
        self._length = 0

    def share(self, done: float) -> None:
        self.step(done, "")

    def step(self, done: float, what: str) -> None:
        now = time.monotonic()
        if now - self._start > self._PATIENCE and now - self._drawn_at > self._REDRAW:
            filled = round(done * self._WIDTH)
            left = (now - self._start) * (1.0 - done) / done if done > 0.01 else math.inf
            remaining = f", {left:.0f} s left" if left < 1e6 else ""
            doing = f" ({what})" if what else ""
            self._draw(f"{self._title}{doing} [{'#' * filled}{'.' * (self._WIDTH - filled)}] {done:4.0%}{remaining}")

    def note(self, sentence: str) -> None:
        self._draw(f"{self._title}: {sentence} ({time.monotonic() - self._start:.0f} s)")

    def _draw(self, text: str) -> None:
        now = time.monotonic()
        if not self._is_watched:
            if now - self._drawn_at > self._LINE_EVERY:
                self._drawn_at = now
                print(text, file=sys.stderr, flush=True)
            return
        self._drawn_at = now
        text = text[: max(shutil.get_terminal_size().columns - 1, 20)]
        print(f"\r{text:<{self._length}}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._length:
            print(f"\r{'':<{self._length}}\r", end="", file=sys.stderr, flush=True)
            self._length = 0


def _show(title: str, table: Any, *, least_width: int) -> None:
    """Print on a terminal: as wide as it is, or wider where cells would be cut (then the terminal wraps the lines)."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if least_width > console.width:
        console = Console(markup=False, highlight=False, emoji=False, width=least_width)
    if title:
        console.print(title, style="bold")
    console.print(table)
