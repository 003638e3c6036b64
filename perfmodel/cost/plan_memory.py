"""One plan's memory as numbers: of the first, a middle and the last pipeline rank, and by class at its peak."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfmodel.cost.machine import Machine
from perfmodel.cost.memory import (
    MEMORY,
    Kept,
    Pipelining,
    Unreduced,
    base_memory,
    fixed_memory,
    kept_memory,
    outside_bytes,
    reserve_factor,
    reserved_memory,
    static_memory,
    unreduced_gradients,
    waiting_memory,
)
from perfmodel.cost.moments import ActivationTerms, At, Moment, largest, moments_at, rank_moments
from perfmodel.cost.pipeline import live_table, three_live_layers
from perfmodel.cost.step import Bytes, ParameterTerms, Stages
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.profile import ExecutionProfile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """One plan's memory, as numbers: of the first, a middle and the last rank."""

    activations: ActivationTerms
    pipelining: Pipelining
    static: list[tuple[Any, Any, Any, Any]]
    kept: list[Kept]
    moments: list[list[Moment]]
    unreduced: list[Unreduced]
    factor: float
    outside: float
    total: tuple[float, ...]


def memory_row(
    plan: Plan,
    columns: ActivationTerms,
    parameter_columns: ParameterTerms,
    stage_columns: Stages,
    activation_bytes: float,
    num_replicas: Any,
    *,
    profile: ExecutionProfile,
    machine: Machine,
    sizes: Bytes,
) -> MemoryRow:
    """The formulas of a search on numbers instead of columns of one, which is the same arithmetic in less time."""
    activations, terms, stages = _scalar_activations(columns), scalar_terms(parameter_columns), scalar_stages(stage_columns)
    m, p, tp = float(plan.num_microbatches), float(plan.layout.pp), float(plan.layout.tp)
    live = three_live_layers(
        live_table(plan.schedule, plan.stage_layers, plan.layout.pp),
        schedule=plan.schedule,
        num_ranks=plan.layout.pp,
        num_microbatches=plan.num_microbatches,
    )
    pipelining = Pipelining(schedule=plan.schedule, num_ranks=p, num_microbatches=m, virtual_stages=float(plan.virtual_stages), live=live)
    factor, outside = reserve_factor(profile, machine), outside_bytes(profile, machine)
    static = static_memory(terms, stages, sizes, num_replicas=scalar(num_replicas))
    kept = kept_memory(activations, stages, pipelining, profile, activation_bytes=activation_bytes)
    moments, unreduced, totals = [], [], []
    for rank in range(3):
        moments.append(
            rank_moments(
                activations,
                terms,
                stages,
                sizes,
                rank=rank,
                num_microbatches=m,
                profile=profile,
                activation_bytes=activation_bytes,
            )
        )
        unreduced.append(
            unreduced_gradients(
                activations,
                terms,
                stages,
                sizes,
                rank=rank,
                live=live[rank],
                profile=profile,
                activation_bytes=activation_bytes,
                factor=factor,
            )
        )
        waiting = waiting_memory(
            activations,
            terms,
            stages,
            sizes,
            rank=rank,
            num_microbatches=m,
            tp=tp,
            is_scattered=plan.rules.scatters_residual,
            profile=profile,
        )
        fixed = fixed_memory(static[rank])
        each = []
        for at, (kept_activations, received) in kept[rank].items():
            base = base_memory(largest(moments_at(moments[rank], at, kept[rank])), fixed, waiting, factor=factor, outside=outside)
            each.append(float(reserved_memory((kept_activations + received) * factor, base, unreduced[rank].at(at))))
        totals.append(max(each))
    return MemoryRow(
        activations=activations,
        pipelining=pipelining,
        static=static,
        kept=kept,
        moments=moments,
        unreduced=unreduced,
        factor=factor,
        outside=outside,
        total=tuple(totals),
    )


def _scalar_activations(columns: ActivationTerms) -> ActivationTerms:
    return ActivationTerms(
        kept=tuple(scalar(x) for x in columns.kept),
        peaks=tuple((scalar(a), scalar(b)) for a, b in columns.peaks),
        forward=scalar(columns.forward),
        boundary=scalar(columns.boundary),
        logits=scalar(columns.logits),
        run_ahead=scalar(columns.run_ahead),
    )


def scalar_terms(columns: ParameterTerms) -> ParameterTerms:
    return replace(
        columns,
        full=tuple(scalar(x) for x in columns.full),
        shard=tuple(scalar(x) for x in columns.shard),
        padded=tuple(scalar(x) for x in columns.padded),
        tied=(scalar(columns.tied[0]), scalar(columns.tied[1])),
    )


def scalar_stages(columns: Stages) -> Stages:
    return Stages(
        first=scalar(columns.first),
        middle=scalar(columns.middle),
        last=scalar(columns.last),
        total=scalar(columns.total),
        is_single=scalar(columns.is_single),
    )


def adding_up(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """The parts on the grid of the total's last binary digit, the largest of them taking the rest.

    They differ from what was given by rounding only, and add up to the total exactly, in any order: no sum of them rounds.
    """
    grid = math.ulp(total)
    rounded = {name: round(value / grid) * grid for name, value in parts.items()}
    largest = max(rounded, key=lambda name: rounded[name])
    rounded[largest] += total - sum(rounded.values())
    return rounded


def scalar(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


def memory_by_class(
    static: tuple[Any, ...], kept: Kept, moments: list[Moment], unreduced: Unreduced, *, factor: float = 1.0
) -> tuple[str, dict[str, float]]:
    """The moment of the peak, and the bytes that live then by class: what is allocated, without what the allocator holds beyond."""
    under_way = {at: (scalar(activations), scalar(received)) for at, (activations, received) in kept.items()}
    found = []
    for moment in moments:
        at = moment.at if moment.at in under_way else At.LAYER
        for each in unreduced.cases(at):
            waits, gone = (scalar(x) / factor for x in each)
            found.append((sum(under_way[at]) + scalar(moment.total) + (waits - gone), moment, at, waits, gone))
    _, moment, at, waits, gone = max(found, key=lambda case: case[0])
    kept_activations, received = under_way[at]
    weights, gradients, states, copies = (scalar(x) for x in static)
    values = (
        weights,
        gradients + scalar(moment.gradients) + waits,
        states,
        kept_activations + scalar(moment.freed) - gone,
        copies + scalar(moment.gathered),
        scalar(moment.temporary),
        received + scalar(moment.buffers),
        0.0,
        0.0,
    )
    return moment.name, dict(zip(MEMORY, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank as its allocator counts them: in tensors at the peak, and held."""

    allocated: float
    reserved: float


def fullest_by_class(row: MemoryRow) -> tuple[dict[str, float], float, str]:
    """Bytes of the fullest chip by class, their sum, and when in the step that is."""
    totals = row.total
    rank = int(np.argmax(totals))
    moment, values = memory_by_class(row.static[rank], row.kept[rank], row.moments[rank], row.unreduced[rank], factor=row.factor)
    values["framework"] = row.outside
    held = totals[rank] - sum(values.values())
    values["allocator"] = held if held > 1e-12 * totals[rank] else 0.0
    return {**adding_up(values, totals[rank]), "total": totals[rank]}, totals[rank], moment


def replicas(grid: LayoutGrid) -> Any:
    """Ranks that the gradient of a weight is reduced over."""
    return (grid.degree["dp_replicate"] * grid.degree["dp_shard"]) * grid.degree["cp"]
