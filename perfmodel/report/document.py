"""Result documents: blocks for text output, one object for JSON, and rows for CSV.

`perfmodel.cli.output.show` prints a document as text, JSON, CSV or Markdown. Notebooks and web pages read its blocks.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfmodel.foundation.frames import columns_of
from perfmodel.foundation.plain import dotted
from perfmodel.report.table import Table

MOST_NOTES = 5  # printed without --verbose


@dataclass(frozen=True, slots=True)
class Facts:
    """A title and one line per `(name, value)`; a line without a name continues the previous line."""

    title: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph.

    apart   print a blank line before it
    wraps   break lines at the page width; False for the text of a file
    """

    text: str
    apart: bool = False
    wraps: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command to copy."""

    command: str


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes, most important first; details are printed only with `--verbose`."""

    notes: Sequence[str]
    details: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not self.notes and not self.details

    def shown(self, *, verbose: bool) -> tuple[list[str], int]:
        """Return the notes to print and the number of omitted notes."""
        shown = [*self.notes, *self.details] if verbose else list(self.notes[:MOST_NOTES])
        return shown, len(self.notes) + len(self.details) - len(shown)


Block: TypeAlias = Facts | Table | Text | Command | Notes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """A result in each output form, built on demand.

    blocks    blocks of the text output, in order
    content   JSON object, SI units
    rows      flat rows of the CSV output; None: `flat_rows` of the content
    """

    blocks: Callable[[], Iterable[Block]]
    content: Callable[[], Mapping[str, Any]]
    rows: Callable[[], Iterable[Mapping[str, Any]]] | None = None


def flat_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return JSON content as flat rows: one per object of its first list of objects, else a single row.

    Nested fields are named `outer.inner`. Lists of numbers and names are joined by spaces; lists of objects are omitted.
    """
    lists = (value for value in content.values() if isinstance(value, list) and value)
    rows = next((value for value in lists if all(isinstance(entry, Mapping) for entry in value)), [content])
    flat = []
    for row in rows:
        cells = {}
        for name, value in dotted(row):
            if isinstance(value, list) and not any(isinstance(entry, (list, Mapping)) for entry in value):
                cells[name] = " ".join(map(str, value))
            elif not isinstance(value, (list, Mapping)):
                cells[name] = value
        flat.append(cells)
    return flat


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return the rows as CSV under one header; booleans as in JSON, empty cells for missing values and nan (unknown).

    columns   those of the rows by default
    """
    known = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or columns_of(known), lineterminator="\n")
    writer.writeheader()
    for row in known:
        cells = dict(row)
        for name, value in row.items():
            if isinstance(value, bool):
                cells[name] = str(value).lower()
            elif isinstance(value, float) and math.isnan(value):
                cells[name] = None
        writer.writerow(cells)
    return text.getvalue()
