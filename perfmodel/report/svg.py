"""Figures as inline SVG; the `title` of each mark is its tooltip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from perfmodel.report.html import Markup, legend

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720.0, 62.0, 12.0, 10.0, 40.0
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


@dataclass(frozen=True, slots=True)
class Slot:
    """A time slot in a row of a schedule."""

    start: float
    time: float
    kind: str
    text: str


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


def _axis(low: float, high: float, start: float, end: float) -> Scale:
    scale = (end - start) / ((high - low) or 1.0)
    return lambda value: start + (value - low) * scale


def _across(x: Scale, low: float, high: float, height: float, label: str) -> Iterator[str]:
    """Yield the horizontal axis below a figure."""
    for value in ticks(low, high, 8):
        yield f'<path class="grid" d="M{_number(x(value))} {_number(_TOP)}V{_number(height - _BOTTOM)}"/>'
        yield _text(x(value), height - _BOTTOM + 15, f"{value:.6g}")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, label)


def _upright(y: Scale, low: float, high: float, label: str) -> Iterator[str]:
    """Yield the vertical axis on the left."""
    for value in ticks(low, high):
        yield f'<path class="grid" d="M{_number(_LEFT)} {_number(y(value))}H{_number(_WIDTH - _RIGHT)}"/>'
        yield _text(_LEFT - 6, y(value) + 4, f"{value:.6g}", "end")
    middle = (y(low) + y(high)) / 2
    yield _text(14, middle, label, more=f' transform="rotate(-90 14 {_number(middle)})"')


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
    x, y = _axis(0.0, end, _LEFT, _WIDTH - _RIGHT), _axis(0.0, top, height - _BOTTOM, _TOP)
    columns: dict[int, Mapping[str, float]] = {}
    for time, sizes in points:
        pixel = round(x(time))
        if pixel not in columns or sum(sizes.values()) >= sum(columns[pixel].values()):
            columns[pixel] = sizes
    body = [*_across(x, 0.0, end, height, x_label), *_upright(y, 0.0, top, y_label)]
    for number in range(len(names), 0, -1):
        name, below = names[number - 1], names[:number]
        path, last = [f"M{_number(_LEFT)} {_number(y(0.0))}"], ""
        for pixel, sizes in columns.items():
            up = _number(y(sum(sizes.get(part, 0.0) for part in below)))
            if up != last:
                path.append(f"H{pixel}V{up}")
            last = up
        most = max(sizes.get(name, 0.0) for _, sizes in points)
        title = f"<title>{escape(name.replace('_', ' '))}: at most {most:.4g} {escape(y_label.partition('[')[2].rstrip(']'))}</title>"
        path.append(f"H{_number(_WIDTH - _RIGHT)}V{_number(y(0.0))}Z")
        body.append(f'<path fill="{colours.get(name, "#999999")}" d="{"".join(path)}">{title}</path>')
    body.append(f'<path class="limit" d="M{_number(_LEFT)} {_number(y(limit))}H{_number(_WIDTH - _RIGHT)}"><title>usable</title></path>')
    shown = {name.replace("_", " "): colours.get(name, "#999999") for name in reversed(names)}
    return Markup(_svg(height, "memory over the step", body) + legend(shown))


def schedule(rows: Sequence[tuple[str, Sequence[Slot]]], colours: Mapping[str, str], *, start: float, end: float, x_label: str) -> Markup:
    """Return the passes of each pipeline stage between two times."""
    height = _TOP + _BOTTOM + len(rows) * (_ROW + _GAP)
    x = _axis(start, end, _LEFT, _WIDTH - _RIGHT)
    body = list(_across(x, start, end, height, x_label))
    for number, (label, slots) in enumerate(rows):
        top = _TOP + number * (_ROW + _GAP)
        body.append(_text(_LEFT - 6, top + _ROW / 2 + 4, label, "end"))
        for slot in slots:
            left, right = max(slot.start, start), min(slot.start + slot.time, end)
            if right > left:
                size = f'x="{x(left):.2f}" y="{_number(top)}" width="{max(x(right) - x(left) - 0.3, 0.1):.2f}" height="{_number(_ROW)}"'
                body.append(f'<rect {size} fill="{colours[slot.kind]}"><title>{escape(slot.text)}</title></rect>')
    return Markup(_svg(height, "pipeline schedule", body))


def scatter(
    marks: Sequence[Mark],
    colours: Mapping[str, str],
    *,
    limit: float,
    x_label: str,
    y_label: str,
    limit_text: str = "usable",
    is_whole: bool = False,
) -> Markup:
    """Return a scatter plot with lines through the Pareto front and at the limit of x.

    limit      0: no line
    is_whole   draw all points; False: only count points far above the limit or the least y
    """
    height = 360.0
    least = min(mark.y for mark in marks)
    drawn = [mark for mark in marks if is_whole or (mark.x <= _WIDEST * limit and mark.y <= _WIDEST * least)]
    wide, tall = max([limit, *(mark.x for mark in drawn)]) * 1.06, max((mark.y for mark in drawn), default=least) * 1.04
    low = max(min(least, *(mark.y for mark in drawn)) - 0.1 * (tall - least), 0.0)
    x, y = _axis(0.0, wide, _LEFT, _WIDTH - _RIGHT), _axis(low, tall, height - _BOTTOM, _TOP)
    body = [*_across(x, 0.0, wide, height, x_label), *_upright(y, low, tall, y_label)]
    if limit:
        line = f"M{_number(x(limit))} {_number(_TOP)}V{_number(height - _BOTTOM)}"
        body.append(f'<path class="limit" d="{line}"><title>{escape(limit_text)}</title></path>')
    front = sorted((mark for mark in drawn if mark.is_front), key=lambda mark: mark.x)
    if front:
        path = "".join(f"H{_number(x(mark.x))}V{_number(y(mark.y))}" for mark in front[1:])
        body.append(f'<path class="front" d="M{_number(x(front[0].x))} {_number(y(front[0].y))}{path}"/>')
    for mark in sorted(drawn, key=lambda mark: -list(colours).index(mark.kind)):
        position = f'cx="{_number(x(mark.x))}" cy="{_number(y(mark.y))}" r="{_RADIUS:g}"'
        body.append(f'<circle class="dot" {position} fill="{colours[mark.kind]}"><title>{escape(mark.text)}</title></circle>')
    left_out = f"<p>{len(marks) - len(drawn)} slower or larger ones are in the table only.</p>" if len(drawn) < len(marks) else ""
    kinds = {kind: colour for kind, colour in colours.items() if any(mark.kind == kind for mark in drawn)}
    return Markup(_svg(height, f"{y_label} against {x_label}", body) + legend(kinds) + left_out)
