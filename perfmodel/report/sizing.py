"""Sized clusters: the Pareto front of time and cost of a training run, as table, object and figure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_count
from perfmodel.parallel.prediction import PROBABILITY
from perfmodel.parallel.training_run import SECONDS_OF_A_DAY
from perfmodel.planner.sizing import SizedRun, Sizing
from perfmodel.report.document import Facts
from perfmodel.report.figures import label_marks, new_figure, plain_numbers
from perfmodel.report.predictions import prediction_object, settings_table, settings_title, workload_line
from perfmodel.report.table import Table
from perfmodel.report.training_run import JOULES_OF_A_MEGAWATT_HOUR

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sizing_facts(sizing: Sizing) -> Facts:
    """Return the cheapest and the fastest run, and the notes."""
    run = sizing.runs[0].run
    lines = []
    if sizing.deadline < math.inf:
        within = f"cheapest in {sizing.deadline / SECONDS_OF_A_DAY:,.4g} days"
        lines.append((within, str(sizing.cheapest or "none")))
    if sizing.budget < math.inf:
        lines.append((f"fastest for {sizing.budget:,.0f} USD", str(sizing.fastest or "none")))
    lines += [(name, text) for name, _, text in (note.partition(": ") for note in sizing.notes)]
    lines.append(("based on", "`perfmodel assumptions`; --assume NAME=VALUE replaces one"))
    return Facts(f"{settings_title([sized.prediction for sized in sizing.runs])}, {format_count(run.tokens)} tokens", lines)


def sizing_table(sizing: Sizing) -> Table:
    """Return one row per cluster and chip count with its plan, fastest run first."""
    runs = [sized.run for sized in sizing.runs]
    columns = {
        "days": [f"{run.wall_days:,.1f}" for run in runs],
        "USD": [f"{run.cost:,.0f}" for run in runs],
        "goodput": [percent(run.goodput) for run in runs],
        "MWh": [f"{run.energy / JOULES_OF_A_MEGAWATT_HOUR:,.0f}" if run.energy else "-" for run in runs],
        "front": [sizing.mark(sized) for sized in sizing.runs],
    }
    table = settings_table([sized.prediction for sized in sizing.runs], of_run=columns)
    return replace(table, optional=(*table.optional, "step time", "memory", PROBABILITY))


def sizing_object(sizing: Sizing) -> dict[str, Any]:
    """Return the result as the `--json` object. `front`, `cheapest`, `fastest`, `best` and `nearest` are indices into `runs`."""

    def index_of(sized: SizedRun | None) -> int | None:
        return None if sized is None else sizing.runs.index(sized)

    return {
        "tokens": sizing.runs[0].run.tokens,
        "deadline": sizing.deadline if sizing.deadline < math.inf else None,
        "budget": sizing.budget if sizing.budget < math.inf else None,
        "runs": [
            {"cluster": sized.cluster, "chips": sized.num_chips, "meets": sizing.meets(sized)}
            | prediction_object(sized.prediction)
            | {"run": sized.run.to_dict()}
            for sized in sizing.runs
        ],
        "front": [index_of(sized) for sized in sizing.front],
        "cheapest": index_of(sizing.cheapest),
        "fastest": index_of(sizing.fastest),
        "best": index_of(sizing.best),
        "nearest": index_of(sizing.nearest),
        "interrupted": sizing.interrupted,
        "notes": list(sizing.notes),
        "not_searched": [{**failure.asked, "reason": failure.reason} for failure in sizing.not_sized],
    }


def sizing_figure(sizing: Sizing) -> Figure:
    """Draw cost against time: one line per cluster, one point per chip count, Pareto front, deadline and budget."""
    figure = new_figure(width=8.4, height=5.2)
    axes = figure.subplots()
    scale, unit = (1e6, "million USD") if max(sized.run.cost for sized in sizing.runs) >= 1e6 else (1e3, "thousand USD")

    def spot(sized: SizedRun) -> tuple[float, float]:
        return sized.run.wall_days, sized.run.cost / scale

    lines: dict[tuple[str, str], list[SizedRun]] = {}
    for sized in sizing.runs:
        lines.setdefault((sized.cluster, sized.prediction.plan.profile), []).append(sized)
    for (cluster, profile), group in lines.items():
        label = cluster if len({name for _, name in lines}) == 1 else f"{cluster}, {profile}"
        axes.plot(*zip(*map(spot, group), strict=True), "o-", markersize=4, linewidth=1.0, label=label)
    on_front = zip(*map(spot, sizing.front), strict=True)
    axes.plot(*on_front, "o", markersize=9, markerfacecolor="none", markeredgecolor="black", label="front of time and cost")
    for marked, marker, name in ((sizing.cheapest, "*", "cheapest by the deadline"), (sizing.fastest, "P", "fastest within the budget")):
        if marked is not None:
            axes.plot(*spot(marked), marker, markersize=14, color="#D55E00", markeredgecolor="black", label=name, linestyle="none")
    axes.set_xscale("log")
    axes.set_yscale("log")
    if sizing.deadline < math.inf:
        axes.axvline(sizing.deadline / SECONDS_OF_A_DAY, color="black", linestyle="--", linewidth=1.0)
    if sizing.budget < math.inf:
        axes.axhline(sizing.budget / scale, color="black", linestyle="--", linewidth=1.0)
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
    axes.set(xlabel="days with failures and checkpoints", ylabel=f"cost [{unit}]")
    first = sizing.runs[0]
    axes.set_title(f"{workload_line(first.prediction.plan)}\n{format_count(first.run.tokens)} tokens; labels: chips", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, framealpha=0.9)
    figure.draw_without_rendering()  # the layout of the axes determines the free positions of labels
    labels = [(f"{sized.num_chips:,}", spot(sized)) for sized in sizing.runs]
    label_marks(axes, labels, [position for _, position in labels])
    return figure
