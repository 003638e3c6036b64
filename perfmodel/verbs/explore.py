"""The verb `explore`, for Python: any field of hardware, model, job or plan as an axis, elasticities of the time, and the path from one
system to another; for training and for serving.

    import perfmodel

    found = perfmodel.explore(
        model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192, tp=2, vary=["chip.memory.bandwidth=1..8TB/s"]
    )
    print([point.time for point in found.points])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.words import takes
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.request import Request, Service
from perfmodel.parallel.serving_plan import ServingPlan
from perfmodel.planner.exploration import Axis, Elasticity, Exploration, Point, Rung, Sensitivities, Waterfall
from perfmodel.uncertainty.sensitivity import STEP
from perfmodel.verbs.axes import System, axes_of, hardware_axes, read_axis
from perfmodel.verbs.points import blocks_of, computed_points
from perfmodel.verbs.setting import Name, find_cluster
from perfmodel.verbs.system_times import SYSTEM_WORDS, SystemPredictor, metric_of, system_of

MOST_POINTS = 100_000

# ---------------------------------------------------------------------------------------------------------------------------------
# The verbs
# ---------------------------------------------------------------------------------------------------------------------------------


@takes(**SYSTEM_WORDS)
def explore(
    *,
    asked: Request,
    knobs: Knobs,
    served: Service,
    vary: Sequence[str] | str,
    points: int | None = None,
    search: bool = False,
    shares: bool = False,
    metric: str = "tpot",
    progress: Callable[[float], object] | None = None,
) -> Exploration:
    """Predict every combination of the values of axes: of training, or with input_len of a service.

    vary      axes such as "chip.memory.bandwidth=1..8TB/s", "technology.logic=n7,n5,n3", "job.seq_len=4k..64k", "plan.tp=1,2,4,8"
    points    values of a range; None: 8, integers double
    search    search the best plan at each point, with the given knobs fixed; else the knobs describe the plan
    shares    also the shares of the time that are bound by compute, memory and network
    metric    of a service: tpot, ttft, latency or throughput; the time of a search is the metric's
    progress  called with the finished share
    """
    system = system_of(asked, knobs, served)
    given = [vary] if isinstance(vary, str) else list(vary)
    axes = tuple(read_axis(text, system, points=points) for text in given)
    if not axes:
        raise InputError("vary: names no axis; give one such as chip.memory.bandwidth=1..8TB/s")
    repeated = [axis.name for axis in axes if [other.name for other in axes].count(axis.name) > 1]
    if repeated:
        raise InputError(f"{repeated[0]}: is varied twice; give all its values at once")
    if math.prod(len(axis.values) for axis in axes) > MOST_POINTS:
        raise InputError(f"vary: makes more than {MOST_POINTS:,} points; give fewer values")
    case = SystemPredictor(metric=metric_of(system, metric), is_searched=search)
    notes: tuple[str, ...] = ()
    if system.asked.calibration is None and any(axis.name.startswith("technology.") for axis in axes):
        system = replace(system, asked=replace(system.asked, calibration=_SPEC_SHEET))
        notes = (
            f"calibration={_SPEC_SHEET}: typical shares of the rates at every point; --calibration NAME takes those of a measured chip",
        )
    points_found: dict[int, Point] = {}
    combinations = [dict(zip([axis.name for axis in axes], values, strict=True)) for values in product(*(axis.values for axis in axes))]
    known = axes_of(system)
    # axes that may be columns of one evaluation of a fixed training plan: quantities of hardware, else sizes of the job
    is_single = bool(search or system.is_service or system.cluster.pools)
    columns = set() if is_single else {axis.name for axis in axes if (field := hardware_axes(system).get(axis.name)) and field.kind}
    blocks = list(blocks_of(combinations, columns if columns or is_single else _SIZES))
    for numbers, block in computed_points(case, system, known, combinations, blocks, shares=shares):
        points_found |= dict(zip(numbers, block, strict=True))
        if progress is not None:
            progress(len(points_found) / len(combinations))
    ordered = tuple(points_found[number] for number in range(len(combinations)))
    if not any(point.prediction for point in ordered):
        raise InputError("; ".join(list(dict.fromkeys(point.reason for point in ordered))[:3]))
    return Exploration(axes=axes, points=ordered, metric=case.metric, is_searched=search, notes=notes)


_SPEC_SHEET = "spec-sheet"

#: Axes whose values are columns of one evaluation (`requests.predict_cases`).
_SIZES = frozenset({"job.chips", "job.global_batch", "job.batch_tokens", "job.seq_len"})


@takes(**SYSTEM_WORDS)
def explore_sensitivity(
    *,
    asked: Request,
    knobs: Knobs,
    served: Service,
    search: bool = False,
    metric: str = "tpot",
) -> Sensitivities:
    """Compute the elasticity of the step time, or of a service's metric, to every number of the chip and its network, with a fixed plan.

    search   the plan is the best one of the unchanged system; else the knobs describe it
    metric   of a service: tpot, ttft, latency or throughput
    """
    system = system_of(asked, knobs, served)
    case = SystemPredictor(metric=metric_of(system, metric), is_searched=search)
    prediction = case.predict(system)
    plan, time = prediction.plan, case.time(prediction)

    rows = []
    for name, axis in hardware_axes(system).items():
        value = axis.get(system)
        if not axis.kind or ".peak_flop_rate." in name:
            continue
        smaller, larger = (
            case.time(case.predict(axis.put(system, value * factor), held=plan)) / time for factor in (1.0 / (1.0 + STEP), 1.0 + STEP)
        )
        elasticity = math.log(larger / smaller) / (2.0 * math.log(1.0 + STEP))
        rows.append(Elasticity(name=name, kind=axis.kind, value=value, elasticity=elasticity, smaller=smaller, larger=larger))
    rows.sort(key=lambda row: -abs(row.elasticity))
    return Sensitivities(metric=case.metric, time=time, prediction=prediction, elasticities=tuple(rows))


@takes(**SYSTEM_WORDS)
def explore_waterfall(
    *,
    asked: Request,
    knobs: Knobs,
    served: Service,
    to: Name | Cluster,
    to_precision: str | None = None,
    metric: str = "throughput",
    progress: Callable[[float], object] | None = None,
) -> Waterfall:
    """Predict the path from the cluster to another one, one change at a time, with the plan searched again after each.

    Order: peak rate, number format, memory bandwidth, memory capacity, scale-up, scale-out, rest (calibration, caches, host).

    to            the other cluster or chip; the same number of chips
    to_precision  precision of a job, or quantization of a service, on the other one; None: as on the first
    metric        of a service: tpot, ttft, latency or throughput
    """
    from perfmodel.cost.resolve import choose_calibration

    system = system_of(asked, knobs, served)
    last = find_cluster(to, system.cluster.num_chips)[1]
    for word, cluster in (("cluster", system.cluster), ("to", last)):
        if cluster.pools:
            rule = "has several kinds of chips, of which a waterfall cannot change one number at a time into that of the other cluster"
            raise bad_field(word, cluster.name, rule, "search both clusters, or vary the numbers of one kind of chips")
    case = SystemPredictor(metric=metric_of(system, metric), is_searched=True)
    # until the last rung the given one, or the best of the first chip
    current = _at(system, calibration=choose_calibration(system.cluster.chip, system.asked.calibration))
    first = prediction = case.predict(current)
    start = previous = case.time(prediction)
    rungs: list[Rung] = []
    changes = list(_changes(system, last, to_precision))
    for number, (name, before, after, change) in enumerate(changes):
        plan, current = prediction.plan, change(current)
        kept = _kept_time(case, current, plan)
        prediction = case.predict(current)
        time = case.time(prediction)
        factors = {"factor": previous / time, "plan_factor": kept / time}
        rungs.append(Rung(change=name, before=before, after=after, time=time, **factors, prediction=prediction))
        previous = time
        if progress is not None:
            progress((number + 1) / len(changes))
    return Waterfall(start=system.cluster.name, end=last.name, metric=case.metric, time=start, prediction=first, rungs=tuple(rungs))


# ---------------------------------------------------------------------------------------------------------------------------------
# The path from one system to another
# ---------------------------------------------------------------------------------------------------------------------------------


def _at(system: System, **words: Any) -> System:
    return replace(system, asked=system.asked.having(**words))


_Change = tuple[str, str, str, Callable[[System], System]]


def _changes(system: System, last: Cluster, precision: str | None) -> Iterator[_Change]:
    """Yield name, before, after, and the change of each rung. Rungs that change nothing are included, as factors of 1."""
    first, two, given = system.cluster, last.chip, system.asked.calibration
    target = replace(system, cluster=last)
    known, others = hardware_axes(system), hardware_axes(target)

    def named(axis: str) -> tuple[str, str]:
        axis_fields = ((known.get(axis), system), (others.get(axis), target))
        one, other = (Axis(name=axis, values=(), kind=field.kind).text(field.get(at)) if field else "none" for field, at in axis_fields)
        return one, other

    def with_chip(**fields: Any) -> Callable[[System], System]:
        return lambda at: replace(at, cluster=replace(at.cluster, chip=replace(at.cluster.chip, **fields)))

    def scaled_up(at: System) -> System:
        inner = tuple(tier for tier in last.tiers if not last.is_scale_out(tier))
        domain = inner[-1].size if inner else 1
        fabric = (replace(tier, size=-(-tier.size // domain) * domain) for tier in first.tiers if first.is_scale_out(tier))
        return replace(at, cluster=replace(at.cluster, tiers=(*inner, *fabric), chips_per_node=last.chips_per_node))

    def scaled_out(at: System) -> System:
        return replace(at, cluster=replace(at.cluster, tiers=last.tiers, chips_per_node=last.chips_per_node))

    units = replace(first.chip.units, compute_units=two.units.compute_units, any_operand_order=two.units.any_operand_order)
    yield "peak rate", *named("chip.peak_flop_rate"), with_chip(peak_flop_rate=two.peak_flop_rate, units=units)
    if precision is not None:
        of_job = "quantization" if system.is_service else "precision"
        before = getattr(system.asked, of_job) or ("as published" if system.is_service else "bf16-mixed")
        yield "number format", str(before), precision, lambda at: _at(at, **{of_job: precision})
    memory = replace(first.chip.memory, bandwidth=two.memory.bandwidth)
    yield "memory bandwidth", *named("chip.memory.bandwidth"), with_chip(memory=memory)
    yield "memory capacity", *named("chip.memory.capacity"), with_chip(memory=two.memory)
    yield "scale-up", *named("network.scale_up.bandwidth"), scaled_up
    yield "scale-out", *named("network.scale_out.bandwidth"), scaled_out
    yield "rest", first.chip.name, two.name, lambda at: _at(replace(at, cluster=last), calibration=given)


def _kept_time(case: SystemPredictor, system: System, plan: Plan | ServingPlan | None) -> float:
    """Return the time with the plan of the previous rung; nan if that plan is invalid or does not fit."""
    if plan is None:
        return math.nan
    try:
        prediction = case.predict(system, held=plan)
    except InputError:
        return math.nan
    return case.time(prediction) if prediction.fits else math.nan
