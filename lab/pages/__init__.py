"""Templates of the generated pages: `$name` is replaced by a value, and a line `@@ NAME` begins a section."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.plain import picked
from perfmodel.report.markdown import markdown_table
from perfmodel.report.table import Table
from perfmodel.validation.statistics import ErrorStatistics

_LINE_WIDTH = 140

Section = tuple[str, Mapping[str, object]]
"""Name of a section, and its values."""


def _sections(name: str) -> dict[str, str]:
    """Return the templates of `lab/pages/NAME.md` by section."""
    _, *parts = re.split(r"^@@ (\w+)\n", (Path(__file__).parent / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {section: text.strip("\n") for section, text in zip(parts[::2], parts[1::2], strict=True)}


def page(name: str, sections: Iterable[Section], *, wraps: bool = False) -> str:
    """Return the given sections of `lab/pages/NAME.md`, in the given order. wraps: give the lines of paragraphs and lists one width."""
    templates = _sections(name)
    text = "\n\n".join(Template(templates[section]).substitute(values) for section, values in sections)
    return ("\n\n".join(map(_wrapped, text.split("\n\n"))) if wraps else text) + "\n"


def values_on_page(text: str, name: str, section: str) -> dict[str, str]:
    """Return the values in the sentences of a section, read from a written page: the inverse of `page`. Raises InputError."""
    values: dict[str, str] = {}
    for paragraph in _sections(name)[section].split("\n\n"):
        if "$" in paragraph and not paragraph.startswith(("$", "#")):
            pattern = re.sub(r"\\\$(\w+)", r"(?P<\1>.*?)", re.escape(" ".join(paragraph.split())))
            match = re.search(pattern, " ".join(text.split()))
            if match is None:
                raise InputError(f"{name}.md: the text of {section} is missing; write the page again with `make accuracy`")
            values |= match.groupdict()
    return values


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] | None = None) -> str:
    """Return a Markdown table. right: columns of numbers; all but the first if left out."""
    right = headers[1:] if right is None else right
    return markdown_table(Table(title="", headers=tuple(headers), rows=tuple(map(tuple, rows)), right=tuple(right)))


_NUMBER = re.compile(r"[-+]?[\d.,]*( \([\d.]*\))?")


def table_of_figures(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns of numbers are right-aligned."""
    return table(headers, rows, [header for i, header in enumerate(headers) if all(_NUMBER.fullmatch(row[i]) for row in rows)])


def percent(share: float) -> str:
    """Return a percentage with one decimal: 4.1 %; - for nan."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def percent_number(share: float) -> str:
    """Return a percentage without its sign: 4.1; - for nan."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def statistics_text(of: ErrorStatistics, names: str, form: Callable[[float], str] = percent_number) -> dict[str, str]:
    """Return the text of each named statistic. names: separated by spaces."""
    return {name: form(value) for name, value in picked(of, names).items()}


def _wrapped(block: str) -> str:
    """Return a paragraph or a list with lines of one width, and anything else unchanged."""
    if block.startswith(("|", "#", "!", "```")):
        return block
    if not block.startswith("- "):
        return _filled(block)
    return "\n".join(_filled(item, "- ", "  ") for item in ("\n" + block).split("\n- ")[1:])


def _filled(text: str, first: str = "", others: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), _LINE_WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
