"""Explorations as tables and objects: points along axes, elasticities, and waterfalls from one system to another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_quantity, format_step
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.rows import prediction_row, serving_row
from perfmodel.parallel.serving_prediction import ServingPrediction, service_line
from perfmodel.planner.exploration import SATURATED, Exploration, Sensitivities, Waterfall
from perfmodel.report.predictions import short_plan_text, workload_line
from perfmodel.report.serving import short_layout
from perfmodel.report.table import Table, bar, table_of, table_of_rows
from perfmodel.uncertainty.sensitivity import STEP

_THROUGHPUT = "throughput"


def exploration_object(exploration: Exploration) -> dict[str, Any]:
    """Return the exploration as the `--json` object, in SI units."""
    return {
        "metric": exploration.metric,
        "searched": exploration.is_searched,
        "axes": [{"name": axis.name, "values": list(axis.values)} for axis in exploration.axes],
        "points": exploration_rows(exploration),
        "notes": list(exploration.notes),
    }


def exploration_rows(exploration: Exploration) -> list[dict[str, Any]]:
    """Return one row per point: axis values, time shares, and the columns of `predict --csv` or `serve --csv`."""
    rows = []
    for point in exploration.points:
        shares = {f"{name}_share": share for name, share in point.shares.items()}
        row: dict[str, Any] = {**point.values, "time": point.time, **shares, "reason": point.reason}
        if isinstance(point.prediction, Prediction):
            row |= prediction_row(point.prediction)
        elif point.prediction is not None:
            row |= serving_row(point.prediction)
        rows.append(row)
    return rows


def job_text(prediction: Prediction | ServingPrediction) -> str:
    """Return the text of the explored training job or service."""
    return workload_line(prediction.plan) if isinstance(prediction, Prediction) else service_line(prediction)


def _plan(prediction: Prediction | ServingPrediction) -> str:
    return short_plan_text(prediction.plan) if isinstance(prediction, Prediction) else short_layout(prediction.plan.layout)


def time_text(metric: str, time: float) -> str:
    """Return the text of a time in its metric; a throughput is the inverse of the time."""
    if not math.isfinite(time):
        return "-"
    return f"{1.0 / time:,.0f} tokens/s a chip" if metric == _THROUGHPUT else format_step(time)


def exploration_table(exploration: Exploration) -> Table:
    """Return one row per point, with the gain over the previous value of the last axis."""
    shares = list(next((point.shares for point in exploration.points if point.shares), {}))
    predictions = [point.prediction for point in exploration.points]
    first = next(prediction for prediction in predictions if prediction is not None)
    plans = [_plan(prediction) if prediction is not None else "not predicted" for prediction in predictions]
    is_one = len(set(plans)) == 1
    rows = []
    for point, gain, plan in zip(exploration.points, exploration.gains(), plans, strict=True):
        row = {axis.name: axis.text(point.values[axis.name]) for axis in exploration.axes}
        row |= {exploration.metric: time_text(exploration.metric, point.time), "gain": "" if math.isnan(gain) else f"{gain:.2f}x"}
        row |= {name: percent(point.shares[name]) if point.shares else "" for name in shares}
        row["peak memory"] = ""  # the share of memory has the name alone
        if point.prediction is not None:
            row["peak memory"] = format_bytes(point.prediction.memory["total"]) + ("" if point.prediction.fits else ", does not fit")
        rows.append(row if is_one else row | {"plan": plan})
    kind = "the best plan of each point" if exploration.is_searched else f"at {plans[0]}" if is_one else "the given plan at each point"
    return table_of_rows(
        f"{job_text(first)}; {kind}",
        rows,
        right=(*(axis.name for axis in exploration.axes if axis.is_numeric), exploration.metric, "gain", *shares, "peak memory"),
        fold=("plan",),
    )


def saturation_lines(exploration: Exploration) -> Iterator[str]:
    """Yield the saturation point of each line along the last axis, and the reasons of points without prediction."""
    last = exploration.axes[-1]
    for line in exploration.lines():
        point = exploration.saturation(line)
        if point is not None and len(line) > 2:
            condition = ", ".join(f"{axis.name} {axis.text(point.values[axis.name])}" for axis in exploration.axes[:-1])
            at = "from the first value on" if point is line[0] else f"at {last.name} {last.text(point.values[last.name])}"
            sentence = f"saturates {at}: each further value gains under {SATURATED - 1:.0%}"
            yield f"{condition}: {sentence}" if condition else sentence
    yield from (f"not predicted: {reason}" for reason in dict.fromkeys(point.reason for point in exploration.points if point.reason))


def sensitivities_object(sensitivities: Sensitivities) -> dict[str, Any]:
    """Return the elasticities as the `--json` object."""
    return {
        **picked(sensitivities, "metric time"),
        "plan": _plan(sensitivities.prediction),
        "fits": sensitivities.prediction.fits,
        "step": STEP,
        "elasticities": [picked(row, "name value elasticity smaller larger") for row in sensitivities.elasticities],
    }


def sensitivities_table(sensitivities: Sensitivities) -> Table:
    """Return the table of ranked elasticities with bars."""
    largest = max((abs(row.elasticity) for row in sensitivities.elasticities), default=0.0) or 1.0
    rows = tuple(
        (
            row.name,
            format_quantity(row.value, row.kind),
            f"{row.elasticity:+.3f}",
            f"{row.larger - 1.0:+.1%}",
            f"{row.smaller - 1.0:+.1%}",
            bar(abs(row.elasticity) / largest) if abs(row.elasticity) > 5e-4 else "",
        )
        for row in sensitivities.elasticities
    )
    larger, smaller = f"{1.0 + STEP:g}x", f"1/{1.0 + STEP:g}x"
    time = time_text(sensitivities.metric, sensitivities.time)
    return table_of(
        f"{job_text(sensitivities.prediction)}; {_plan(sensitivities.prediction)}"
        + ("" if sensitivities.prediction.fits else ", which does not fit"),
        f"number | >value | >elasticity | >{larger} | >{smaller} | ",
        rows,
        caption=f"{sensitivities.metric} {time}; elasticity: its relative change for that of the number",
    )


def waterfall_object(waterfall: Waterfall) -> dict[str, Any]:
    """Return the waterfall as the `--json` object."""
    return {
        **picked(waterfall, "start end metric time"),
        "plan": _plan(waterfall.prediction),
        "total": waterfall.total,
        "rungs": [
            {**picked(rung, "change before after time factor plan_factor"), "plan": _plan(rung.prediction)} for rung in waterfall.rungs
        ],
    }


def waterfall_table(waterfall: Waterfall) -> Table:
    """Return one row per change, in order."""
    rows = [(f"{waterfall.start}", "", time_text(waterfall.metric, waterfall.time), "", "", _plan(waterfall.prediction))]
    plans = [_plan(waterfall.prediction), *(_plan(rung.prediction) for rung in waterfall.rungs)]
    for rung, old, plan in zip(waterfall.rungs, plans, plans[1:], strict=False):
        change = rung.before if rung.before == rung.after else f"{rung.before} to {rung.after}"
        plan = "as before" if plan == old else plan
        new = "" if math.isnan(rung.plan_factor) else f"{rung.plan_factor:.2f}x"
        rows.append((rung.change, change, time_text(waterfall.metric, rung.time), f"{rung.factor:.2f}x", new, plan))
    last = time_text(waterfall.metric, waterfall.rungs[-1].time)
    rows.append(("total", f"{waterfall.start} to {waterfall.end}", last, f"{waterfall.total:.2f}x", "", ""))
    return table_of(
        f"{job_text(waterfall.prediction)}; from {waterfall.start} to {waterfall.end}",
        f"change | ~from, to | >{waterfall.metric} | >factor | >of it | ~plan",
        rows,
        caption="One change at a time, in this order; the plan is searched again after each, and the factors multiply to the total. "
        "Of it: what the new plan is worth over the previous one.",
    )
