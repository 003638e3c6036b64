"""Figures of explorations: curves, heat maps, time shares, tornado charts and waterfalls."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from perfmodel.planner.exploration import Exploration, Sensitivities, Waterfall
from perfmodel.report.explorations import job_text, time_text
from perfmodel.report.figures import LINE_COLOURS, new_figure, plain_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARES = {"compute": "#D55E00", "memory": "#0072B2", "network": "#CC79A7", "other": "#BBBBBB"}
_LEAST_CELLS = 4
"""Fewest values of each of two numeric axes for a heat map."""


def figure_of(result: Exploration | Sensitivities | Waterfall) -> Figure:
    """Return curves or a heat map along axes, a tornado chart of elasticities, or a waterfall."""
    if isinstance(result, Exploration):
        return exploration_figure(result)
    return tornado_figure(result) if isinstance(result, Sensitivities) else waterfall_figure(result)


def exploration_figure(exploration: Exploration) -> Figure:
    with_shares = any(point.shares for point in exploration.points) and len(exploration.axes) == 1
    figure = new_figure(width=10.0 if with_shares else 7.0, height=4.6)
    panels = figure.subplots(1, 2 if with_shares else 1, squeeze=False)[0]
    figure.suptitle(job_text(next(point.prediction for point in exploration.points if point.prediction is not None)), fontsize=9)
    axes = panels[0]
    times = [[point.time if math.isfinite(point.time) else math.nan for point in line] for line in exploration.lines()]
    if len(exploration.axes) == 2 and all(axis.is_numeric and len(axis.values) >= _LEAST_CELLS for axis in exploration.axes):
        rows, columns = exploration.axes
        image = axes.imshow(times, origin="lower", aspect="auto", cmap="viridis", norm="log")
        axes.set_xticks(range(len(columns.values)), [columns.text(value) for value in columns.values], rotation=45, fontsize=7)
        axes.set_yticks(range(len(rows.values)), [rows.text(value) for value in rows.values], fontsize=7)
        axes.set(xlabel=columns.name, ylabel=rows.name)
        figure.colorbar(image, ax=axes, label=f"{exploration.metric} [s]")
    else:
        last = exploration.axes[-1]
        for number, line in enumerate(exploration.lines()):
            label = ", ".join(axis.text(line[0].values[axis.name]) for axis in exploration.axes[:-1])
            texts = [point.values[last.name] if last.is_numeric else last.text(point.values[last.name]) for point in line]
            axes.plot(texts, times[number], marker="o", markersize=3, color=LINE_COLOURS[number % len(LINE_COLOURS)], label=label or None)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        if last.is_numeric:
            axes.set_xscale("log")
            axes.set_xticks([float(value) for value in last.values], [last.text(value) for value in last.values], rotation=45, fontsize=7)
            axes.set_xticks([], minor=True)
        axes.set(
            xlabel=last.name, ylabel=f"{exploration.metric} [s]" if exploration.metric != "throughput" else "s for each token and chip"
        )
        axes.grid(which="major", alpha=0.3)
        if len(exploration.axes) > 1:
            axes.legend(title=", ".join(axis.name for axis in exploration.axes[:-1]), fontsize=7, title_fontsize=7)
    if with_shares:
        texts = [exploration.axes[0].text(value) for value in exploration.axes[0].values]
        floor = [0.0] * len(exploration.points)
        for name, colour in _SHARES.items():
            heights = [point.shares.get(name, 0.0) for point in exploration.points]
            panels[1].bar(texts, heights, bottom=floor, color=colour, label=name)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        panels[1].set(ylabel="share of the time", xlabel=exploration.axes[0].name)
        panels[1].tick_params(axis="x", labelrotation=45, labelsize=7)
        panels[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def tornado_figure(sensitivities: Sensitivities) -> Figure:
    rows = [row for row in sensitivities.elasticities if abs(row.elasticity) > 5e-4][::-1]
    figure = new_figure(width=8.0, height=1.4 + 0.4 * len(rows))
    axes = figure.add_subplot()
    axes.barh(range(len(rows)), [100 * (row.larger - 1.0) for row in rows], color=LINE_COLOURS[0], label="larger")
    axes.barh(range(len(rows)), [100 * (row.smaller - 1.0) for row in rows], color=LINE_COLOURS[1], label="smaller")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"change of {sensitivities.metric} for a factor of 1.1 [%]")
    axes.set_title(job_text(sensitivities.prediction), fontsize=9)
    axes.legend(fontsize=8)
    return figure


def waterfall_figure(waterfall: Waterfall) -> Figure:
    names = [waterfall.start, *(rung.change for rung in waterfall.rungs), waterfall.end]
    speeds = [1.0, *(waterfall.time / rung.time for rung in waterfall.rungs)]
    figure = new_figure(width=1.2 * len(names) + 1.0, height=4.6)
    axes = figure.add_subplot()
    axes.bar(0, speeds[0], color="#555555")
    for index, (before, after) in enumerate(pairwise(speeds), 1):
        axes.bar(index, after - before, bottom=before, color=LINE_COLOURS[2] if after >= before else LINE_COLOURS[1])
        axes.annotate(f"{after / before:.2f}x", (index, max(before, after)), ha="center", va="bottom", fontsize=8)
    axes.bar(len(speeds), speeds[-1], color="#555555")
    axes.annotate(f"{waterfall.total:.2f}x", (len(speeds), speeds[-1]), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=30, fontsize=8)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.set_ylim(0.9 * min(speeds), 1.15 * max(speeds))
    axes.set_ylabel(f"speed, {waterfall.start} = 1")
    axes.set_title(f"{job_text(waterfall.prediction)}\n{time_text(waterfall.metric, waterfall.time)} at first", fontsize=9)
    return figure
