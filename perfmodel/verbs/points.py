"""Points of an exploration: predicted as columns where they may be, and by several processes where searches take long."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.planner.exploration import Point
from perfmodel.planner.uniform.kept import KeptSpaces, spaces_of
from perfmodel.verbs.axes import AxisField, System, axes_of, changed, hardware_axes
from perfmodel.verbs.processes import follow, number_of_cores, run_batches
from perfmodel.verbs.system_times import SystemPredictor

_MOST_COLUMNS = 512
"""Points that are evaluated together: their columns stay in the caches of a core."""


def blocks_of(combinations: Sequence[Mapping[str, Any]], columns: Collection[str]) -> Iterator[list[int]]:
    """Yield the indices of points that are predicted together: they differ in columns only."""
    others = [tuple(value for name, value in values.items() if name not in columns) for values in combinations]
    for numbers in grouped(range(len(others)), others.__getitem__).values():
        yield from (numbers[first : first + _MOST_COLUMNS] for first in range(0, len(numbers), _MOST_COLUMNS))


_ALONE = 4.0
"""Time of searches after which further processes compute the rest. [s]"""
_BATCHES_PER_JOB = 8

_Computed = tuple[list[int], list[Point]]


def computed_points(
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
