"""Per-operator plans of networks as tables: sharding, step time, memory, and common strategies for comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.foundation.memory_headroom import Verdict
from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.parallel.per_operator.measurement import NetworkMeasurement
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.rows import without_total
from perfmodel.planner.per_operator.pipeline import PipelineSearch, Stage
from perfmodel.report.predictions import fits_cell, memory_text, prediction_object
from perfmodel.report.table import Table, bar, table_of, words
from perfmodel.workload.graph import Graph, Operator

_NUMBER = re.compile(r"\d+")
#: Smallest ratio that is printed as a factor, not as a percentage.
_MANY = 10.0


def sharding_text(plan: Plan, operator: Operator) -> str:
    """Return the number of shards of each sharded dim, outer network tiers first: `b 4x8, n 2`."""
    words_of = []
    sharding = plan.cuts.shardings[operator.name]
    for dim in operator.dims:
        axes = set(sharding.get(dim, ()))
        tiers = sorted({axis.tier for axis in plan.cuts.axes}, reverse=True)
        parts = [plan.cuts.size(tuple(axis.name for axis in plan.cuts.axes if axis.name in axes and axis.tier == tier)) for tier in tiers]
        if max(parts, default=1) > 1:
            words_of.append(f"{dim} {'x'.join(map(str, parts))}")
    return ", ".join(words_of) or "whole"


def operators_table(network: Graph, plan: Plan) -> Table:
    """Return one row per sharding, in network order.

    Operators with the same sharding whose names differ only in numbers share a row.
    """
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for operator in network.operators:
        sizes = " ".join(f"{dim}={size}" for dim, size in operator.dims.items())
        key = (_NUMBER.sub("#", operator.name), operator.kind, sizes, sharding_text(plan, operator))
        alike.setdefault(key, []).append(operator.name)
    rows = []
    for (_, kind, sizes, cut), names in alike.items():
        shown = f"{names[0]} .. {names[-1]}" if len(names) > 2 else ", ".join(names)
        rows.append((shown, f"{len(names):,}", kind.replace("_", " "), sizes, cut))
    return table_of("Sharding of each operator", "~operator | >number | kind | ~dims | sharded", rows)


def parts_table(parts: Mapping[str, float], step_time: float) -> Table:
    taken = ((words(name), time, time / step_time) for name, time in parts.items() if time > 0)
    rows = ((name, format_time(time), percent(share), bar(share)) for name, time, share in taken)
    return table_of("Where the step goes", "part | >time | >share | ", rows)


def strategies_table(best: Prediction, strategies: Mapping[str, Prediction]) -> Table:
    """Return the best plan and the common strategies, with step time, memory and fit."""
    rows = []
    for name, prediction in {"every operator by itself": best, **strategies}.items():
        times = prediction.step_time / best.step_time
        slower = "-" if prediction is best else f"{times - 1.0:+.1%}" if times < _MANY else f"{times:.3g} x"
        memory = format_bytes(prediction.memory["total"])
        rows.append((name, format_time(prediction.step_time), slower, memory, fits_cell(prediction.verdict)))
    return table_of("Compared with common strategies", "strategy | >step time | >vs best | >memory | fits", rows)


def memory_line(memory: Mapping[str, float], usable: float, verdict: Verdict) -> str:
    classes = ", ".join(f"{words(name)} {format_bytes(size)}" for name, size in without_total(memory).items() if size > 0)
    return f"{memory_text(memory['total'], usable, verdict)} ({classes})"


def price_line(price: float) -> str:
    """Return the text of the step time saved per additional GB of memory."""
    return f"{format_time(price * 1e9)} of a step for each GB more" if price > 0 else "memory does not bind"


def stages_table(stages: Sequence[Stage]) -> Table:
    rows = (
        (
            str(number),
            f"{stage.first} .. {stage.last}",
            f"{stage.num_operators:,}",
            str(stage.in_flight),
            format_time(stage.microbatch_time),
            format_bytes(stage.memory["total"]),
        )
        for number, stage in enumerate(stages, 1)
    )
    return table_of("Stages", ">stage | operators | >number | >in flight | >a microbatch | >memory", rows)


def pipeline_object(search: PipelineSearch) -> dict[str, Any]:
    return {
        **prediction_object(search.best),
        **picked(search, "lower_bound gap cut_off"),
        "num_microbatches": search.best.plan.num_microbatches,
        **picked(search, "num_candidates price search_time stages"),
    }


def trained_line(plan: Plan) -> str:
    """Return precision, optimizer, ZeRO stage and micro-batches of a plan."""
    count = plan.num_microbatches
    times = f", {count} microbatches of {plan.micro_batch}" if count > 1 else ""
    return f"{plan.job.precision}, {plan.job.optimizer}, ZeRO {int(plan.zero)}{times}"


def measured_table(names: Sequence[str], predictions: Sequence[Prediction], measurements: Sequence[NetworkMeasurement]) -> Table:
    rows = (
        (
            name,
            format_time(predicted.step_time),
            format_time(measured.step_time),
            f"{predicted.step_time / measured.step_time - 1.0:+.1%}",
            format_time(measured.step_time_spread),
            f"{measured.gradient_error:.1e}",
        )
        for name, predicted, measured in zip(names, predictions, measurements, strict=True)
    )
    columns = "plan | >predicted | >measured | >error | >spread | >gradients, off by"
    return table_of("Predicted against measured, all in one run", columns, rows)
