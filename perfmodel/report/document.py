"""A result as a document: blocks for people, one object for programs, rows for spreadsheets.

The command line shows it as text, JSON, CSV or Markdown (`perfmodel.cli.output.show`); a notebook or a web page can take its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfmodel.report.table import Table

MOST_NOTES = 5  # of a report without --verbose


@dataclass(frozen=True, slots=True)
class Facts:
    """A title and one line for each `(name, value)`; a line without a name goes on with the one before."""

    title: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. apart: after a blank line. wraps: lines may break at the width of the page; not those of a file."""

    text: str
    apart: bool = False
    wraps: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command that can be copied."""

    command: str


@dataclass(frozen=True, slots=True)
class Notes:
    """Remarks, the most important first; details are shown with `--verbose` only."""

    notes: Sequence[str]
    details: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not self.notes and not self.details

    def shown(self, *, verbose: bool) -> tuple[list[str], int]:
        """Return the notes to show, and how many are left out."""
        shown = [*self.notes, *self.details] if verbose else list(self.notes[:MOST_NOTES])
        return shown, len(self.notes) + len(self.details) - len(shown)


Block: TypeAlias = Facts | Table | Text | Command | Notes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """A result in each form, built when it is asked for.

    blocks    what people read, in order
    content   the object of JSON, SI units
    rows      flat rows of CSV; None: those of `flat_rows` from the content
    """

    blocks: Callable[[], Iterable[Block]]
    content: Callable[[], Mapping[str, Any]]
    rows: Callable[[], Iterable[Mapping[str, Any]]] | None = None


def flat_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plain content of JSON as flat rows: one for each object of its first list of objects, else one for all of it.

    Fields of objects in objects are named `outer.inner`; lists of numbers and names are joined by spaces, lists of objects left out.
    """
    for value in content.values():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            return [dict(_flat(entry)) for entry in value]
    return [dict(_flat(content))]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value
        elif not any(isinstance(entry, (list, Mapping)) for entry in value):
            yield prefix + name, " ".join(map(str, value))
