"""Documents as one HTML page: blocks, stacked bars and the page template. The page loads nothing from the network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.table import Table, percent, words

_ADDRESS = re.compile(r"(https?://[^\s<>\"'`]+[^\s<>\"'`.,;:)\]])")
_BAR = re.compile(r"(#+)(.*)", re.DOTALL)  # `perfmodel.report.table.bar` and the text after it
_BAR_WIDTH = 20
OTHER_COLOUR = "#999999"
PAGE, STYLE, SCRIPT = (Path(__file__).with_name(f"page.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js"))


@dataclass(frozen=True, slots=True)
class Markup:
    """An HTML fragment, such as a figure."""

    html: str


Part: TypeAlias = Block | Markup


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of stacked bars.

    sizes   of the parts; zeros and the total are not drawn
    limit   position of a line across the bar; 0: no line
    """

    label: str
    sizes: Mapping[str, float]
    total: str
    limit: float = 0.0

    @property
    def drawn(self) -> dict[str, float]:
        return {name: size for name, size in self.sizes.items() if size > 0 and name != "total"}


def section_html(title: str, parts: Iterable[Part]) -> str:
    """Return a section of a page: heading and content."""
    body = filter(None, map(part_html, parts))
    return "\n".join([f'<section id="{anchor(title)}"><h2>{escape(title)}</h2>', *body, "</section>"])


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def part_html(part: Part) -> str:
    """Return a block as HTML, with all notes and columns; empty for no notes."""
    match part:
        case Markup():
            return part.html
        case Table():
            return "\n".join(_table(part))
        case Facts():
            return "\n".join(_facts(part))
        case Notes():
            notes = [f"<li>{linked(note)}</li>" for note in part.shown(verbose=True)[0]]
            return "\n".join(["<ul>", *notes, "</ul>"]) if notes else ""
        case Command():
            return f"<pre>{escape(part.command)}</pre>"
        case Text():
            return f"<p>{linked(part.text)}</p>"


def linked(text: str) -> str:
    """Return the escaped text with URLs as links."""
    pieces = map(escape, _ADDRESS.split(text))  # every second one is an address
    return "".join(f'<a href="{piece}" rel="noreferrer">{piece}</a>' if i % 2 else piece for i, piece in enumerate(pieces))


def _facts(block: Facts) -> Iterator[str]:
    if block.title:
        yield f"<h3>{escape(block.title)}</h3>"
    lines: dict[str, list[str]] = {}
    last = ""
    for name, value in block.facts:
        last = name or last
        lines.setdefault(last, []).append(linked(value))
    yield from ("<dl>", *(f"<dt>{escape(name)}</dt><dd>{'<br>'.join(values)}</dd>" for name, values in lines.items()), "</dl>")


def _table(table: Table) -> Iterator[str]:
    sides = [' class="number"' if header in table.right else "" for header in table.headers]
    caption = f"<small>{linked(table.caption)}</small>" if table.caption else ""
    yield '<div class="scroll"><table>'
    if table.title or caption:
        yield f"<caption>{escape(table.title)} {caption}</caption>"
    heads = (f"<th{side}>{escape(header)}</th>" for header, side in zip(table.headers, sides, strict=True))
    yield from ("<thead><tr>", *heads, "</tr></thead>", "<tbody>")
    for row in table.rows:
        yield "<tr>" + "".join(f"<td{side}>{_cell(cell)}</td>" for cell, side in zip(row, sides, strict=True)) + "</tr>"
    yield "</tbody></table></div>"


def _cell(text: str) -> str:
    bar = _BAR.fullmatch(text)
    return f'<i class="bar" style="width:{len(bar[1]) / _BAR_WIDTH * 9:.2f}em"></i>{escape(bar[2])}' if bar else linked(text)


def bars(rows: Sequence[Bar], colours: Mapping[str, str], text: Callable[[float], str], *, with_shares: bool = False) -> Markup:
    """Return stacked bars of one scale, with a legend; a part has its size as tooltip, and its share of the bar."""
    longest = max(max(sum(row.drawn.values()), row.limit) for row in rows) or 1.0
    lines = []
    for row in rows:
        pieces = []
        for name, size in row.drawn.items():
            title = f"{words(name)}: {text(size)}" + (f", {percent(size / sum(row.drawn.values()))}" if with_shares else "")
            style = f"width:{100.0 * size / longest:.3f}%;background:{colours.get(name, OTHER_COLOUR)}"
            pieces.append(f'<i style="{style}" title="{escape(title)}"></i>')
        limit = f'<u style="left:{100.0 * row.limit / longest:.3f}%"></u>' if row.limit else ""
        head = f"<span>{escape(row.label)}</span><b>{escape(row.total)}</b>"
        lines.append(f'<div class="stack">{head}<div>{"".join(pieces)}{limit}</div></div>')
    return Markup("\n".join([*lines, legend(dict.fromkeys(name for row in rows for name in row.drawn), colours)]))


def legend(names: Iterable[str], colours: Mapping[str, str]) -> str:
    entries = (f'<span><i style="background:{colours.get(name, OTHER_COLOUR)}"></i>{escape(words(name))}</span>' for name in names)
    return f'<p class="legend">{"".join(entries)}</p>'
