"""Figures of prediction errors: predicted against measured, error by scale, and its distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.resources import resource_dir
from perfmodel.report.figures import new_figure, plain_numbers, write_figure
from perfmodel.validation.judgement import ValidationResult
from perfmodel.validation.rows import TrainingRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour-blind-safe palette (Okabe & Ito) for the sources with most rows; the others share grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
_MARKERS = "osD^vPX*"
_GREY = "#AAAAAA"
_SHOWN_ERROR = 1.0
_BAND = 0.1
"""Bound of the shaded errors."""


def write_figures(result: ValidationResult, folder: Path) -> tuple[Path, ...]:
    """Write the figures as PNG to `folder`, and create it if it does not exist."""
    rows = [row for row in result.rows if row.has_time]
    if not rows:
        raise InputError("plots: no case has both a predicted and a measured time; there is nothing to draw")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"plots={folder}: cannot be made ({error.strerror}); choose another path") from None
    written = []
    for name, draw in FIGURES.items():
        path = folder / f"{name}.png"
        write_figure(draw(rows), path)
        written.append(path)
    return tuple(written)


def predicted_against_measured(rows: Sequence[TrainingRow]) -> Figure:
    figure = new_figure(width=6.6, height=6.4)
    axes = figure.subplots()
    times = [time for row in rows for time in (row.predicted_step_time, row.measured_step_time)]
    low, high = min(times) / 1.5, max(times) * 1.5
    axes.fill_between([low, high], [low * (1 - _BAND), high * (1 - _BAND)], [low * (1 + _BAND), high * (1 + _BAND)], color="#EEEEEE")
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    for label, members, style in _by_source(rows):
        axes.plot([row.measured_step_time for row in members], [row.predicted_step_time for row in members], label=label, **style)
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log")
        plain_numbers(axis, subs=(1.0,))
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    axes.set_xlabel("measured step time [s]")
    axes.set_ylabel("predicted step time [s]")
    axes.set_title(f"Step time of {len(rows):,} published training runs (shaded: error below {_BAND:.0%})", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", framealpha=0.9)
    return figure


def error_by_chips(rows: Sequence[TrainingRow]) -> Figure:
    """Plot the error against the number of chips, with median and 10th to 90th percentile for counts with enough rows."""
    figure = new_figure(width=8.4, height=5.0)
    axes = figure.subplots()
    known = [row for row in rows if not math.isnan(row.labels.num_chips)]
    axes.axhspan(-_BAND, _BAND, color="#EEEEEE")
    axes.axhline(0, color="black", linewidth=1)
    for label, members, style in _by_source(known):
        errors = [_shown(row.time_error) for row in members]
        # a horizontal jitter, deterministic for a run, separates runs with equal chips
        chips = [row.labels.num_chips * (1.0 + 0.2 * (sum(row.id.encode()) % 97 / 96 - 0.5)) for row in members]
        axes.plot(chips, errors, label=label, **style)
    axes.set_xscale("log", base=2)
    plain_numbers(axes.xaxis, subs=(1.0,), base=2)
    by_count = {count: [_shown(row.time_error) for row in rows] for count, rows in grouped(known, lambda row: row.labels.num_chips).items()}
    counts = sorted(count for count, errors in by_count.items() if len(errors) >= _ENOUGH)
    low, middle, high = np.transpose([np.quantile(by_count[count], (0.1, 0.5, 0.9)) for count in counts]) if counts else ((), (), ())
    axes.vlines(counts, low, high, color="black", linewidth=1.5, zorder=5)
    label = f"median, 10-90 % ({_ENOUGH} runs or more)"
    axes.plot(counts, middle, "D", color="white", markeredgecolor="black", markersize=6, zorder=6, label=label)
    axes.set_ylim(-0.85, _SHOWN_ERROR * 1.05)
    axes.yaxis.set_major_formatter(_percent_axis())
    axes.set_xlabel("chips")
    axes.set_ylabel("relative error, predicted / measured - 1")
    axes.set_title(f"Step-time error of {len(known):,} published runs (over +100 %: drawn at the edge)", fontsize=10)
    _legend_outside(axes)
    return figure


_ENOUGH = 8
"""Minimum number of runs for a median and a range."""


def error_distribution(rows: Sequence[TrainingRow]) -> Figure:
    """Plot a histogram of errors (left), and the cumulative distribution of absolute errors by source (right)."""
    figure = new_figure(width=10.0, height=4.6)
    left, right = figure.subplots(1, 2)
    errors = [_shown(row.time_error) for row in rows]
    left.hist(errors, bins=[i / 50 for i in range(-50, 51)], color=_COLOURS[0])
    left.axvline(0, color="black", linewidth=1)
    left.xaxis.set_major_formatter(_percent_axis())
    left.set_xlabel("relative error (last bar: over +100 %)")
    left.set_ylabel("runs")
    left.set_title(f"Step-time error of {len(rows):,} published runs", fontsize=10)
    for label, members, style in _by_source(rows):
        ordered = sorted(abs(row.time_error) for row in members)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        right.step([0, *ordered], [0, *shares], where="post", color=style["color"], label=label, linewidth=1.5)
    right.set_xlim(0, 0.5)
    right.set_ylim(0, 1)
    right.xaxis.set_major_formatter(_percent_axis())
    right.yaxis.set_major_formatter(_percent_axis())
    right.set_xlabel("absolute relative error")
    right.set_ylabel("share of runs with at most this error")
    right.set_title("Cumulative distribution by source", fontsize=10)
    right.grid(alpha=0.25)
    _legend_outside(right)
    return figure


#: Figures of `--plots`: file name -> function of the judged rows.
FIGURES: Mapping[str, Callable[[Sequence[TrainingRow]], Any]] = {
    "predicted_against_measured": predicted_against_measured,
    "error_by_chips": error_by_chips,
    "error_distribution": error_distribution,
}


def _by_source(rows: Sequence[TrainingRow]) -> list[tuple[str, list[TrainingRow], dict[str, Any]]]:
    """Return (label, rows, style) for the sources with most rows, then the rest together, in grey and in the background."""
    groups = grouped(rows, lambda row: row.labels.source)
    ordered = sorted(groups, key=lambda name: (-len(groups[name]), name))
    shown, others = ordered[: len(_COLOURS)], ordered[len(_COLOURS) :]
    names = read_yaml(resource_dir("strategies") / "source_names.yaml")  # a source of the user's own keeps its prefix
    drawn = [
        (
            f"{names.get(name, name)} ({len(groups[name]):,})",
            groups[name],
            dict(color=colour, marker=marker, markersize=4.5, linestyle="none", alpha=0.65, markeredgewidth=0),
        )
        for name, colour, marker in zip(shown, _COLOURS, _MARKERS, strict=False)
    ]
    rest = [row for name in others for row in groups[name]]
    if rest:
        style = dict(color=_GREY, marker=".", markersize=6, linestyle="none", zorder=1.5)
        drawn.append((f"{len(others)} other source{'s' * (len(others) > 1)} ({len(rest):,})", rest, style))
    return drawn


def _shown(error: float) -> float:
    return min(error, _SHOWN_ERROR)


def _percent_axis() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _legend_outside(axes: Axes) -> None:
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, framealpha=0.9)
