"""Figures of explorations: curves or a heat map along axes, shares of the time, a tornado chart and a waterfall."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.planner.exploration import Exploration, Sensitivities, Waterfall
from perfmodel.report.explorations import job_text, time_text
from perfmodel.report.figures import new_figure, plain_numbers, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour-blind-safe (Okabe & Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
_SHARES = {"compute": "#D55E00", "memory": "#0072B2", "network": "#CC79A7", "other": "#BBBBBB"}
_LEAST_CELLS = 4
"""Values of each of two numeric axes above which they are drawn as a heat map."""


def plot(found: Exploration | Sensitivities | Waterfall, path: Path) -> None:
    """Curves or a heat map along axes, a tornado chart of elasticities, or the steps of a waterfall."""
    if isinstance(found, Exploration):
        figure = exploration_figure(found)
    else:
        figure = tornado_figure(found) if isinstance(found, Sensitivities) else waterfall_figure(found)
    write_figure(figure, path)


def exploration_figure(found: Exploration) -> Figure:
    with_shares = any(point.shares for point in found.points) and len(found.axes) == 1
    figure = new_figure(width=10.0 if with_shares else 7.0, height=4.6)
    places = figure.subplots(1, 2 if with_shares else 1, squeeze=False)[0]
    figure.suptitle(job_text(next(point.prediction for point in found.points if point.prediction is not None)), fontsize=9)
    if len(found.axes) == 2 and all(axis.is_numeric and len(axis.values) >= _LEAST_CELLS for axis in found.axes):
        _heat_map(found, places[0], figure)
    else:
        _curves(found, places[0])
    if with_shares:
        texts = [found.axes[0].text(value) for value in found.axes[0].values]
        floor = [0.0] * len(found.points)
        for name, colour in _SHARES.items():
            heights = [point.shares.get(name, 0.0) for point in found.points]
            places[1].bar(texts, heights, bottom=floor, color=colour, label=name)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        places[1].set(ylabel="share of the time", xlabel=found.axes[0].name)
        places[1].tick_params(axis="x", labelrotation=45, labelsize=7)
        places[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _curves(found: Exploration, axes: Axes) -> None:
    last = found.axes[-1]
    for number, line in enumerate(found.lines()):
        where = ", ".join(axis.text(line[0].values[axis.name]) for axis in found.axes[:-1])
        texts = [point.values[last.name] if last.is_numeric else last.text(point.values[last.name]) for point in line]
        times = [point.time if math.isfinite(point.time) else math.nan for point in line]
        axes.plot(texts, times, marker="o", markersize=3, color=_COLOURS[number % len(_COLOURS)], label=where or None)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    if last.is_numeric:
        axes.set_xscale("log")
        axes.set_xticks([float(value) for value in last.values], [last.text(value) for value in last.values], rotation=45, fontsize=7)
        axes.set_xticks([], minor=True)
    axes.set(xlabel=last.name, ylabel=f"{found.metric} [s]" if found.metric != "throughput" else "s for each token and chip")
    axes.grid(which="major", alpha=0.3)
    if len(found.axes) > 1:
        axes.legend(title=", ".join(axis.name for axis in found.axes[:-1]), fontsize=7, title_fontsize=7)


def _heat_map(found: Exploration, axes: Axes, figure: Figure) -> None:
    rows, columns = found.axes
    times = [[point.time if math.isfinite(point.time) else math.nan for point in line] for line in found.lines()]
    image = axes.imshow(times, origin="lower", aspect="auto", cmap="viridis", norm="log")
    axes.set_xticks(range(len(columns.values)), [columns.text(value) for value in columns.values], rotation=45, fontsize=7)
    axes.set_yticks(range(len(rows.values)), [rows.text(value) for value in rows.values], fontsize=7)
    axes.set(xlabel=columns.name, ylabel=rows.name)
    figure.colorbar(image, ax=axes, label=f"{found.metric} [s]")


def tornado_figure(found: Sensitivities) -> Figure:
    rows = [row for row in found.elasticities if abs(row.elasticity) > 5e-4][::-1]
    figure = new_figure(width=8.0, height=1.4 + 0.4 * len(rows))
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        axes.barh(place, 100 * (row.larger - 1.0), color=_COLOURS[0], label="larger" if place == 0 else None)
        axes.barh(place, 100 * (row.smaller - 1.0), color=_COLOURS[1], label="smaller" if place == 0 else None)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel=f"change of {found.metric} for a factor of 1.1 [%]", title=job_text(found.prediction))
    axes.title.set_fontsize(9)
    axes.legend(fontsize=8)
    return figure


def waterfall_figure(found: Waterfall) -> Figure:
    names = [found.start, *(rung.change for rung in found.rungs), found.end]
    speeds = [1.0, *(found.time / rung.time for rung in found.rungs)]
    figure = new_figure(width=1.2 * len(names) + 1.0, height=4.6)
    axes = figure.add_subplot()
    axes.bar(0, speeds[0], color="#555555")
    for place, (before, after) in enumerate(pairwise(speeds), 1):
        axes.bar(place, after - before, bottom=before, color=_COLOURS[2] if after >= before else _COLOURS[1])
        axes.annotate(f"{after / before:.2f}x", (place, max(before, after)), ha="center", va="bottom", fontsize=8)
    axes.bar(len(speeds), speeds[-1], color="#555555")
    axes.annotate(f"{found.total:.2f}x", (len(speeds), speeds[-1]), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=30, fontsize=8)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.set_ylim(0.9 * min(speeds), 1.15 * max(speeds))
    axes.set(ylabel=f"speed, {found.start} = 1", title=f"{job_text(found.prediction)}\n{time_text(found.metric, found.time)} at first")
    axes.title.set_fontsize(9)
    return figure
