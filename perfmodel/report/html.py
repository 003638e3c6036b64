"""Documents as one HTML page: blocks, stacked bars and the page template. The page loads nothing from the network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TypeAlias

from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.table import Table

_ADDRESS = re.compile(r"https?://[^\s<>\"'`]+[^\s<>\"'`.,;:)\]]")
_BAR = re.compile(r"(#+)(.*)", re.DOTALL)  # `perfmodel.report.table.bar` and the text after it
_BAR_WIDTH = 20
_OTHER = "#999999"
_HTML, STYLE, SCRIPT = (Path(__file__).with_name(f"page.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js"))


@dataclass(frozen=True, slots=True)
class Markup:
    """An HTML fragment, such as a figure."""

    html: str


@dataclass(frozen=True, slots=True)
class Folded:
    """A long text that expands on a click on its title."""

    title: str
    text: str


Part: TypeAlias = Block | Markup | Folded


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of a page: heading and content."""

    title: str
    parts: Sequence[Part]

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of stacked bars.

    limit   position of a line across the bar; 0: no line
    """

    label: str
    sizes: Mapping[str, float]
    total: str
    limit: float = 0.0


def page_html(title: str, verdict: str, cards: Iterable[tuple[str, str, str]], sections: Sequence[PageSection], *, made_by: str) -> str:
    """Return the HTML page.

    cards   (name, number, remark) of each headline figure
    """
    boxes = (f"<div><span>{escape(name)}</span><b>{escape(number)}</b><small>{escape(more)}</small></div>" for name, number, more in cards)
    links = (f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in sections)
    return Template(_HTML).substitute(
        style=STYLE,
        script=SCRIPT,
        title=escape(title),
        verdict=escape(verdict),
        cards="\n".join(boxes),
        links="\n".join(links),
        body="\n".join(map(_section, sections)),
        made_by=escape(made_by),
    )


def _section(section: PageSection) -> str:
    parts = (part for part in section.parts if not (isinstance(part, Notes) and part.is_empty))
    return "\n".join([f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>', *map(part_html, parts), "</section>"])


def part_html(part: Part) -> str:
    """Return a block as HTML, with all notes and columns."""
    if isinstance(part, Markup):
        return part.html
    if isinstance(part, Folded):
        return f"<details><summary>{escape(part.title)}</summary><pre>{escape(part.text)}</pre></details>"
    return "\n".join(_lines(part))


def _lines(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        yield from (f"<h3>{escape(block.title)}</h3>",) if block.title else ()
        lines: dict[str, list[str]] = {}
        last = ""
        for name, value in block.facts:
            last = name or last
            lines.setdefault(last, []).append(linked(value))
        yield from ("<dl>", *(f"<dt>{escape(name)}</dt><dd>{'<br>'.join(values)}</dd>" for name, values in lines.items()), "</dl>")
    elif isinstance(block, Notes):
        yield from ("<ul>", *(f"<li>{linked(note)}</li>" for note in block.shown(verbose=True)[0]), "</ul>")
    elif isinstance(block, Command):
        yield f"<pre>{escape(block.command)}</pre>"
    else:
        assert isinstance(block, Text)
        yield f"<p>{linked(block.text)}</p>"


def linked(text: str) -> str:
    """Return the escaped text with URLs as links."""
    pieces, end = [], 0
    for match in _ADDRESS.finditer(text):
        address = escape(match[0])
        pieces += [escape(text[end : match.start()]), f'<a href="{address}" rel="noreferrer">{address}</a>']
        end = match.end()
    return "".join(pieces) + escape(text[end:])


def _table(table: Table) -> Iterator[str]:
    sides = [' class="number"' if header in table.right else "" for header in table.headers]
    caption = f"<small>{linked(table.caption)}</small>" if table.caption else ""
    yield '<div class="scroll"><table>'
    yield from (f"<caption>{escape(table.title)} {caption}</caption>",) if table.title or caption else ()
    yield from (
        "<thead><tr>",
        *(f"<th{side}>{escape(header)}</th>" for header, side in zip(table.headers, sides, strict=True)),
        "</tr></thead>",
    )
    yield "<tbody>"
    for row in table.rows:
        yield "<tr>" + "".join(f"<td{side}>{_cell(cell)}</td>" for cell, side in zip(row, sides, strict=True)) + "</tr>"
    yield "</tbody></table></div>"


def _cell(text: str) -> str:
    bar = _BAR.fullmatch(text)
    return f'<i class="bar" style="width:{len(bar[1]) / _BAR_WIDTH * 9:.2f}em"></i>{escape(bar[2])}' if bar else linked(text)


def bars(rows: Sequence[Bar], colours: Mapping[str, str], texts: Mapping[str, Mapping[str, str]]) -> Markup:
    """Return stacked bars of one scale, with a legend.

    texts   row label -> part -> tooltip
    """
    longest = max(max(sum(row.sizes.values()), row.limit) for row in rows) or 1.0
    lines = []
    for row in rows:
        pieces = (
            f'<i style="width:{100.0 * size / longest:.3f}%;background:{colours.get(name, _OTHER)}"'
            f' title="{escape(texts[row.label][name])}"></i>'
            for name, size in row.sizes.items()
        )
        limit = f'<u style="left:{100.0 * row.limit / longest:.3f}%"></u>' if row.limit else ""
        head = f"<span>{escape(row.label)}</span><b>{escape(row.total)}</b>"
        lines.append(f'<div class="stack">{head}<div>{"".join(pieces)}{limit}</div></div>')
    names = dict.fromkeys(name for row in rows for name, size in row.sizes.items() if size)
    return Markup("\n".join([*lines, legend({name.replace("_", " "): colours.get(name, _OTHER) for name in names})]))


def legend(colours: Mapping[str, str]) -> str:
    entries = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<p class="legend">{"".join(entries)}</p>'
