"""Plans of networks as tables: which operators are cut how, what that takes, and what common strategies would take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.cost.per_operator.predict import NetworkPrediction
from perfmodel.foundation.memory_room import Verdict
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.parallel.per_operator.measurement import NetworkMeasurement
from perfmodel.parallel.per_operator.plan import NetworkPlan
from perfmodel.parallel.per_operator.plan_file import network_plan_to_dict
from perfmodel.planner.per_operator.pipeline import PipelinePrediction
from perfmodel.report.predictions import fits_cell, room_text
from perfmodel.report.table import Table, bar, percent, words
from perfmodel.workload.graph import Graph, Operator

_NUMBER = re.compile(r"\d+")
#: Ratios from here on are shown as such, not as per cent.
_MANY = 10.0


def cut_of(plan: NetworkPlan, operator: Operator) -> str:
    """`b 4x8, n 2`: parts of each dim that is cut, those across the outer network tiers first."""
    words_of = []
    sharding = plan.shardings[operator.name]
    for dim in operator.dims:
        axes = set(sharding.get(dim, ()))
        tiers = sorted({axis.tier for axis in plan.axes}, reverse=True)
        parts = [plan.size(tuple(axis.name for axis in plan.axes if axis.name in axes and axis.tier == tier)) for tier in tiers]
        if max(parts) > 1:
            words_of.append(f"{dim} {'x'.join(map(str, parts))}")
    return ", ".join(words_of) or "whole"


def tiers_line(plan: NetworkPlan) -> str:
    """`4 x 8 chips`: chips of each tier, the outermost first."""
    tiers = sorted({axis.tier for axis in plan.axes}, reverse=True)
    sizes = [plan.size(tuple(axis.name for axis in plan.axes if axis.tier == tier)) for tier in tiers] or [1]
    return " x ".join(map(str, sizes)) + " chips" + (" (across nodes x within one)" if len(sizes) > 1 else "")


def operators_table(network: Graph, plan: NetworkPlan) -> Table:
    """Operators that differ only by the numbers in their names and are cut alike are one row, in the order of the network."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for operator in network.operators:
        sizes = " ".join(f"{dim}={size}" for dim, size in operator.dims.items())
        key = (_NUMBER.sub("#", operator.name), operator.kind, sizes, cut_of(plan, operator))
        rows.setdefault(key, []).append(operator.name)
    return Table(
        title="How each operator is cut",
        headers=("operator", "number", "kind", "dims", "cut into"),
        rows=tuple(
            (_joined(names), f"{len(names):,}", kind.replace("_", " "), sizes, cut) for (_, kind, sizes, cut), names in rows.items()
        ),
        right=("number",),
        fold=("dims",),
    )


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if len(names) > 2 else ", ".join(names)


def parts_table(parts: Mapping[str, float], step_time: float) -> Table:
    return Table(
        title="Where the step goes",
        headers=("part", "time", "share", ""),
        rows=tuple(
            (words(name), format_time(time), percent(time / step_time), bar(time / step_time)) for name, time in parts.items() if time > 0
        ),
        right=("time", "share"),
    )


def strategies_table(best: NetworkPrediction, strategies: Mapping[str, NetworkPrediction]) -> Table:
    """The best plan and what others would take; a strategy that does not fit says so."""
    rows = [_strategy_row("every operator by itself", best, best)]
    rows += [_strategy_row(name, prediction, best) for name, prediction in strategies.items()]
    return Table(
        title="Beside common strategies",
        headers=("strategy", "step time", "vs best", "memory", "fits"),
        rows=tuple(rows),
        right=("step time", "vs best", "memory"),
    )


def _strategy_row(name: str, prediction: NetworkPrediction, best: NetworkPrediction) -> tuple[str, ...]:
    times = prediction.step_time / best.step_time
    return (
        name,
        format_time(prediction.step_time),
        "-" if prediction is best else f"{times - 1.0:+.1%}" if times < _MANY else f"{times:.3g} x",
        format_bytes(prediction.memory["total"]),
        fits_cell(prediction.verdict),
    )


def memory_line(memory: Mapping[str, float], usable: float, verdict: Verdict) -> str:
    classes = ", ".join(f"{words(name)} {format_bytes(size)}" for name, size in memory.items() if name != "total" and size > 0)
    return f"{room_text(memory['total'], usable, verdict)} ({classes})"


def price_line(price: float) -> str:
    """Seconds that a gigabyte more would save."""
    return f"{format_time(price * 1e9)} of a step for each GB more" if price > 0 else "memory does not bind"


def rests_on_line(rests_on: Mapping[str, str]) -> str:
    """What the numbers come from, parts of one source together."""
    by_source: dict[str, list[str]] = {}
    for part, source in rests_on.items():
        by_source.setdefault(source, []).append(words(part))
    return "; ".join(source if len(by_source) == 1 else f"{source} ({', '.join(parts)})" for source, parts in by_source.items())


def stages_table(prediction: PipelinePrediction) -> Table:
    rows = []
    for index, stage in enumerate(prediction.stages):
        rows.append(
            (
                str(index + 1),
                f"{stage.first} .. {stage.last}",
                f"{stage.num_operators:,}",
                str(stage.in_flight),
                format_time(stage.microbatch_time),
                format_bytes(stage.memory["total"]),
            )
        )
    headers = ("stage", "operators", "number", "in flight", "a microbatch", "memory")
    return Table(title="Stages", headers=headers, rows=tuple(rows), right=("stage", "number", "in flight", "a microbatch", "memory"))


def network_prediction_object(prediction: NetworkPrediction) -> dict[str, Any]:
    return {
        "step_time": prediction.step_time,
        "parts": prediction.parts,
        "memory": prediction.memory,
        "memory_capacity": prediction.memory_capacity,
        "memory_usable": prediction.memory_usable,
        "memory_spare": prediction.memory_spare,
        "fits": prediction.fits,
        "verdict": str(prediction.verdict),
        "sent_bytes": prediction.sent_bytes,
        "rests_on": prediction.rests_on,
        "plan": network_plan_to_dict(prediction.plan),
    }


def pipeline_object(prediction: PipelinePrediction) -> dict[str, Any]:
    return {
        "step_time": prediction.step_time,
        "parts": prediction.parts,
        "lower_bound": prediction.lower_bound,
        "gap": prediction.gap,
        "cut_off": prediction.cut_off,
        "num_microbatches": prediction.num_microbatches,
        "num_candidates": prediction.num_candidates,
        "price": prediction.price,
        "search_time": prediction.search_time,
        "stages": prediction.stages,
        "memory_capacity": prediction.memory_capacity,
        "memory_usable": prediction.memory_usable,
        "memory_spare": prediction.memory_usable - max(stage.memory["total"] for stage in prediction.stages),
        "plan": network_plan_to_dict(prediction.plan),
    }


def prediction_object(prediction: NetworkPrediction | PipelinePrediction) -> dict[str, Any]:
    """Of a plan of one stage or of several."""
    return network_prediction_object(prediction) if isinstance(prediction, NetworkPrediction) else pipeline_object(prediction)


def trained_line(plan: NetworkPlan) -> str:
    """How a plan is trained, beside its shardings."""
    count = plan.num_microbatches
    times = f", {count} microbatches of {plan.batch}" if count > 1 else ""
    return f"float32, {plan.optimizer}, ZeRO {plan.zero}{times}"


def mesh_line(plan: NetworkPlan) -> str:
    """The chips of a plan, stage by stage."""
    return f"{len(plan.stages)} stages of {tiers_line(plan)}" if plan.stages else tiers_line(plan)


def measured_table(
    names: Sequence[str], predictions: Sequence[NetworkPrediction | PipelinePrediction], measurements: Sequence[NetworkMeasurement]
) -> Table:
    rows = []
    for name, predicted, measured in zip(names, predictions, measurements, strict=True):
        error = predicted.step_time / measured.step_time - 1.0
        rows.append(
            (
                name,
                format_time(predicted.step_time),
                format_time(measured.step_time),
                f"{error:+.1%}",
                format_time(measured.step_time_spread),
                f"{measured.gradient_error:.1e}",
            )
        )
    headers = ("plan", "predicted", "measured", "error", "spread", "gradients, off by")
    return Table(title="Predicted against measured, all in one run", headers=headers, rows=tuple(rows), right=headers[1:])
