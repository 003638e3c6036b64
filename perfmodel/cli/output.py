"""Output of results on standard output: text with tables, one JSON object, CSV or Markdown; errors and progress on standard error."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import FrameType
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.error_objects import ErrorCode, error_object
from perfmodel.foundation.errors import presentable
from perfmodel.foundation.plain import SCHEMA_VERSION, to_plain
from perfmodel.report.document import Command, Facts, Notes, Text

if TYPE_CHECKING:
    from perfmodel.report.document import Block, Document

_WIDEST, _NARROWEST = 100, 80  # columns of a page
_FOLDED_WIDTH, _LEAST_FOLDED = 24, 12  # least width of a foldable column: before optional columns are omitted, and in blocks of columns
_COLUMN_GAP = 2
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mun]?s|(?:[KMGT]i?)?B|TFLOP/s|USD|chips?|tokens(?:/s)?)(?!\w))")


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object, in SI units, with `schema_version` first."""
    plain = {"schema_version": SCHEMA_VERSION, **to_plain(content)}
    print(json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=not _is_unicode(sys.stdout.encoding)))


class Form(enum.StrEnum):
    """Output format of a result."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Output format and level of detail.

    verbose   print all notes and details
    wide      print all columns
    """

    form: Form = Form.TABLE
    verbose: bool = False
    wide: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the output is read by people and names written files."""
        return self.form in (Form.TABLE, Form.MARKDOWN)


def page_width() -> int:
    """Return the page width: that of the terminal, between 80 and 100 columns."""
    return min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    caption: str = "",
    right: Iterable[str] = (),
    fold: Iterable[str] = (),
    optional: Iterable[str] = (),
    wide: bool = False,
) -> None:
    """Print a table that fits the page; the arguments are the fields of `perfmodel.report.table.Table`.

    If it is too wide, optional columns are omitted first, then foldable columns wrap. A table that is still too wide is printed in blocks
    of columns, each with the first column. With `wide`, nothing is omitted or wrapped.
    """
    cells = [tuple(map(printable, row)) for row in (headers, *rows)]
    kept = list(range(len(headers)))
    left_out: list[str] = []
    for header in () if wide else optional:
        if _least_width(cells, kept, set(fold), _FOLDED_WIDTH) <= page_width():
            break
        index = list(headers).index(header) if header in headers else -1
        if index in kept:
            kept.remove(index)
            left_out.append(header)
    may_fold, to_the_right = set() if wide else set(fold), set(right)
    lines = list(map(bold, _broken(printable(title), page_width()))) if title else []
    lines += _broken(printable(caption), page_width()) if caption else []
    for block in [kept] if wide else _blocks(cells, kept, may_fold):
        columns = [[row[index] for row in cells] for index in block]
        widths = _fitted([_cells_width(column) for column in columns], [headers[index] in may_fold for index in block])
        aligned = [headers[index] in to_the_right for index in block]
        rule = ("─" if _is_unicode(sys.stdout.encoding) else "-") * (sum(widths) + _COLUMN_GAP * (len(widths) - 1))
        for number, row in enumerate(zip(*columns, strict=True)):
            broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]  # a cell may wrap
            lines += [_aligned(line, widths, aligned) for line in zip_longest(*broken, fillvalue="")]
            lines += [] if number else [rule]
    print("\n".join(lines))
    if left_out:
        print_paragraph(f"columns not shown: {', '.join(left_out)} (--wide)")


def bold(text: str) -> str:
    """Return the text in bold on a terminal; unchanged with `NO_COLOR` or on a dumb terminal."""
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain or not text else f"\x1b[1m{text}\x1b[0m"


def _cells_width(column: Sequence[str]) -> int:
    return max((len(line) for cell in column for line in cell.split("\n")), default=0)


def _least_width(cells: Sequence[Sequence[str]], kept: Sequence[int], fold: set[str], folded: int) -> int:
    """Return the least width of the columns, gaps included."""
    widths = [(_cells_width([row[index] for row in cells]), cells[0][index] in fold) for index in kept]
    return sum(min(width, folded) if may_fold else width for width, may_fold in widths) + _COLUMN_GAP * (len(kept) - 1)


def _blocks(cells: Sequence[Sequence[str]], kept: Sequence[int], fold: set[str]) -> Iterator[list[int]]:
    """Yield groups of columns that fit the page, each with the first column."""
    first, *others = kept or [0]
    block = [first] if kept else []
    for index in others:
        if len(block) > 1 and _least_width(cells, [*block, index], fold, _LEAST_FOLDED) > page_width():
            yield block
            block = [first]
        block.append(index)
    yield block


def _fitted(widths: Sequence[int], may_fold: Sequence[bool]) -> list[int]:
    """Return the column widths, with the widest foldable columns narrowed until the table fits the page."""
    fitted = list(widths)
    excess = sum(fitted) + _COLUMN_GAP * (len(fitted) - 1) - page_width()
    while excess > 0:
        widest = max((i for i, folds in enumerate(may_fold) if folds and fitted[i] > _LEAST_FOLDED), key=fitted.__getitem__, default=-1)
        if widest < 0:
            break
        fitted[widest] -= 1
        excess -= 1
    return fitted


def _broken(text: str, width: int) -> list[str]:
    """Return the lines of a text wrapped to `width`; only words wider than it are broken."""
    lines = (_wrapped(line, width, break_on_hyphens=False) if len(line) > width > 0 else [line] for line in text.split("\n"))
    return [line for block in lines for line in block] or [""]


def _wrapped(text: str, width: int, **shape: Any) -> list[str]:
    """Wrap a text to this width without a break between a number and its unit."""
    glued = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in textwrap.wrap(glued, width, **shape)]


def _is_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().startswith("utf")


def printable(text: str) -> str:
    """Return the text without terminal control characters."""
    return text if text.isprintable() else "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def _aligned(cells: Sequence[str], widths: Sequence[int], to_the_right: Sequence[bool]) -> str:
    placed = (f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width, right in zip(cells, widths, to_the_right, strict=True))
    return (" " * _COLUMN_GAP).join(placed).rstrip()


def show(document: Document, output: Output) -> None:
    """Print a result as text, one JSON object, CSV or Markdown."""
    if output.form is Form.JSON:
        print_json(document.content())
    elif output.form is Form.CSV:
        print(csv_of(document), end="")
    elif output.form is Form.MARKDOWN:
        from perfmodel.report.markdown import markdown

        print(printable(markdown(document.blocks(), verbose=output.verbose)), end="")
    else:
        print_blocks(document.blocks(), output)


def csv_of(document: Document) -> str:
    """Return the rows of a document as CSV."""
    from perfmodel.report.document import csv_text, flat_rows

    return csv_text(flat_rows(to_plain(document.content())) if document.rows is None else document.rows())


def print_blocks(blocks: Iterable[Block], output: Output) -> None:
    """Print the blocks of a document as text, with a blank line before all blocks except paragraphs and commands."""
    for number, block in enumerate(block for block in blocks if not (isinstance(block, Notes) and block.is_empty)):
        if number and (block.apart if isinstance(block, Text) else not isinstance(block, Command)):
            print()
        if isinstance(block, Text) and not block.wraps:
            print(printable(block.text))
        elif isinstance(block, Text):
            print_paragraph(block.text)
        elif isinstance(block, Facts):
            print_facts(block.title, block.facts)
        elif isinstance(block, Command):
            print_command(block.command)
        elif isinstance(block, Notes):
            print_notes(block, verbose=output.verbose)
        else:
            given = {name: getattr(block, name) for name in ("title", "caption", "right", "fold", "optional")}
            print_table(block.headers, block.rows, wide=output.wide, **given)


def print_paragraph(text: str, *, first: str = "", indent: str = "") -> None:
    """Print a text wrapped to the page width.

    first    prefix of the first line
    indent   prefix of the other lines
    """
    for number, line in enumerate(printable(text).split("\n")):
        start = indent if number else first
        shape = {"initial_indent": start, "subsequent_indent": indent, "break_on_hyphens": False, "break_long_words": False}
        print("\n".join(_wrapped(line, page_width(), **shape)))


def print_command(command: str) -> None:
    """Print a shell command to copy; long ones break before options with a backslash."""
    from perfmodel.cli.help import shell_lines

    print("\n".join(shell_lines(command, width=page_width())))


def print_notes(notes: Notes, *, verbose: bool) -> None:
    """Print the most important notes; with `verbose`, all notes and details."""
    shown, left_out = notes.shown(verbose=verbose)
    for note in shown:
        print_paragraph(note, first="note: ", indent=" " * len("note: "))
    if left_out:
        print(f"{left_out} more note{'s' * (left_out > 1)}: --verbose")


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title and one `name  value` line per fact, wrapped to the page width."""
    pairs = [(printable(name), printable(value)) for name, value in facts]
    width = max((len(name) for name, _ in pairs), default=0)
    value_width = page_width() - width - _COLUMN_GAP
    print("\n".join(map(bold, _broken(printable(title), page_width()))))
    for name, value in pairs:
        for line, text in enumerate(_broken(value, value_width)):
            print(_aligned(("" if line else name, text), (width, 0), (False, False)))


def print_error(sentence: str, *, code: ErrorCode, as_json: bool, full: str = "") -> None:
    """Print an error on standard error.

    full   unshortened sentence, added to the JSON object
    """
    sentence = " ".join(presentable(sentence).split())
    if not as_json:
        print(f"perfmodel: {sentence}", file=sys.stderr)
        return
    full = " ".join(presentable(full).split()) or sentence
    content: dict[str, str | list[str] | None] = {**error_object(full, code), "message": sentence}
    if full != sentence:
        content["details"] = full
    print(json.dumps(content, ensure_ascii=False), file=sys.stderr)


@contextmanager
def first_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. In this context, only the second Ctrl-C interrupts."""
    interrupted = False

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(number, previous)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:  # ignored in background jobs of a shell
        signal.signal(signal.SIGINT, record)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


class Progress:
    """Progress on standard error of work longer than two seconds: a bar on a terminal, else a line every 15 seconds.

    `share` takes the finished share in 0..1, `step` also the current task, `note` only the task.
    """

    _PATIENCE = 2.0  # s
    _REDRAW = 0.1  # s
    _LINE_EVERY = 15.0  # s, without a terminal
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

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._length:
            print(f"\r{'':<{self._length}}\r", end="", file=sys.stderr, flush=True)
            self._length = 0
