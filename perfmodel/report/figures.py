"""Figures of predictions, searches and services.

Only this module imports matplotlib. It draws to a file and needs no display.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cost.serving.boundness import OperatorRow
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import write_atomically
from perfmodel.hardware.cluster_text import short_name
from perfmodel.parallel.plan import plan_facts
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.rows import without_total
from perfmodel.planner.result import ServingSearch, TrainingSearch
from perfmodel.report.predictions import degrees_line, workload_line
from perfmodel.report.serving import short_layout
from perfmodel.report.table import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GIB = 2.0**30

_COLOURS = read_yaml(Path(__file__).with_name("colours.yaml"))
PART_COLOURS: dict[str, str] = _COLOURS["parts"]
PASS_COLOURS: dict[str, str] = _COLOURS["passes"]
MEMORY_COLOURS: dict[str, str] = _COLOURS["memory"]
SERVING_COLOURS: dict[str, str] = {**MEMORY_COLOURS, **_COLOURS["serving"]}
MARK_COLOURS: dict[str, str] = _COLOURS["marks"]
LINE_COLOURS: list[str] = _COLOURS["lines"]
_OTHER = "#999999"
_DARK = {"#0072B2", "#D55E00", "#009E73", "#555555"}
_THINNEST = 0.005  # share of the tallest bar below which a segment is not visible
_LABEL_HEIGHT = 0.06  # height of the label of a bar's total, as a share of the axis
_SMALLEST_LABEL = 0.06  # share of the tallest bar below which a segment has no number


#: Most bars of a figure; most bars with a number in each segment; largest width [inch] (1,600 pixels).
_MOST_BARS = 12
_FEW_BARS = 4
_WIDEST = 10.6
#: Memory above which a baseline that does not fit appears in the legend only, as a multiple of the usable memory.
_WIDEST_MEMORY = 3.0
#: Points per line segment between two marks that labels must not cover.
_LINE_POINTS = 50
#: Facts of a plan that follow from its other knobs.
_FOLLOWING = ("dp", "dp_replicate", "dp_shard", "num_microbatches", "rules", "sequence_parallel", "stage_layers", "order")


def predictions_figure(predictions: Sequence[Prediction], *, names: Sequence[str] = ()) -> Figure:
    """Return the figure of the predictions; of more than `_MOST_BARS` only the fastest, in the given order."""
    number = len(predictions)
    if number > _MOST_BARS:
        fastest = sorted(sorted(range(number), key=lambda index: predictions[index].step_time)[:_MOST_BARS])
        predictions, names = [predictions[index] for index in fastest], [names[index] for index in fastest] if names else ()
    labels = list(names) or _labels(predictions)
    figure = new_figure(width=min(max(8.4, 4.6 + 2.0 * len(predictions)), _WIDEST), height=5.0 if len(predictions) <= _FEW_BARS else 6.2)
    left, right = figure.subplots(1, 2)
    scale, unit = time_scale(max(prediction.step_time for prediction in predictions))
    times = [{part: time * scale for part, time in prediction.parts.items()} for prediction in predictions]
    _stack(left, labels, times, PART_COLOURS, total=[f"{prediction.step_time * scale:.3g} {unit}" for prediction in predictions])
    left.set(ylabel=f"exposed time [{unit}]", title="Step time by part")
    capacities = [prediction.memory_usable / GIB for prediction in predictions]
    sizes = [{name: size / GIB for name, size in without_total(prediction.memory).items()} for prediction in predictions]
    total = [f"{prediction.memory['total'] / GIB:.3g} GiB" for prediction in predictions]
    _stack(right, labels, sizes, MEMORY_COLOURS, total=total, lines=capacities)
    ends = [[index + side for index in range(len(predictions))] for side in (-0.45, 0.45)]
    usable = f"usable: {capacities[0]:.3g} GiB" if len(set(capacities)) == 1 else "usable of the chip"
    right.hlines(capacities, *ends, color="black", linewidth=1.5, linestyle="--", label=usable)
    right.set_ylim(top=max(right.get_ylim()[1], max(capacities) * 1.08))
    _legend(right)
    right.set(ylabel="peak memory per chip [GiB]", title="Memory by class")
    left_out = f"\nthe {_MOST_BARS} fastest of {number}" if number > _MOST_BARS else ""
    figure.suptitle(_title(predictions) + left_out, fontsize=10)
    return figure


def search_figure(result: TrainingSearch) -> Figure:
    figure = new_figure(width=8.4, height=5.2)
    axes = figure.subplots()
    baselines = [baseline for baseline in result.baselines if baseline.plans]
    shown = [*result.plans, *result.pareto, *(baseline.plans[0] for baseline in baselines)]
    scale, unit = time_scale(max(prediction.step_time for prediction in shown))

    def points(predictions: Sequence[Prediction]) -> tuple[list[float], list[float]]:
        return [plan.memory["total"] / GIB for plan in predictions], [plan.step_time * scale for plan in predictions]

    memory, time = points(sorted(result.pareto, key=lambda prediction: prediction.memory["total"]))
    shown_times = points([*result.plans, *(baseline.plans[0] for baseline in baselines if baseline.plans[0].fits)])[1]
    top = max(1.1 * max(shown_times), 1.3 * min(shown_times))
    name = "Pareto front" if max(time, default=0.0) <= top else f"Pareto front (goes on to {max(time):.3g} {unit})"
    axes.step(memory, time, where="post", color="#0072B2", linewidth=1.5, label=name, zorder=2)
    axes.plot(memory, time, "o", color="#0072B2", markersize=3.5, zorder=3)
    name = f"{len(result.plans)} best"
    axes.plot(*points(result.plans), "o", color="#E69F00", markersize=7, markeredgecolor="black", label=name, zorder=4)
    best = result.plans[0]
    name = f"best: {degrees_line(best.plan)}"
    axes.plot(*points([best]), "*", color="#D55E00", markersize=16, markeredgecolor="black", label=name, zorder=5)
    capacity = (1.0 - result.conditions.headroom) * result.conditions.usable / GIB
    for marker, baseline in zip("sD^v", baselines, strict=False):
        fits = "" if baseline.plans[0].fits else " (does not fit)"
        where, when = points(baseline.plans)
        if when[0] > top:  # only in the legend
            where, when, fits = [], [], f"{fits}: {when[0]:.3g} {unit}"
        elif where[0] > _WIDEST_MEMORY * capacity:
            where, when, fits = [], [], f" (does not fit: {where[0]:,.0f} GiB)"
        name, edge, fill = f"{baseline.name}{fits}", "#009E73", "#009E73" if baseline.plans[0].fits else "white"
        axes.plot(where, when, marker, color=fill, markeredgecolor=edge, markeredgewidth=1.5, markersize=8, label=name, zorder=4)
    axes.axvline(capacity, color="black", linewidth=1.2, linestyle="--")
    usable, in_axes = f"usable: {capacity:.3g} GiB ", axes.get_xaxis_transform()
    axes.text(capacity, 0.98, usable, transform=in_axes, rotation=90, va="top", ha="right", fontsize=8)
    drawn = [size for size, duration in zip(*points(shown), strict=True) if duration <= top and size <= _WIDEST_MEMORY * capacity]
    if max(drawn) > 6 * capacity or max(drawn) > 20 * min(drawn):
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    axes.set_ylim(0.95 * min(shown_times) if top < 3.0 * min(shown_times) else 0.0, top)
    axes.set(xlabel="peak memory per chip [GiB]", ylabel=f"step time [{unit}]")
    axes.set_title(f"{_title([best])}\n{result.num_evaluated:,} plans, {result.num_feasible:,} fit", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, framealpha=0.9, loc="best")
    return figure


def scaling_figure(predictions: Sequence[Prediction]) -> Figure:
    """Return the figure of throughput and MFU against the number of chips, per cluster."""
    lines: dict[tuple[str, str], list[Prediction]] = {}
    between: list[tuple[float, float]] = []  # points on the MFU lines, which labels must not cover
    for prediction in sorted(predictions, key=lambda prediction: prediction.plan.num_chips):
        lines.setdefault((prediction.plan.cluster, prediction.plan.profile), []).append(prediction)
    figure = new_figure(width=10.4, height=4.8)
    left, right = figure.subplots(1, 2)
    largest = max(prediction.tokens_per_second for prediction in predictions)
    scale, unit = next((s, u) for s, u in ((1e6, "million "), (1e3, "thousand "), (1.0, "")) if largest >= s or s == 1.0)
    for (cluster, profile), group in lines.items():
        chips = [prediction.plan.num_chips for prediction in group]
        label = cluster if len({name for _, name in lines}) == 1 else f"{cluster}, {profile}"
        rate = [prediction.tokens_per_second / scale for prediction in group]
        (line,) = left.plot(chips, rate, "o-", label=label)
        left.plot(chips, [rate[0] * n / chips[0] for n in chips], ":", color=line.get_color(), linewidth=1.0)
        mfu = [100.0 * prediction.mfu_palm for prediction in group]
        right.plot(chips, mfu, "o-", color=line.get_color(), label=label)
        for (n, low), (m, high) in pairwise(zip(chips, mfu, strict=True)):
            shares = [index / _LINE_POINTS for index in range(1, _LINE_POINTS)]
            between += [(n * (m / n) ** share, low + share * (high - low)) for share in shares]
    shown = sorted({prediction.plan.num_chips for prediction in predictions})
    for axes in (left, right):
        axes.set_xlabel("chips")
        if len(shown) > 1:
            axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [f"{n:,}" for n in shown])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.margins(x=0.12)
    if len(shown) > 1:
        left.set_yscale("log")
        plain_numbers(left.yaxis)
    left.set_ylabel(f"throughput [{unit}tokens/s]")
    left.set_title("Throughput of the best plan (dotted: linear scaling)", fontsize=9)
    right.set(ylabel="MFU (PaLM) [%]", ylim=(0.0, 1.1 * right.get_ylim()[1]))
    right.set_title("MFU and layout of the best plan", fontsize=9)
    left.legend(fontsize=8, frameon=False)
    figure.suptitle(_title(predictions), fontsize=10)
    figure.draw_without_rendering()  # the layout of the axes determines the free positions of labels
    layouts = [(degrees_line(prediction.plan), (prediction.plan.num_chips, 100.0 * prediction.mfu_palm)) for prediction in predictions]
    label_marks(right, layouts, [*(spot for _, spot in layouts), *between])
    return figure


def time_scale(longest: float) -> tuple[float, str]:
    """Return the scale and the unit of a time axis."""
    return (1.0, "s") if longest >= 1.0 else (1e3, "ms")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the file extension."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".").lower(), dpi=150)
    write_atomically(path, buffer.getvalue())


def new_figure(*, width: float, height: float) -> Figure:
    """Return an empty figure without a display. [inch]

    The first import of matplotlib fails on an unknown MPLBACKEND and warns if its cache folder is not writable. A figure in a file needs
    neither, so both checks are switched off.
    """
    backend = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib.figure import Figure
    finally:
        logger.setLevel(level)
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure(figsize=(width, height), layout="constrained")


def _title(predictions: Sequence[Prediction]) -> str:
    plans = [prediction.plan for prediction in predictions]
    first = workload_line(plans[0])
    if any(workload_line(plan) != first for plan in plans):
        return "Plans of different jobs"
    clusters = {(plan.num_chips, plan.cluster) for plan in plans}
    return f"{first}\non {plans[0].num_chips:,} chips of {short_name(plans[0].cluster)}" if len(clusters) == 1 else first


def _labels(predictions: Sequence[Prediction]) -> list[str]:
    if len(predictions) == 1:
        return ["\n".join(degrees_line(predictions[0].plan).split(", "))]
    labels = [f"{prediction.plan.num_chips:,} chips\n{short_name(prediction.plan.cluster)}" for prediction in predictions]
    if len(set(labels)) == len(labels):
        return labels
    facts = [plan_facts(prediction.plan) for prediction in predictions]
    varying = [name for name in facts[0] if len({str(row.get(name)) for row in facts}) > 1]
    given = [name for name in varying if name not in _FOLLOWING]
    names = given if len({tuple(str(row.get(name)) for name in given) for row in facts}) == len(facts) else varying
    return ["\n".join(f"{words(name)} {row.get(name)}" for name in names) for row in facts]


def _stack(
    axes: Axes,
    labels: Sequence[str],
    columns: Sequence[dict[str, float]],
    colours: dict[str, str],
    *,
    total: Sequence[str],
    lines: Sequence[float] = (),
) -> None:
    """Draw one stacked bar per column. The legend lists segments from top to bottom, without invisibly thin ones.

    lines: height of a line across each column; the label of the total must not overlap it
    """
    tallest = max(sum(column.values()) for column in columns)
    present = {name for column in columns for name, size in column.items() if size > 0}
    names = [name for name in dict.fromkeys((*colours, *columns[0])) if name in present]
    positions, is_dense = range(len(columns)), len(columns) > _FEW_BARS
    bottom = [0.0] * len(columns)
    for name in names:
        heights = [max(column.get(name, 0.0), 0.0) for column in columns]
        label = words(name) if max(heights) > _THINNEST * tallest else "_"
        colour = colours.get(name, _OTHER)
        axes.bar(positions, heights, bottom=bottom, width=0.6, color=colour, label=label, edgecolor="white", linewidth=0.5)
        for position, height, base in zip(positions, heights, bottom, strict=True):
            if height > _SMALLEST_LABEL * tallest and not is_dense:
                ink = "white" if colour in _DARK else "black"
                axes.text(position, base + height / 2, f"{height:.3g}", ha="center", va="center", fontsize=8, color=ink)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    for position, height, text in zip(positions, bottom, total, strict=True):
        line = lines[position] if lines else 0.0
        height = line if 0.0 <= line - height < _LABEL_HEIGHT * max(tallest, line) else height
        size, turned, text = (7, 90, f" {text}") if is_dense else (9, 0, text)
        axes.text(position, height, text, ha="center", va="bottom", fontsize=size, rotation=turned, fontweight="bold")
    if is_dense:
        slanted = [label.replace("\n", ", ") for label in labels]
        axes.set_xticks(list(positions), slanted, fontsize=7, rotation=40, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(list(positions), labels, fontsize=8)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(top=tallest * (1.2 if is_dense else 1.08))
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Place the legend to the right of the bars, in stacking order."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plain_numbers(axis: Any, *, subs: Sequence[float] = (1.0, 2.0, 5.0), base: float = 10.0) -> None:
    """Label a logarithmic axis with plain numbers, not powers: `subs` times the powers of `base`."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(base=base, subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter("")


_LETTER, _LINE, _GAP = 4.2, 8.0, 5.0
"""Letter width, line height and distance from the mark, for a label of 7 points. [point]"""


def label_marks(axes: Any, names: Sequence[tuple[str, tuple[float, float]]], spots: Sequence[tuple[float, float]]) -> None:
    """Label each mark on a side where the label overlaps no other mark or label and stays inside the axes.

    A label without such a side is omitted.

    spots   positions that labels must not cover
    """
    from matplotlib.transforms import Bbox

    axes.autoscale_view()
    points = 72.0 / axes.get_figure().dpi
    frame = Bbox(axes.bbox.get_points() * points)
    marks = [axes.transData.transform(spot) * points for spot in dict.fromkeys(spots)]
    occupied = [Bbox.from_extents(x - 3.0, y - 3.0, x + 3.0, y + 3.0) for x, y in marks]
    for name, spot in names:
        x, y = axes.transData.transform(spot) * points
        width = _LETTER * len(name)
        level, below, above = -_LINE / 2, -_LINE - _GAP / 2, _GAP / 2
        sideways, centred = (_GAP, -_GAP - width), -width / 2
        sides = [*((shift, level) for shift in sideways), (centred, below - _GAP / 2), (centred, above + _GAP / 2)]
        sides += [(shift, rise) for shift in sideways for rise in (below, above)]
        for shift, rise in sides:
            box = Bbox.from_bounds(x + shift, y + rise, width, _LINE)
            is_inside = frame.x0 <= box.x0 and frame.y0 <= box.y0 and box.x1 <= frame.x1 and box.y1 <= frame.y1
            if is_inside and not box.count_overlaps(occupied):
                axes.annotate(name, spot, textcoords="offset points", xytext=(box.x0 - x, rise + 1.5), fontsize=7)
                occupied.append(box)
                break


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


def front_figure(result: ServingSearch, title: str) -> Figure:
    """Return the Pareto front of a search, its best plan and its baselines: one colour and marker per layout."""
    figure = new_figure(width=9.0, height=5.6)
    axes, limits = figure.add_subplot(), result.conditions.limits
    spots = [(point.tokens_per_second_per_user, point.tokens_per_second_per_chip) for point in result.pareto]
    axes.plot(*zip(*spots, strict=True), color="#BBBBBB", linewidth=1.0, zorder=1)
    layouts: dict[str, list[tuple[float, float]]] = {}
    for point, spot in zip(result.pareto, spots, strict=True):
        layouts.setdefault(f"{short_layout(point.layout)}, {point.quantization}", []).append(spot)
    for index, (label, members) in enumerate(layouts.items()):
        per_user, per_chip = zip(*members, strict=True)
        colour = _LAYOUT_COLOURS[index % len(_LAYOUT_COLOURS)]
        marker = _LAYOUT_MARKS[index // len(_LAYOUT_COLOURS) % len(_LAYOUT_MARKS)]
        axes.scatter(per_user, per_chip, s=26, color=colour, marker=marker, label=label if index < _NAMED else None, zorder=2)
    names: list[tuple[str, tuple[float, float]]] = []
    for name, ranked, mark in [
        ("best under the limits" if limits.given() else "best", result.best, "*"),
        *((f"baseline: {baseline.name}", baseline.plans[0], "x") for baseline in result.baselines if baseline.plans),
    ]:
        spot = (ranked.prediction.tokens_per_second_per_user, ranked.tokens_per_second_per_chip)
        axes.scatter(*spot, s=120 if mark == "*" else 45, color="#000000", marker=mark, zorder=3)
        names.append((name, spot))
    if limits.tpot is not None:
        name = f"TPOT limit: {1e3 * limits.tpot:.3g} ms"
        axes.axvline(1.0 / limits.tpot, color="#D55E00", linewidth=1.0, linestyle="--", label=name)
    axes.set(xlabel="output tokens/s per user", ylabel="output tokens/s per chip")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="upper right")
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()
    label_marks(axes, names, spots)
    return figure
