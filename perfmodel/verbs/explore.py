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
import time as clock
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any
from uuid import uuid4

from perfmodel.foundation.columns import as_columns
from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.words import Words, takes, words_of
from perfmodel.hardware.calibration import Provenance
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.request import Request
from perfmodel.parallel.serving.plan import ServingPlan
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.planner.exploration import Axis, Elasticity, Exploration, Point, Rung, Sensitivities, Waterfall
from perfmodel.planner.uniform.kept import KeptSpaces, spaces_of
from perfmodel.uncertainty.sensitivity import STEP
from perfmodel.verbs.axes import AxisField, System, axes_of, changed, hardware_axes, read_axis, spec_of
from perfmodel.verbs.processes import follow, number_of_cores, run_batches
from perfmodel.verbs.setting import Name, find_cluster

MOST_POINTS = 100_000

#: Fields of a service's request that training does not have.
SERVED = " ".join(name for name in words_of(ServingRequest) if name not in {**words_of(Request), **words_of(Knobs)} and name != "workers")

#: Metric of a service -> its time in a prediction. [s, or s per token and chip]
METRICS: Mapping[str, Callable[[ServingPrediction], float]] = {
    "tpot": lambda prediction: prediction.tpot.mean,
    "ttft": lambda prediction: prediction.ttft.mean,
    "latency": lambda prediction: prediction.request_latency.mean,
    "throughput": lambda prediction: 1.0 / prediction.tokens_per_second_per_chip if prediction.tokens_per_second_per_chip > 0 else math.inf,
}
STEP_TIME = "step time"


# ---------------------------------------------------------------------------------------------------------------------------------
# The verbs
# ---------------------------------------------------------------------------------------------------------------------------------

_ASKED: dict[str, Any] = {"asked": Request, "knobs": Knobs, "served": Words(ServingRequest, only=SERVED)}


@takes(**_ASKED)
def explore(
    *,
    asked: Request,
    knobs: Knobs,
    served: ServingRequest,
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
    case = SystemPredictor(metric=_metric(system, metric), is_searched=search)
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
    blocks = list(_blocks(combinations, columns if columns or is_single else _SIZES))
    for numbers, block in _computed(case, system, known, combinations, blocks, shares=shares):
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


@takes(**_ASKED)
def explore_sensitivity(
    *, asked: Request, knobs: Knobs, served: ServingRequest, search: bool = False, metric: str = "tpot"
) -> Sensitivities:
    """Compute the elasticity of the step time, or of a service's metric, to every number of the chip and its network, with a fixed plan.

    search   the plan is the best one of the unchanged system; else the knobs describe it
    metric   of a service: tpot, ttft, latency or throughput
    """
    system = system_of(asked, knobs, served)
    case = SystemPredictor(metric=_metric(system, metric), is_searched=search)
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


@takes(**_ASKED)
def explore_waterfall(
    *,
    asked: Request,
    knobs: Knobs,
    served: ServingRequest,
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
    system = system_of(asked, knobs, served)
    last = find_cluster(to, system.cluster.num_chips)[1]
    for word, cluster in (("cluster", system.cluster), ("to", last)):
        if cluster.pools:
            rule = "has several kinds of chips, of which a waterfall cannot change one number at a time into that of the other cluster"
            raise bad_field(word, cluster.name, rule, "search both clusters, or vary the numbers of one kind of chips")
    case = SystemPredictor(metric=_metric(system, metric), is_searched=True)
    current = _at(system, calibration=_calibration_of(system))
    first = prediction = case.predict(current)
    start = previous = case.time(prediction)
    rungs: list[Rung] = []
    changes = list(_changes(system, last, to_precision))
    for number, (name, before, after, change) in enumerate(changes):
        plan, current = prediction.plan, change(current)
        kept = _kept_time(case, current, plan)
        prediction = case.predict(current)
        time = case.time(prediction)
        rungs.append(
            Rung(
                change=name,
                before=before,
                after=after,
                time=time,
                factor=previous / time,
                plan_factor=kept / time,
                prediction=prediction,
            )
        )
        previous = time
        if progress is not None:
            progress((number + 1) / len(changes))
    return Waterfall(start=system.cluster.name, end=last.name, metric=case.metric, time=start, prediction=first, rungs=tuple(rungs))


# ---------------------------------------------------------------------------------------------------------------------------------
# Systems and their times
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SystemPredictor:
    """Predictor of systems: the metric, and whether the best plan is searched.

    kept_spaces   shared by the searches
    """

    metric: str
    is_searched: bool
    kept_spaces: KeptSpaces = field(default_factory=KeptSpaces)

    def predict(self, system: System, *, held: Plan | ServingPlan | None = None) -> Prediction | ServingPrediction:
        """Predict a system with its plan, the best one, or the fixed one in `held`. Raises InputError."""
        asked = _placed(system)
        if isinstance(asked, ServingRequest):
            return self._serve(asked, held)
        from perfmodel.verbs.overrides import overridden
        from perfmodel.verbs.requests import setting_of_request
        from perfmodel.verbs.searching import search_in
        from perfmodel.verbs.setting import plan_in, predict_in

        rule = {"memory_headroom": asked.memory_headroom, "risk": asked.risk}
        setting = setting_of_request(asked)
        if isinstance(held, Plan):
            return predict_in(setting, overridden(held, setting, Knobs()), **rule)
        if not self.is_searched:
            return predict_in(setting, plan_in(setting, system.knobs), **rule)
        result = search_in(replace(setting, kept_spaces=self.kept_spaces), system.knobs, {}, top=1, ties=0.0, also=(), **rule)
        if not result.plans:
            raise InputError(f"chips={system.cluster.num_chips}: no plan fits on {system.cluster.name}; use more chips or larger memory")
        return result.plans[0]

    def predict_columns(self, systems: Sequence[System]) -> Sequence[Prediction | ServingPrediction | InputError]:
        """Predict the knobs' plan on training systems, as columns, or return why there is no prediction.

        The systems differ in floats of their clusters, or in the sizes of their jobs. Raises InputError if it is about all systems.
        """
        from perfmodel.cost.resolve import fresh_estimator
        from perfmodel.verbs.requests import setting_of_request
        from perfmodel.verbs.setting import annotated, constants_of, plan_in

        if any(system.asked != systems[0].asked for system in systems):
            return self._predict_sizes(systems)
        asked = _placed(systems[0])
        assert isinstance(asked, Request)
        setting = setting_of_request(asked)
        plan = plan_in(setting, systems[0].knobs)
        calibration, profile = constants_of(setting.cluster, asked.calibration, asked.profile, asked.settings)
        rates = [system.cluster.chip.peak_flop_rate for system in systems]
        if calibration.provenance is Provenance.PRIOR and any(chip_rates != rates[0] for chip_rates in rates):
            return [self.predict(system) for system in systems]  # a prior follows from the rates
        cluster = as_columns([system.cluster for system in systems])
        estimator = fresh_estimator(setting.job, cluster, calibration, profile)
        rule = {"memory_headroom": asked.memory_headroom, "risk": asked.risk}
        return [annotated(prediction, setting) for prediction in estimator.predict_columns([plan] * len(systems), **rule)]

    def _predict_sizes(self, systems: Sequence[System]) -> Sequence[Prediction | InputError]:
        from perfmodel.verbs.requests import predict_cases

        smallest = min((system.cluster for system in systems), key=lambda cluster: cluster.num_chips)
        cases = []
        for system in systems:
            asked = _placed(replace(system, model=systems[0].model))
            assert isinstance(asked, Request)
            cases.append((replace(asked, cluster=smallest), systems[0].knobs))
        return [outcome if isinstance(outcome, InputError) else outcome.prediction for outcome in predict_cases(cases)]

    def _serve(self, asked: ServingRequest, held: Plan | ServingPlan | None) -> ServingPrediction:
        from perfmodel.cost.serving.simulated import predict_served
        from perfmodel.verbs.serving import search_asked, serve_asked, serving_setting

        if isinstance(held, ServingPlan):
            setting = serving_setting(asked)
            return predict_served(setting.estimator, setting.job, held)
        if not self.is_searched:
            return serve_asked(asked)[1]
        objective = "throughput" if self.metric == "throughput" else "latency"
        return search_asked(asked, limits={}, p99=False, objective=objective, top=1)[1].best.prediction

    def time(self, prediction: Prediction | ServingPrediction) -> float:
        """Return the metric's time. [s]"""
        return prediction.step_time if isinstance(prediction, Prediction) else METRICS[self.metric](prediction)


def system_of(asked: Request, knobs: Knobs, served: ServingRequest) -> System:
    """Return the system that a request describes: a service if there are lengths of prompts and answers, else training.

    Raises InputError.
    """
    from perfmodel.verbs.requests import make_requests, setting_of_request
    from perfmodel.verbs.serving import serving_setting

    if served.input_len is None and served.output_len is None:
        for name in words_of(ServingRequest):
            if name in SERVED.split() and getattr(served, name) is not None:
                raise bad_field(name, getattr(served, name), "is of a service", "give input_len and output_len too, or leave it out")
        requests = make_requests(asked)
        if len(requests) > 1:
            raise InputError("explore: takes one value of everything but its axes; name the others with vary")
        setting = setting_of_request(requests[0])
        request: Request | ServingRequest = requests[0]
        cluster, model = setting.cluster, setting.job.transformer
    else:
        shared = {name: getattr(asked, name) for name in ("model", "cluster", "chips", "calibration")}
        degrees = {name: getattr(knobs, name) for name in ("tp", "pp", "ep")}
        request = replace(served, **shared, **degrees)
        setting_found = serving_setting(request)
        cluster, model = setting_found.estimator.cluster, setting_found.job.model
    return System(asked=request, knobs=knobs, cluster=cluster, model=model, spec=spec_of(asked.cluster))


def _placed(system: System) -> Request | ServingRequest:
    """Return the request with the objects of the system."""
    asked = replace(system.asked, cluster=system.cluster, model=system.model, chips=system.cluster.num_chips)
    return asked if isinstance(asked, ServingRequest) else replace(asked, nodes=None)


def _at(system: System, **words: Any) -> System:
    return replace(system, asked=replace(system.asked, **words))


def _metric(system: System, metric: str) -> str:
    if not system.is_service:
        return STEP_TIME
    if metric not in METRICS:
        raise bad_field("metric", shown(metric), "is not known", f"use {', '.join(METRICS)}")
    return metric


_MOST_COLUMNS = 512
"""Points that are evaluated together: their columns stay in the caches of a core."""


def _blocks(combinations: Sequence[Mapping[str, Any]], columns: Collection[str]) -> Iterator[list[int]]:
    """Yield the indices of points that are predicted together: they differ in columns only."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, values in enumerate(combinations):
        key = tuple(value for name, value in values.items() if name not in columns)
        groups.setdefault(key, []).append(number)
    for numbers in groups.values():
        yield from (numbers[first : first + _MOST_COLUMNS] for first in range(0, len(numbers), _MOST_COLUMNS))


_ALONE = 4.0
"""Time of searches after which further processes compute the rest. [s]"""
_BATCHES_PER_JOB = 8

_Computed = tuple[list[int], list[Point]]


def _computed(
    case: SystemPredictor,
    system: System,
    known: Mapping[str, AxisField],
    combinations: Sequence[Mapping[str, Any]],
    blocks: Sequence[list[int]],
    *,
    shares: bool,
) -> Iterator[_Computed]:
    """Yield the indices and points of each block. Long searches continue on all cores, in the order of completion."""
    start, done = clock.monotonic(), 0
    while done < len(blocks):
        spent = clock.monotonic() - start
        if case.is_searched and done and spent > _ALONE and spent / done * (len(blocks) - done) > _ALONE and find_spec("joblib"):
            break
        yield blocks[done], _points(case, system, known, [combinations[number] for number in blocks[done]], shares=shares)
        done += 1
    left = [(numbers, [combinations[number] for number in numbers]) for numbers in blocks[done:]]
    if left:
        jobs = min(number_of_cores(), len(left))
        size = max(len(left) // (_BATCHES_PER_JOB * jobs), 1)
        batches = (left[first : first + size] for first in range(0, len(left), size))
        compute = partial(_batch_of_points, replace(case, kept_spaces=KeptSpaces()), system, uuid4().hex, shares)
        for computed in run_batches(compute, batches, jobs=jobs, when_killed="give fewer values"):
            yield from computed


def _batch_of_points(
    case: SystemPredictor,
    system: System,
    exploration: str,
    shares: bool,
    batch: Sequence[tuple[list[int], Sequence[Mapping[str, Any]]]],
    *,
    parent: int,
) -> list[_Computed]:
    """Return the points of some blocks. The batches of an exploration that a process computes share its spaces."""
    case, known, computed = replace(case, kept_spaces=spaces_of(exploration)), axes_of(system), []
    for numbers, block in batch:
        follow(parent)
        computed.append((numbers, _points(case, system, known, block, shares=shares)))
    return computed


def _points(
    case: SystemPredictor, system: System, known: Mapping[str, AxisField], block: Sequence[Mapping[str, Any]], *, shares: bool
) -> list[Point]:
    """Return a point for each of the values of a block; one that cannot be predicted has the reason."""
    points, systems = [Point(values=values) for values in block], dict[int, System]()
    for number, values in enumerate(block):
        try:
            systems[number] = changed(system, values, known)
        except InputError as error:
            points[number] = Point(values=values, reason=str(error))
    several = list(systems.values())
    outcomes: Sequence[Prediction | ServingPrediction | InputError]
    try:
        outcomes = case.predict_columns(several) if len(several) > 1 else [case.predict(one) for one in several]
        predicted = {number: outcome for number, outcome in zip(systems, outcomes, strict=True) if not isinstance(outcome, InputError)}
        parts: list[dict[str, float]] = [{}] * len(predicted)
        if shares and predicted:
            parts = _shares(case, [systems[number] for number in predicted], list(predicted.values()))
    except InputError as error:
        if len(systems) > 1:  # one or all of them: predict each alone
            return [point for values in block for point in _points(case, system, known, [values], shares=shares)]
        return [replace(point, reason=point.reason or str(error)) for point in points]
    for number, outcome in zip(systems, outcomes, strict=True):
        if isinstance(outcome, InputError):
            points[number] = Point(values=block[number], reason=str(outcome))
    for (number, prediction), point_shares in zip(predicted.items(), parts, strict=True):
        points[number] = Point(values=block[number], time=case.time(prediction), prediction=prediction, shares=point_shares)
    return points


#: Group of a share -> start and end of the axes whose elasticities add up to it, with the plan fixed.
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "compute": ("chip.", ".peak_flop_rate"),
    "memory": ("chip.", ".memory.bandwidth"),
    "network": ("network.", ".bandwidth"),
}
_SMALL = 1.01


def _shares(
    case: SystemPredictor, systems: Sequence[System], predictions: Sequence[Prediction | ServingPrediction]
) -> list[dict[str, float]]:
    """Return the shares of the time by bottleneck: -d ln(time) / d ln(rate) of each group, with fixed plans.

    The part that depends on no rate (latency, host) is `other`. Several systems share one plan, that of the knobs.
    """
    known = hardware_axes(systems[0])
    shares: list[dict[str, float]] = [{} for _ in systems]
    for group, (start, end) in _BOUNDS.items():
        faster = list(systems)
        for name in (name for name in known if name.startswith(start) and name.endswith(end)):
            faster = [known[name].put(faster_system, known[name].get(faster_system) * _SMALL) for faster_system in faster]
        faster_predictions = case.predict_columns(faster) if len(faster) > 1 else [case.predict(faster[0], held=predictions[0].plan)]
        for share, before, after in zip(shares, predictions, faster_predictions, strict=True):
            if isinstance(after, InputError):
                raise after
            share[group] = max(math.log(case.time(before) / case.time(after)) / math.log(_SMALL), 0.0)
    return [{**share, "other": max(1.0 - sum(share.values()), 0.0)} for share in shares]


# ---------------------------------------------------------------------------------------------------------------------------------
# The path from one system to another
# ---------------------------------------------------------------------------------------------------------------------------------


def _calibration_of(system: System) -> Any:
    """Return the calibration until the last rung: the given one, or the best of the first chip."""
    from perfmodel.cost.resolve import choose_calibration

    given = system.asked.calibration
    return choose_calibration(system.cluster.chip, given or "") if given is None or isinstance(given, Name) else given


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

    rates = {name: getattr(two, name) for name in ("peak_flop_rate", "compute_units", "any_operand_order")}
    yield "peak rate", *named("chip.peak_flop_rate"), with_chip(**rates)
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
