"""Figures of serving: the roofline of the operators of a step, and the Pareto front of throughput per chip and per user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.cost.serving.boundness import OperatorRow
from perfmodel.planner.serving.result import ServingSearchResult
from perfmodel.report.figures import LINE_COLOURS, label_marks, new_figure, plain_numbers
from perfmodel.report.serving import short_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colour-blind-safe colours (Okabe & Ito).
BOUND_COLOURS = {"compute": "#D55E00", "memory": "#0072B2", "latency": "#999999", "link": "#CC79A7", "host": "#555555"}
_LAYOUT_COLOURS = LINE_COLOURS[:6]
_LAYOUT_MARKS = ("o", "s", "^", "D")
#: Points on the roofline that labels must not cover.
_ROOF_POINTS = 200
#: Most layouts in the legend.
_NAMED = 12
_MARKS = {"decode": "o", "prefill": "s"}


def roofline_figure(rows: Sequence[OperatorRow], title: str) -> Figure:
    """Return operators on the roofline of the chip: memory bandwidth as the slope, and one peak FLOP rate per compute format.

    Circles: decode; squares: prefill.
    """
    shown = [row for row in rows if row.flops > 0 and row.bytes > 0]
    figure = new_figure(width=9.0, height=5.6)
    axes = figure.add_subplot()
    low, high = min(row.intensity for row in shown) / 2, max(max(row.intensity, row.ridge) for row in shown) * 2
    roof: list[tuple[float, float]] = []
    for ridge, bandwidth in sorted({(row.ridge, row.bandwidth) for row in shown}):
        level = bandwidth * ridge / 1e12
        axes.plot([low, ridge, high], [bandwidth * low / 1e12, level, level], color="#333333", linewidth=1.0)
        slope = [low * (high / low) ** (index / _ROOF_POINTS) for index in range(_ROOF_POINTS + 1)]
        roof += [(intensity, min(bandwidth * intensity / 1e12, level)) for intensity in slope]
    spots = [(row.intensity, row.flops / row.time / 1e12) for row in shown]
    for row, spot in zip(shown, spots, strict=True):
        axes.scatter(*spot, s=36, marker=_MARKS[row.phase], color=BOUND_COLOURS[row.bound], zorder=3)
    for bound in dict.fromkeys(row.bound for row in shown):
        axes.scatter([], [], color=BOUND_COLOURS[bound], label=f"{bound}-bound")
    for phase in dict.fromkeys(row.phase for row in shown):
        axes.scatter([], [], color="#333333", marker=_MARKS[phase], label=phase)
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity [FLOP/byte]", ylabel="achieved TFLOP/s per chip")
    axes.set_title(title, fontsize=9)
    longest = sorted(zip(shown, spots, strict=True), key=lambda mark: -mark[0].time)[:8]
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis, subs=(1.0,))
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(which="major", alpha=0.3)
    figure.draw_without_rendering()
    label_marks(axes, [(row.name.rpartition(".")[2], spot) for row, spot in longest], [*spots, *roof])
    return figure


def front_figure(result: ServingSearchResult, title: str) -> Figure:
    """Return the Pareto front of a search, its best plan and its baselines: one colour and marker per layout."""
    figure = new_figure(width=9.0, height=5.6)
    axes = figure.add_subplot()
    spots = [(point.tokens_per_second_per_user, point.tokens_per_second_per_chip) for point in result.pareto]
    axes.plot(*zip(*spots, strict=True), color="#BBBBBB", linewidth=1.0, zorder=1)
    layouts: dict[str, list[tuple[float, float]]] = {}
    for point, spot in zip(result.pareto, spots, strict=True):
        layouts.setdefault(f"{short_plan(point.plan)}, {point.quantization}", []).append(spot)
    for index, (label, members) in enumerate(layouts.items()):
        per_user, per_chip = zip(*members, strict=True)
        colour = _LAYOUT_COLOURS[index % len(_LAYOUT_COLOURS)]
        marker = _LAYOUT_MARKS[index // len(_LAYOUT_COLOURS) % len(_LAYOUT_MARKS)]
        axes.scatter(per_user, per_chip, s=26, color=colour, marker=marker, label=label if index < _NAMED else None, zorder=2)
    names: list[tuple[str, tuple[float, float]]] = []
    for name, ranked, mark in [
        ("best under the limits" if result.limits.given() else "best", result.best, "*"),
        *((f"baseline: {baseline.name}", baseline.plans[0], "x") for baseline in result.baselines if baseline.plans),
    ]:
        spot = (ranked.prediction.tokens_per_second_per_user, ranked.tokens_per_second_per_chip)
        axes.scatter(*spot, s=120 if mark == "*" else 45, color="#000000", marker=mark, zorder=3)
        names.append((name, spot))
    if result.limits.tpot is not None:
        limit = 1.0 / result.limits.tpot
        axes.axvline(limit, color="#D55E00", linewidth=1.0, linestyle="--", label=f"TPOT limit: {1e3 * result.limits.tpot:.3g} ms")
    axes.set(xlabel="output tokens/s per user", ylabel="output tokens/s per chip")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="upper right")
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()
    label_marks(axes, names, spots)
    return figure
