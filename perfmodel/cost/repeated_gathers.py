"""Exposed time of weights that torch's pipelines free and gather again: those of ranks with more than `MOST_GATHERED` virtual stages.

A rank gathers a virtual stage when another one is over (`gathers_of`). The gather overlaps with the passes until the first pass of its
stage, which waits for it. The gathers of a rank follow each other on the links. First gathers are those of every plan (`parameter_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.schedules import STEADY_GROUPS, distinct_rows, schedule_of
from perfmodel.cost.stages import Stages, stage_sums, sum_of
from perfmodel.cost.step import RegionTimes
from perfmodel.cost.update import ParameterTerms
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.pass_orders import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    MOST_GATHERED,
    WEIGHT_GRADIENT,
    gathers_of,
)
from perfmodel.parallel.schedule_table import AnySchedule, ScheduleTable

Array = NDArray[np.float64]


def repeated_gather_time(terms: ParameterTerms, regions: RegionTimes, stages: Stages, pipeline: Pipeline, profile: ExecutionProfile) -> Any:
    """Return the exposed time of repeated gathers in a step, on the slowest rank. [s]

    Virtual stages are taken as parts of a rank of equal length; the ends of the model are gathered with the first and the last one.
    Source: torch 2.13, `_add_unshard_reshard` and `_PipelineScheduleRuntime` (UNSHARD is asynchronous, the first pass waits).
    """
    gather, v = terms.gather_forward["step"], pipeline.virtual_stages
    before, after = stages.inner.start, stages.inner.stop
    all_of_rank = stage_sums(gather, stages)
    f, b = stage_sums(regions.window_forward, stages), stage_sums(regions.window_backward, stages)
    w = stage_sums(regions.weights, stages) if regions.weights else (0.0,) * stages.num_ranks
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    simulated = m if isinstance(pipeline.schedule, ScheduleTable) else np.minimum(m, STEADY_GROUPS * np.asarray(p))
    distinct = [numbers for numbers in distinct_rows(*np.broadcast_arrays(p, simulated, v)) if numbers[-1] > MOST_GATHERED]
    exposed: Any = 0.0
    for rank in range(stages.num_ranks):
        first, last = stages.is_first[rank] * sum_of(gather[:before]), stages.is_last[rank] * sum_of(gather[after:])
        lengths = (f[rank] / v, b[rank] / v, w[rank] / v, (all_of_rank[rank] - (first + last)) / v, first, last)
        *shape, groups = np.broadcast_arrays(p, simulated, v, *lengths, (m - simulated) / p)
        delays = np.zeros(groups.shape)
        for numbers in distinct:
            num_ranks, number, chunks = numbers
            index = 0 if rank == 0 else num_ranks - 1 if rank == stages.num_ranks - 1 else 1
            if 0 < rank < index:  # without a middle rank
                continue
            which = pipeline.schedule, index, num_ranks, number, chunks
            at = np.logical_and.reduce([column == number for column, number in zip(shape, numbers, strict=False)])
            delays[at] = _delay_of_step(which, [column[at] for column in shape[3:]], groups[at], profile)
        exposed = np.maximum(exposed, delays)
    return exposed


#: Schedule, pipeline rank, and numbers of ranks, micro-batches and virtual stages.
_Which = tuple[AnySchedule, int, int, int, int]


def _delay_of_step(which: _Which, times: Sequence[Array], groups: Array, profile: ExecutionProfile) -> Array:
    """Return the time that a rank waits for gathers, and that they slow down the passes next to them, as columns. [s]

    times    forward, backward and gradients of weights of a virtual stage; gather of its blocks, and of both ends of the model   [s]
    groups   further micro-batches, p at a time: each group adds as much as the one before it
    """
    schedule, rank, p, m, v = which
    waited, total = _delay(_repeated_gathers(*which), times)
    if groups.any():
        before = _delay(_repeated_gathers(schedule, rank, p, m - p, v), times)
        waited, total = waited + groups * (waited - before[0]), total + groups * (total - before[1])
    if not profile.communication.prefetches_parameters:
        return total
    return waited + profile.timing.compute_slowdown_under_communication * np.maximum(total - waited, 0.0)


def _delay(gathers: _RepeatedGathers, times: Sequence[Array]) -> tuple[Array, Array]:
    """Return the time that a rank waits for gathers, and the time of all of them. [s]"""
    of_blocks, first, last = times[3:]
    number, at_first, at_last = gathers.counts
    total = number * of_blocks + (at_first * first + at_last * last)
    # hidden if its window is longer than the gather, after those that are in flight
    longest = of_blocks + np.maximum(first, last)
    waits = np.zeros(total.shape, dtype=bool)
    for *passes, ahead in gathers.windows:
        waits |= _time_of(passes, times) < (ahead + 1) * longest
    delay = np.zeros(total.shape)
    if waits.any():
        some = [column[waits] for column in times]
        delay[waits] = _waited(gathers.gathers, [some[3] + end for end in (0.0, some[4], some[5])], some)
    return delay, total


def _time_of(passes: Sequence[int], times: Sequence[Array]) -> Any:
    """Return the time of numbers of forward passes, full backward passes, gradients of inputs and gradients of weights. [s]"""
    forward, backward, inputs, weights = passes
    f, b, w, *_ = times
    return (forward * f + (backward + inputs) * b) + (weights - inputs) * w


def _waited(gathers: Sequence[_RepeatedGather], lengths: Sequence[Array], times: Sequence[Array]) -> Any:
    """Return the time that a rank waits, gather by gather. lengths: gather of a middle, the first and the last virtual stage [s]"""
    waited: list[Any] = [0.0]
    free: Any = 0.0
    for gather in gathers:
        free = np.maximum(_time_of(gather.issued, times) + waited[-1 - gather.in_flight], free) + lengths[gather.end]
        waited.append(np.maximum(waited[-1], free - _time_of(gather.needed, times)))
    return waited[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RepeatedGather:
    """A gather of a virtual stage that was gathered before.

    issued, needed   passes of each kind before it is issued, and before it is needed
    in_flight        earlier gathers that are in flight as it is issued
    end              1 for the first, 2 for the last virtual stage, else 0
    """

    issued: tuple[int, ...]
    needed: tuple[int, ...]
    in_flight: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _RepeatedGathers:
    """Repeated gathers of a rank in a step, in order.

    counts    of all, of the first and of the last virtual stage
    windows   distinct (passes of each kind from issue to need, gathers in flight)
    """

    gathers: tuple[_RepeatedGather, ...]
    counts: tuple[int, int, int]
    windows: tuple[tuple[int, ...], ...]


@session_cache(maxsize=4096)
def _repeated_gathers(schedule: AnySchedule, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> _RepeatedGathers:
    known, waits = set[int](), list[int]()
    repeated: list[_RepeatedGather] = []
    for gather in gathers_of(schedule_of(schedule).order(rank, num_ranks, num_microbatches, num_chunks)):
        if gather.chunk in known:
            in_flight = sum(1 for at in waits[-MOST_GATHERED:] if at >= gather.issued.total())
            issued, needed = (tuple(passes[kind] for kind in _KINDS) for passes in (gather.issued, gather.needed))
            end = {0: 1, num_chunks - 1: 2}.get(gather.chunk, 0)
            repeated.append(_RepeatedGather(issued=issued, needed=needed, in_flight=in_flight, end=end))
            waits.append(gather.needed.total())
        known.add(gather.chunk)
    windows = dict.fromkeys((*map(sub, it.needed, it.issued), it.in_flight) for it in repeated)
    at_first, at_last = (sum(it.end == end for it in repeated) for end in (1, 2))
    return _RepeatedGathers(gathers=tuple(repeated), counts=(len(repeated), at_first, at_last), windows=tuple(windows))


_KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
