"""Figures of serving: the roofline of a step's operators, and the front of throughput against what a user sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.cost.serving.boundness import OperatorRow
from perfmodel.report.figures import new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colour-blind-safe (Okabe & Ito).
BOUND_COLOURS = {"compute": "#D55E00", "memory": "#0072B2", "latency": "#999999", "link": "#CC79A7", "host": "#555555"}
_MARKS = {"decode": "o", "prefill": "s"}


def plot_roofline(rows: Sequence[OperatorRow], title: str, path: Path) -> None:
    """Each operator with FLOP at its intensity and rate, below the chip's roof; round ones decode, square ones prefill."""
    write_figure(roofline_figure(rows, title), path)


def roofline_figure(rows: Sequence[OperatorRow], title: str) -> Figure:
    """The roof's slope is the memory's rate; it has a level for each format that products are computed in."""
    shown = [row for row in rows if row.flops > 0 and row.bytes > 0]
    figure = new_figure(width=9.0, height=5.6)
    axes = figure.add_subplot()
    low, high = min(row.intensity for row in shown) / 2, max(max(row.intensity, row.ridge) for row in shown) * 2
    for ridge, bandwidth in sorted({(row.ridge, row.bandwidth) for row in shown}):
        level = bandwidth * ridge / 1e12
        axes.plot([low, ridge, high], [bandwidth * low / 1e12, level, level], color="#333333", linewidth=1.0)
    for row in shown:
        axes.scatter(row.intensity, row.flops / row.time / 1e12, s=36, marker=_MARKS[row.phase], color=BOUND_COLOURS[row.bound], zorder=3)
    for row in sorted(shown, key=lambda row: -row.time)[:8]:
        place = (row.intensity, row.flops / row.time / 1e12)
        axes.annotate(row.name.rpartition(".")[2], place, textcoords="offset points", xytext=(6, -9), fontsize=7)
    for bound in dict.fromkeys(row.bound for row in shown):
        axes.scatter([], [], color=BOUND_COLOURS[bound], label=f"bound by {bound}")
    for phase in dict.fromkeys(row.phase for row in shown):
        axes.scatter([], [], color="#333333", marker=_MARKS[phase], label=phase)
    axes.set(xscale="log", yscale="log", xlabel="intensity [FLOP/byte]", ylabel="TFLOP/s reached on a chip")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(which="major", alpha=0.3)
    return figure
