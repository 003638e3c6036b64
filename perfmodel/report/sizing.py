"""Sized clusters: the front of time and cost of a training run as table, rows, object and figure."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.units import format_count
from perfmodel.parallel.prediction import PROBABILITY
from perfmodel.parallel.training_run import SECONDS_OF_A_DAY
from perfmodel.planner.sizing import SizedRun, Sizing
from perfmodel.report.document import Facts
from perfmodel.report.figures import name_spots, new_figure, plain_numbers, write_figure
from perfmodel.report.predictions import prediction_object, settings_table, settings_title, workload_line
from perfmodel.report.table import Table, percent
from perfmodel.report.training_run import JOULES_OF_A_MEGAWATT_HOUR

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sizing_facts(found: Sizing) -> Facts:
    """The answer in a few lines."""
    run = found.runs[0].run
    lines = []
    if found.deadline < math.inf:
        within = f"cheapest in {found.deadline / SECONDS_OF_A_DAY:,.4g} days"
        lines.append((within, str(found.cheapest or "none")))
    if found.budget < math.inf:
        lines.append((f"fastest for {found.budget:,.0f} USD", str(found.fastest or "none")))
    lines += [(name, text) for name, _, text in (note.partition(": ") for note in found.notes)]
    lines.append(("based on", "`perfmodel assumptions`; --assume NAME=VALUE replaces one"))
    return Facts(f"{settings_title([each.prediction for each in found.runs])}, {format_count(run.tokens)} tokens", lines)


def sizing_table(found: Sizing) -> Table:
    """Every cluster and number of chips with its plan, the fastest run first."""
    runs = [each.run for each in found.runs]
    columns = {
        "days": [f"{run.wall_days:,.1f}" for run in runs],
        "USD": [f"{run.cost:,.0f}" for run in runs],
        "goodput": [percent(run.goodput) for run in runs],
        "MWh": [f"{run.energy / JOULES_OF_A_MEGAWATT_HOUR:,.0f}" if run.energy else "-" for run in runs],
        "front": [found.mark(each) for each in found.runs],
    }
    table = settings_table([each.prediction for each in found.runs], of_run=columns)
    return replace(table, optional=(*table.optional, "step time", "memory", PROBABILITY))


def sizing_object(found: Sizing) -> dict[str, Any]:
    """The result as `--json` has it. `front`, `cheapest`, `fastest`, `best` and `nearest` are places in `runs`."""

    def place(each: SizedRun | None) -> int | None:
        return None if each is None else found.runs.index(each)

    return {
        "tokens": found.runs[0].run.tokens,
        "deadline": found.deadline if found.deadline < math.inf else None,
        "budget": found.budget if found.budget < math.inf else None,
        "runs": [
            {"cluster": each.cluster, "chips": each.num_chips, "meets": found.meets(each)}
            | prediction_object(each.prediction)
            | {"run": each.run.to_dict()}
            for each in found.runs
        ],
        "front": [place(each) for each in found.front],
        "cheapest": place(found.cheapest),
        "fastest": place(found.fastest),
        "best": place(found.best),
        "nearest": place(found.nearest),
        "interrupted": found.interrupted,
        "notes": list(found.notes),
        "not_searched": [{**each.asked, "reason": each.reason} for each in found.not_sized],
    }


def plot_sizing(found: Sizing, path: Path) -> None:
    """Cost against time: a line for each cluster, a point for each number of chips, the front, deadline and budget."""
    write_figure(sizing_figure(found), path)


def sizing_figure(found: Sizing) -> Figure:
    figure = new_figure(width=8.4, height=5.2)
    axes = figure.subplots()
    scale, unit = (1e6, "million USD") if max(each.run.cost for each in found.runs) >= 1e6 else (1e3, "thousand USD")

    def spot(each: SizedRun) -> tuple[float, float]:
        return each.run.wall_days, each.run.cost / scale

    lines: dict[tuple[str, str], list[SizedRun]] = {}
    for each in found.runs:
        lines.setdefault((each.cluster, each.prediction.plan.profile), []).append(each)
    for (cluster, profile), some in lines.items():
        label = cluster if len({name for _, name in lines}) == 1 else f"{cluster}, {profile}"
        axes.plot(*zip(*map(spot, some), strict=True), "o-", markersize=4, linewidth=1.0, label=label)
    on_front = zip(*map(spot, found.front), strict=True)
    axes.plot(*on_front, "o", markersize=9, markerfacecolor="none", markeredgecolor="black", label="front of time and cost")
    for marked, marker, name in ((found.cheapest, "*", "cheapest by the deadline"), (found.fastest, "P", "fastest within the budget")):
        if marked is not None:
            axes.plot(*spot(marked), marker, markersize=14, color="#D55E00", markeredgecolor="black", label=name, linestyle="none")
    axes.set_xscale("log")
    axes.set_yscale("log")
    if found.deadline < math.inf:
        axes.axvline(found.deadline / SECONDS_OF_A_DAY, color="black", linestyle="--", linewidth=1.0)
    if found.budget < math.inf:
        axes.axhline(found.budget / scale, color="black", linestyle="--", linewidth=1.0)
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
    axes.set(xlabel="days with failures and checkpoints", ylabel=f"cost [{unit}]")
    first = found.runs[0]
    axes.set_title(f"{workload_line(first.prediction.plan)}\n{format_count(first.run.tokens)} tokens; labels: chips", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, framealpha=0.9)
    figure.draw_without_rendering()  # the layout of the axes decides where labels have room
    labels = [(f"{each.num_chips:,}", spot(each)) for each in found.runs]
    name_spots(axes, labels, [where for _, where in labels])
    return figure
