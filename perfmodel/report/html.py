"""Documents as one HTML page: blocks, stacked bars, SVG figures and the page template. The page loads nothing from the network.

The `title` of each mark of a figure is its tooltip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from perfmodel.foundation.text import percent
from perfmodel.parallel.rows import without_total
from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.table import Table, times_like, words

if TYPE_CHECKING:
    from perfmodel.cost.trace import RankTimeline

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
        return {name: size for name, size in without_total(self.sizes).items() if size > 0}


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
            lines: dict[str, list[str]] = {}
            last = ""
            for name, value in part.facts:
                last = name or last
                lines.setdefault(last, []).append(linked(value))
            title = [f"<h3>{escape(part.title)}</h3>"] if part.title else []
            entries = (f"<dt>{escape(name)}</dt><dd>{'<br>'.join(values)}</dd>" for name, values in lines.items())
            return "\n".join([*title, "<dl>", *entries, "</dl>"])
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


def _table(table: Table) -> Iterator[str]:
    sides = [' class="number"' if header in table.right else "" for header in table.headers]
    caption = f"<small>{linked(table.caption)}</small>" if table.caption else ""
    yield '<div class="scroll"><table>'
    if table.title or caption:
        yield f"<caption>{escape(table.title)} {caption}</caption>"
    heads = (f"<th{side}>{escape(header)}</th>" for header, side in zip(table.headers, sides, strict=True))
    yield from ("<thead><tr>", *heads, "</tr></thead>", "<tbody>")
    for row in table.rows:
        cells = ""
        for cell, side in zip(row, sides, strict=True):
            bar = _BAR.fullmatch(cell)
            drawn = f'<i class="bar" style="width:{len(bar[1]) / _BAR_WIDTH * 9:.2f}em"></i>{escape(bar[2])}' if bar else linked(cell)
            cells += f"<td{side}>{drawn}</td>"
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


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


# --- figures as SVG ---------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720.0, 62.0, 12.0, 10.0, 40.0
_TO_RIGHT = f"H{_WIDTH - _RIGHT:g}"
_ROW, _GAP = 20.0, 4.0
_RADIUS = 5.5
_WIDEST = 3.0  # range of an axis, as a multiple of the limit or of the least value; points beyond are not drawn

Scale: TypeAlias = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a scatter plot.

    is_front   on the Pareto front, drawn as a line
    """

    x: float
    y: float
    kind: str
    text: str
    is_front: bool = False


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1.0, 2.0, 5.0, 10.0) if power * size >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _svg(height: float, label: str, body: Sequence[str]) -> str:
    head = f'<div class="scroll"><svg viewBox="0 0 {_WIDTH:g} {_number(height)}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *body, "</svg></div>"])


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(kind: str, x: float, y: float, path: str, title: str = "") -> str:
    """Return a path of the page's style `kind` from a point. title: its tooltip."""
    end = f"><title>{escape(title)}</title></path>" if title else "/>"
    return f'<path class="{kind}" d="M{_number(x)} {_number(y)}{path}"{end}'


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    scale = (end - start) / ((high - low) or 1.0)
    return lambda value: start + (value - low) * scale


def _across(low: float, high: float, height: float, label: str) -> tuple[Scale, list[str]]:
    """Return the horizontal scale of a figure, and its axis below."""
    x, lines = _scale(low, high, _LEFT, _WIDTH - _RIGHT), []
    for value in ticks(low, high, 8):
        lines += [_line("grid", x(value), _TOP, f"V{_number(height - _BOTTOM)}"), _text(x(value), height - _BOTTOM + 15, f"{value:.6g}")]
    return x, [*lines, _text((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, label)]


def _upright(low: float, high: float, height: float, label: str) -> tuple[Scale, list[str]]:
    """Return the vertical scale of a figure, and its axis on the left."""
    y, lines = _scale(low, high, height - _BOTTOM, _TOP), []
    for value in ticks(low, high):
        lines += [_line("grid", _LEFT, y(value), _TO_RIGHT), _text(_LEFT - 6, y(value) + 4, f"{value:.6g}", "end")]
    middle = (y(low) + y(high)) / 2
    return y, [*lines, _text(14, middle, label, more=f' transform="rotate(-90 14 {_number(middle)})"')]


def area(
    points: Sequence[tuple[float, Mapping[str, float]]], colours: Mapping[str, str], *, limit: float, x_label: str, y_label: str
) -> Markup:
    """Return a stacked area chart; each value holds until the next point.

    Of several points in one pixel, the largest total is drawn.
    """
    height, end = 300.0, points[-1][0]
    names = [name for name in dict.fromkeys(name for _, sizes in points for name in sizes) if any(sizes.get(name) for _, sizes in points)]
    names.sort(key=lambda name: -min(sizes.get(name, 0.0) for _, sizes in points))  # constant classes at the bottom
    top = 1.05 * max(limit, *(sum(sizes.values()) for _, sizes in points))
    (x, across), (y, upright) = _across(0.0, end, height, x_label), _upright(0.0, top, height, y_label)
    columns: dict[int, Mapping[str, float]] = {}
    for time, sizes in points:
        pixel = round(x(time))
        if pixel not in columns or sum(sizes.values()) >= sum(columns[pixel].values()):
            columns[pixel] = sizes
    body, unit = [*across, *upright], escape(y_label.partition("[")[2].rstrip("]"))
    for number in range(len(names), 0, -1):
        name, below = names[number - 1], names[:number]
        path, last = [f"M{_number(_LEFT)} {_number(y(0.0))}"], ""
        for pixel, sizes in columns.items():
            up = _number(y(sum(sizes.get(part, 0.0) for part in below)))
            if up != last:
                path.append(f"H{pixel}V{up}")
            last = up
        most = max(sizes.get(name, 0.0) for _, sizes in points)
        path.append(f"{_TO_RIGHT}V{_number(y(0.0))}Z")
        title = f"<title>{escape(words(name))}: at most {most:.4g} {unit}</title>"
        body.append(f'<path fill="{colours.get(name, OTHER_COLOUR)}" d="{"".join(path)}">{title}</path>')
    body.append(_line("limit", _LEFT, y(limit), _TO_RIGHT, "usable"))
    return Markup(_svg(height, "memory over the step", body) + legend(reversed(names), colours))


def schedule(timelines: Sequence[RankTimeline], colours: Mapping[str, str], *, start: float, end: float, scale: float, unit: str) -> Markup:
    """Return the passes of each pipeline stage between two times, in units of the figure.

    scale   units of the figure in a second
    """
    height = _TOP + _BOTTOM + len(timelines) * (_ROW + _GAP)
    x, body = _across(start, end, height, f"time [{unit}]")
    text = times_like(timelines[0].step_time)
    for number, timeline in enumerate(timelines):
        top = _TOP + number * (_ROW + _GAP)
        body.append(_text(_LEFT - 6, top + _ROW / 2 + 4, f"stage {timeline.stage}", "end"))
        for span in timeline.passes:
            left, right = max(span.start * scale, start), min(span.start * scale + span.time * scale, end)
            if right > left:
                size = f'x="{x(left):.2f}" y="{_number(top)}" width="{max(x(right) - x(left) - 0.3, 0.1):.2f}" height="{_number(_ROW)}"'
                title = f"{span.name}, stage {timeline.stage}: {text(span.start)} to {text(span.start + span.time)}"
                body.append(f'<rect {size} fill="{colours[span.part]}"><title>{escape(title)}</title></rect>')
    return Markup(_svg(height, "pipeline schedule", body))


def scatter(
    marks: Sequence[Mark],
    colours: Mapping[str, str],
    labels: tuple[str, str],
    *,
    limit: float,
    limit_text: str = "usable",
    is_whole: bool = False,
) -> Markup:
    """Return a scatter plot with lines through the Pareto front and at the limit of x.

    labels     of the axes
    limit      0: no line
    is_whole   draw all points; False: only count points far above the limit or the least y
    """
    height = 360.0
    least = min(mark.y for mark in marks)
    drawn = [mark for mark in marks if is_whole or (mark.x <= _WIDEST * limit and mark.y <= _WIDEST * least)]
    wide, tall = max([limit, *(mark.x for mark in drawn)]) * 1.06, max((mark.y for mark in drawn), default=least) * 1.04
    low = max(min(least, *(mark.y for mark in drawn)) - 0.1 * (tall - least), 0.0)
    (x, across), (y, upright) = _across(0.0, wide, height, labels[0]), _upright(low, tall, height, labels[1])
    body = [*across, *upright]
    if limit:
        body.append(_line("limit", x(limit), _TOP, f"V{_number(height - _BOTTOM)}", limit_text))
    front = sorted((mark for mark in drawn if mark.is_front), key=lambda mark: mark.x)
    if front:
        path = "".join(f"H{_number(x(mark.x))}V{_number(y(mark.y))}" for mark in front[1:])
        body.append(_line("front", x(front[0].x), y(front[0].y), path))
    for mark in sorted(drawn, key=lambda mark: -list(colours).index(mark.kind)):
        position = f'cx="{_number(x(mark.x))}" cy="{_number(y(mark.y))}" r="{_RADIUS:g}"'
        body.append(f'<circle class="dot" {position} fill="{colours[mark.kind]}"><title>{escape(mark.text)}</title></circle>')
    left_out = f"<p>{len(marks) - len(drawn)} slower or larger ones are in the table only.</p>" if len(drawn) < len(marks) else ""
    kinds = [kind for kind in colours if any(mark.kind == kind for mark in drawn)]
    return Markup(_svg(height, f"{labels[1]} against {labels[0]}", body) + legend(kinds, colours) + left_out)
