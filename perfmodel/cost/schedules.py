"""Pipeline schedules: order of the passes on each rank, time of a step, exposed sends and micro-batches in flight.

A schedule is one class. Closed forms take columns. They are exact for even stages and a bound by the slowest stage for uneven ones:
the first stage has the embedding, the last the head, and layers need not divide. `tests/oracles` compares them with a simulation of the
orders. Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (SC21), section 2.2 and figures 3 and 4.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.pipeline import Pipeline, Schedule, StageTimes
from perfmodel.foundation.columns import Column
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.choices import PipelineSchedule, num_rounds
from perfmodel.parallel.layout import Placement, stages_of_ranks
from perfmodel.parallel.pass_orders import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    MOST_GATHERED,
    PAIRED_BACKWARD,
    WEIGHT_GRADIENT,
    Pass,
    freed_weights,
    in_flight,
    steps_of,
)
from perfmodel.parallel.schedule_table import AnySchedule, ScheduleTable


class GPipe(Schedule):
    """All forward passes, then all backward passes."""

    paces_apart = keeps_all = True

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        return [(kind, 0, i) for kind in (FORWARD, BACKWARD) for i in range(num_microbatches)]

    def time(self, times: StageTimes, pipeline: Pipeline) -> Any:
        """F + B + (m - 1) (f + b)"""
        total = times.total_forward + times.total_backward
        return total + (pipeline.num_microbatches - 1.0) * (times.slowest_forward + times.slowest_backward)

    def send_delay(self, hop: Column, chunk: Column, pipeline: Pipeline) -> Any:
        """2 h (p - 1) + (m - 1) max(0, 2 h - c)"""
        return 2.0 * hop * (pipeline.num_ranks - 1.0) + (pipeline.num_microbatches - 1.0) * np.maximum(2.0 * hop - chunk, 0.0)

    def begun(self, rank: Column, pipeline: Pipeline) -> Any:
        return pipeline.num_microbatches + 0.0 * pipeline.num_ranks

    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        return np.minimum(num_microbatches, 2.0)

    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        """Entries are per micro-batch."""
        held = float(sum(chunks))
        return np.array([_without_chunks(held, held, ends=1.0, ran=0.0) for _ in range(2)])


class OneForwardOneBackward(Schedule):
    """Forward passes of the warm-up for the later ranks, one forward and one backward in turn, then the remaining backward passes."""

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        warm = min(num_ranks - rank - 1, num_microbatches)
        order: list[Pass] = [(FORWARD, 0, i) for i in range(warm)]
        for i in range(num_microbatches - warm):
            order += [(FORWARD, 0, warm + i), (BACKWARD, 0, i)]
        return order + [(BACKWARD, 0, i) for i in range(num_microbatches - warm, num_microbatches)]

    def time(self, times: StageTimes, pipeline: Pipeline) -> Any:
        """F + B + (m - 1) c"""
        return (times.total_forward + times.total_backward) + (pipeline.num_microbatches - 1.0) * times.slowest

    def send_delay(self, hop: Column, chunk: Column, pipeline: Pipeline) -> Any:
        """2 h ((p - 1) + (m - 1) - ceil((m - 1) / p))

        Few micro-batches are in flight: each round trip of p of them exposes (p - 1) hops each way, however short.
        """
        p, later = pipeline.num_ranks, pipeline.num_microbatches - 1.0
        return 2.0 * hop * ((p - 1.0) + later - np.ceil(later / p))

    def begun(self, rank: Column, pipeline: Pipeline) -> Any:
        """min(m, p - i)"""
        return np.minimum(pipeline.num_microbatches, pipeline.num_ranks - rank)

    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        return np.minimum(num_microbatches, num_ranks + 1.0)

    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        held, rows = float(sum(chunks)), []
        for m in range(1, num_ranks + 2):
            alive = min(m, num_ranks - rank)
            rows.append(_without_chunks(held, alive * held, ends=float(m == alive), ran=float(m > alive)))
        return np.array(rows)


#: Groups of p micro-batches after which further groups change nothing: forward and backward passes alternate through a full group.
STEADY_GROUPS = 3


class Interleaved(Schedule):
    """1f1b over v virtual stages a rank: groups of p micro-batches, each through all chunks, after 2 (p - i - 1) + (v - 1) p forwards.

    Earlier releases of Megatron-LM ran all forward passes first if the number of micro-batches is the number of ranks. torch does not.
    """

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        forward, backward = (_in_groups(kind, num_ranks, num_microbatches, num_chunks) for kind in (FORWARD, BACKWARD))
        total = len(forward)
        warm = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks, total)
        order = forward[:warm]
        for i in range(total - warm):
            order += [forward[warm + i], backward[i]]
        return order + backward[total - warm :]

    def time(self, times: StageTimes, pipeline: Pipeline) -> Any:
        """(F + B) / v + (m - 1/v) c + (p - 1) e m / p

        Each group of p micro-batches fills and drains at the pace of the longest virtual stage. Unequal virtual stages therefore gain
        nothing over fewer equal ones of that length. Exact for one group if all ranks hold the same number of layers, else within 6 % of
        the simulated order (126 and 96 layers).
        """
        p, m, v = pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages
        return ((times.total_forward + times.total_backward) / v + (m - 1.0 / v) * times.slowest) + (p - 1.0) * times.unequal * (m / p)

    def send_delay(self, hop: Column, chunk: Column, pipeline: Pipeline) -> Any:
        """2 h (v p - 1) + (m v - 1) max(0, h - c / 2)

        One pass through the virtual stages is exposed; the last term is the pace of hops that take longer than compute.
        """
        p, m, v = pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages
        return 2.0 * hop * (v * p - 1.0) + (m * v - 1.0) * np.maximum(hop - chunk / 2.0, 0.0)

    def begun(self, rank: Column, pipeline: Pipeline) -> Any:
        """min(m, 2 p - 1): p first passes, then the other passes of these micro-batches, then p - 1 first passes"""
        return np.minimum(pipeline.num_microbatches, 2.0 * pipeline.num_ranks - 1.0)

    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        return np.minimum(np.ceil(num_microbatches / num_ranks), STEADY_GROUPS)

    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        """Source: Korthikanti et al. 2022, section 4.2.3: the first rank has 1 + (p - 1)/(p v) of p micro-batches in flight."""
        return self._live_groups(chunks, rank, num_ranks, ahead=2 * (num_ranks - rank - 1) + (len(chunks) - 1) * num_ranks)

    def _live_groups(self, chunks: tuple[int, ...], rank: int, num_ranks: int, *, ahead: int) -> NDArray[np.float64]:
        """Return the live layers by number of groups. ahead: forward passes before the first backward pass"""
        rows = []
        for number in range(num_ranks, (STEADY_GROUPS + 1) * num_ranks, num_ranks):
            freed = freed_weights(self.order(rank, num_ranks, number, len(chunks)) if len(chunks) > MOST_GATHERED else (), chunks)
            rows.append((*_live_passes(chunks, num_ranks, number, ahead), *freed))
        return np.array(rows)


class ZeroBubble(Interleaved):
    """Interleaved, with backward in two passes: gradients of inputs at once, gradients of weights later, where the rank would idle.

    ZB-H1 for one virtual stage. Warm-up: (p - i - 1) + (v - 1) q forwards; i gradients of weights are postponed. The micro-batches run
    through the virtual stages in max(1, floor(m / p)) rounds of q.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241); torch's `ScheduleInterleavedZeroBubble`.
    """

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        size = num_microbatches // int(num_rounds(num_microbatches, num_ranks))
        forward, inputs, weights = (
            _in_groups(kind, size, num_microbatches, num_chunks) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
        )
        warm = (num_ranks - rank - 1) + (num_chunks - 1) * size
        order = forward[:warm]
        for i, gradient in enumerate(inputs):
            order += [*forward[warm + i : warm + i + 1], gradient]
            if i >= rank:
                order.append(weights[i - rank])
        return order + weights[max(len(weights) - rank, 0) :]

    def time(self, times: StageTimes, pipeline: Pipeline) -> Any:
        """(F + B - W) / v + (m - 1/v) c - (p - 2) w / v + (p - 1) e m / p

        Even stages: m c + (p - 1) (f + b - 2 w) / v. Exact if w <= min(f, b - w), else too low by 6 % at most; within 1 % if only the last
        stage is longer by a fifth, within 10 % for stages that differ by a factor of two. Less than p micro-batches leave idle time between
        the virtual stages: F + B - W + ((m - 1) (c - w) + w + (v - 1) max(0, m b - (B - W))) / v + (p - 1) e m / p, within 1 %.
        """
        p, m, v, w = pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages, times.slowest_weights
        filled = times.total_weights + (p - 2.0) * w
        full = super().time(times, pipeline) - filled / v
        inputs = times.total_backward - times.total_weights
        turn = np.maximum(m * times.slowest_backward - inputs, 0.0)
        few = (times.total_forward + inputs) + ((m - 1.0) * (times.slowest - w) + w + (v - 1.0) * turn) / v
        return np.where(np.less(m, p), few + (p - 1.0) * times.unequal * (m / p), full)

    def send_delay(self, hop: Column, chunk: Column, pipeline: Pipeline) -> Any:
        """h n + (2 ((p - 1) + (m v - 1) - ceil((m v - 1) / p)) - n) max(0, h - c / 6),   n = 4 (p - 1) + p (v - 1) - 2 (m = p)

        Postponed passes hide the sends of the steady state while they take longer than both sends of a chunk; they are taken as a third of
        it. Longer sends delay every round trip, as with 1f1b. With less than p micro-batches, one pass through all stages is exposed.
        """
        p, m, v = pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages
        passes = m * v - 1.0
        # a round of more than p micro-batches leaves time for the send to its next virtual stage
        turns = np.where(m // num_rounds(m, p) > p, 0.0, p * (v - 1.0))
        few = 4.0 * (p - 1.0) + turns - 2.0 * np.maximum(1.0 + p - m, 0.0)
        few = np.where(np.less(m, p), np.maximum(few, 2.0 * (v * p - 1.0)), few)
        all_of_them = 2.0 * ((p - 1.0) + passes - np.ceil(passes / p))
        return hop * few + np.maximum(all_of_them - few, 0.0) * np.maximum(hop - chunk / 6.0, 0.0)

    def begun(self, rank: Column, pipeline: Pipeline) -> Any:
        """min(m, p); a round with several virtual stages"""
        p, m = pipeline.num_ranks, pipeline.num_microbatches
        return np.where(np.greater(pipeline.virtual_stages, 1.0), m // num_rounds(m, p), np.minimum(m, p))

    def postponed(self, rank: Column, pipeline: Pipeline) -> Any:
        """min(m v, i + 1); none in the first virtual stage, whose inputs need no gradient."""
        passes = np.minimum(rank + 1.0, pipeline.num_microbatches * pipeline.virtual_stages)
        return np.where((np.asarray(rank) > 0.0) | (np.asarray(pipeline.virtual_stages) > 1.0), passes, 0.0)

    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        """Return that of at most `STEADY_GROUPS` rounds. Rounds of one micro-batch a rank come first."""
        rounds = num_rounds(num_microbatches, num_ranks)
        size, steady = num_microbatches // rounds, np.minimum(rounds, STEADY_GROUPS)
        return np.where(size == num_ranks, steady, STEADY_GROUPS + size * steady)

    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        rows = self._live_groups(chunks, rank, num_ranks, ahead=len(chunks) * num_ranks - 1)
        forward = np.cumsum(np.tile(np.repeat(np.array(chunks, dtype=np.float64), num_ranks), 2))
        rows[:, 0] = forward[(len(chunks) - 1) * num_ranks + num_ranks - rank - 1]  # as the first gradients of inputs begin
        others = np.zeros(((STEADY_GROUPS + 1) * num_ranks - 1, rows.shape[1]))
        for number in range(1, len(others) + 1):
            if number % num_ranks and number % num_rounds(number, num_ranks) == 0:
                others[number - 1] = in_flight(self.order(rank, num_ranks, number, len(chunks)), chunks)
        return np.concatenate([rows, others])


STEADY_MULTIPLE = 4
"""Micro-batches that are simulated, as a multiple of the ranks. Further ones take the pace of the slowest rank: within 1 % of a simulation
of all of them (`tests/oracles`), and exact for even stages."""


class Simulated(Schedule):
    """A schedule whose step is its simulated orders (`parallel/pass_orders.py`), with the times of every virtual stage.

    least   micro-batches that the orders need, as a multiple of the ranks; fewer, which no plan has, are simulated as that number
    most    micro-batches that are simulated, as a multiple of the ranks
    """

    placement: Placement = Placement.V
    least: ClassVar[int] = 0
    most: ClassVar[float] = STEADY_MULTIPLE

    def simulated(self, num_ranks: float, num_microbatches: float) -> int:
        """Return the number of micro-batches in the simulation of a step."""
        return int(min(max(num_microbatches, self.least * num_ranks), self.most * num_ranks))

    def time(self, times: StageTimes, pipeline: Pipeline) -> Any:
        """end of the last pass of m' = min(m, 4 p) micro-batches + (m - m') c"""
        p, m, v = np.broadcast_arrays(*np.atleast_1d(pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages))
        numbers = np.minimum(np.maximum(m, self.least * p), self.most * p)
        columns = [*chain(*times.by_stage)]
        ends = np.zeros(np.broadcast_shapes(p.shape, *map(np.shape, columns)))
        lengths = np.stack([np.broadcast_to(column, ends.shape) for column in columns]).reshape(-1, 3, *ends.shape)
        for num_ranks, number, chunks in distinct_rows(p, numbers, v):
            at = np.broadcast_to((p == num_ranks) & (numbers == number) & (v == chunks) & pipeline.is_timed, ends.shape)
            if at.any():
                ends[at] = self.end(num_ranks, number, chunks, lengths[: num_ranks * chunks, :, at])
        ends = ends.reshape(np.broadcast_shapes(*map(np.shape, (pipeline.num_ranks, pipeline.num_microbatches, *columns))))
        return ends[()] + np.maximum(pipeline.num_microbatches - self.most * np.asarray(pipeline.num_ranks), 0.0) * times.slowest

    def send_delay(self, hop: Column, chunk: Column, pipeline: Pipeline) -> Any:
        """Simulated, on even stages with a forward pass and both parts of backward of equal length; between `_HOPS` linear."""
        third = np.asarray(chunk) / 3.0
        hops = np.asarray(hop) / np.maximum(third, np.finfo(float).tiny)
        p, m, v, hops, third = np.broadcast_arrays(pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages, hops, third)
        delays = np.empty(p.shape)
        for num_ranks, number, chunks in distinct_rows(p, m, v):
            at = (p == num_ranks) & (m == number) & (v == chunks)
            known = _delays(self, num_ranks, number, chunks)
            slope = (known[-1] - known[-2]) / (_HOPS[-1] - _HOPS[-2])
            delays[at] = np.interp(hops[at], _HOPS, known) + slope * np.maximum(hops[at] - _HOPS[-1], 0.0)
        return (delays * third)[()]

    def end(self, num_ranks: int, num_microbatches: int, num_chunks: int, times: NDArray[np.float64], hop: Any = 0.0) -> Any:
        """Return the end of the last pass, as columns. [s]

        times   forward, backward and gradients of weights of each virtual stage   [virtual stages, 3, columns]
        """
        levels = _levels(self, num_ranks, num_microbatches, num_chunks)
        forward, backward, weights = times.swapaxes(0, 1)
        lengths = np.concatenate([forward, backward, backward - weights, weights])
        ends = np.empty((2 + levels.num_passes, lengths.shape[-1]))
        ends[0], ends[1] = -np.inf, 0.0
        for passes, before, sent, length in levels.steps:
            start = np.maximum(ends.take(before, axis=0), ends.take(sent, axis=0) + hop)
            np.add(start, lengths.take(length, axis=0), out=ends[passes])
        return ends[levels.last].max(axis=0)

    def begun(self, rank: Column, pipeline: Pipeline) -> Any:
        return self._counted(rank, pipeline, 0)

    def postponed(self, rank: Column, pipeline: Pipeline) -> Any:
        """None in the first virtual stage, whose inputs need no gradient."""
        return self._counted(rank, pipeline, 1)

    def ended(self, rank: Column, pipeline: Pipeline) -> Any:
        return self._counted(rank, pipeline, 2)

    def _counted(self, rank: Column, pipeline: Pipeline, which: int) -> Any:
        """Return one of `_passes_held` for columns."""
        of = np.broadcast_arrays(rank, pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages)
        rows = np.stack([column.ravel() for column in of], axis=-1).astype(np.int64).tolist()
        counts = [_passes_held(self, *numbers)[which] for numbers in rows]
        return np.array(counts).reshape(of[0].shape)[()]

    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        return np.minimum(num_microbatches, 2.0 * num_ranks + 1.0)

    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        numbers = [self.simulated(num_ranks, number) for number in range(1, 2 * num_ranks + 2)]
        return np.array([in_flight(self.order(rank, num_ranks, number, len(chunks)), chunks) for number in numbers])


#: Sends whose delay is simulated, over a forward pass of a virtual stage.
_HOPS = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0])


@session_cache(maxsize=4096)
def _delays(schedule: Simulated, num_ranks: int, num_microbatches: int, num_chunks: int) -> NDArray[np.float64]:
    """Return the delays by `_HOPS`, over a forward pass of a virtual stage. Micro-batches that are not simulated add the same, p by p."""
    simulated = schedule.simulated(num_ranks, num_microbatches)
    if num_microbatches > simulated:
        last, before = (_delays(schedule, num_ranks, number, num_chunks) for number in (simulated, simulated - num_ranks))
        return last + (num_microbatches - simulated) / num_ranks * (last - before)
    times = np.broadcast_to(np.array([1.0, 2.0, 1.0])[:, None], (num_ranks * num_chunks, 3, len(_HOPS)))
    ends = schedule.end(num_ranks, simulated, num_chunks, times, _HOPS)
    return ends - ends[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """Passes of all ranks by level: a pass is on the level after those that it waits for.

    steps   of each level: passes, the pass before each on its rank, the one that sends its input, its kind and virtual stage. Pass 0 has
            always ended, and pass 1 ends at the start of the step.
    last    last pass of each rank
    """

    num_passes: int
    steps: list[tuple[slice, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]
    last: NDArray[np.int64]


@session_cache(maxsize=256)
def _levels(schedule: Simulated, num_ranks: int, num_microbatches: int, num_chunks: int) -> _Levels:
    orders = [schedule.order(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)]
    num_stages = num_ranks * num_chunks
    stages = stages_of_ranks(num_ranks, num_stages, schedule.placement)
    kinds = {FORWARD: 0, BACKWARD: 1, PAIRED_BACKWARD: 1, INPUT_GRADIENT: 2, WEIGHT_GRADIENT: 3}
    by_level: list[list[tuple[int, int, tuple[int, int] | None]]] = []
    level_of: dict[tuple[int, int], int] = {}
    for rank, position, sent in steps_of(orders, num_stages, schedule.placement):
        level = 1 + max(level_of.get((rank, position - 1), -1), -1 if sent is None else level_of[sent])
        level_of[rank, position] = level
        if level == len(by_level):
            by_level.append([])
        by_level[level].append((rank, position, sent))
    index = {(rank, -1): 1 for rank in range(num_ranks)}
    steps = []
    for level_passes in by_level:
        first = len(index) + 2 - num_ranks
        rows = []
        for rank, position, sent in level_passes:
            kind, chunk, _ = orders[rank][position]
            rows.append((index[rank, position - 1], 0 if sent is None else index[sent], kinds[kind] * num_stages + stages[rank][chunk]))
        index |= {(rank, position): first + number for number, (rank, position, _) in enumerate(level_passes)}
        before, sent_by, length = np.array(rows).T
        steps.append((slice(first, first + len(rows)), before, sent_by, length))
    last = np.array([index[rank, len(order) - 1] for rank, order in enumerate(orders)])
    return _Levels(num_passes=len(index) - num_ranks, steps=steps, last=last)


def distinct_rows(*columns: Any) -> list[tuple[int, ...]]:
    """Return the distinct combinations of numbers in columns."""
    rows = np.stack([column.ravel() for column in columns], axis=-1).astype(np.int64)
    return list(map(tuple, np.unique(rows, axis=0).tolist()))


@session_cache(maxsize=65536)
def _passes_held(schedule: Simulated, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[float, float, float]:
    """Return the micro-batches of the first virtual stage as backward begins, and the maxima of split backward passes and of micro-batches
    in the last virtual stage of the rank. [-]"""
    order = schedule.order(rank, num_ranks, schedule.simulated(num_ranks, num_microbatches), num_chunks)
    begun = sum(chunk == 0 for _, chunk, _ in takewhile(lambda one: one[0] == FORWARD, order))
    postponed = in_last = most_postponed = most_in_last = 0
    for kind, chunk, _ in order:
        if chunk or rank:
            postponed += (kind == INPUT_GRADIENT) - (kind == WEIGHT_GRADIENT)
        if chunk == num_chunks - 1:
            in_last += (kind == FORWARD) - (kind not in (FORWARD, WEIGHT_GRADIENT))
        most_postponed, most_in_last = max(most_postponed, postponed), max(most_in_last, in_last)
    return float(begun), float(most_postponed), float(most_in_last)


class ZBV(Simulated):
    """Two virtual stages a rank in a V, backward split: no bubble if forward and both parts of backward take equally long.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6; torch's `ScheduleZBVZeroBubble`.
    """

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        """Return the order of at least 2 p - 1 micro-batches, without the passes of those that there are not."""
        p, number = num_ranks, max(2 * num_ranks - 1, num_microbatches)
        run = _Run()
        run.add((FORWARD, 0), times=2 * (p - rank) - 1)
        run.add((FORWARD, 1), (FORWARD, 0), times=rank)
        run.add((FORWARD, 1), (INPUT_GRADIENT, 1), (WEIGHT_GRADIENT, 1), times=p - rank)
        while run.counts[FORWARD, 1] < number:
            if run.counts[FORWARD, 0] < number:
                run.add((FORWARD, 0))
            run.add((INPUT_GRADIENT, 0), (WEIGHT_GRADIENT, 0), (FORWARD, 1), (INPUT_GRADIENT, 1), (WEIGHT_GRADIENT, 1))
        run.add((INPUT_GRADIENT, 0), (INPUT_GRADIENT, 1), times=rank)
        run.add((INPUT_GRADIENT, 0), (WEIGHT_GRADIENT, 0), times=p - rank)
        for chunk in (1, 0):
            run.add((WEIGHT_GRADIENT, chunk), times=number - run.counts[WEIGHT_GRADIENT, chunk])
        return [one for one in run.passes if one[2] < num_microbatches]


class DualPipeV(Simulated):
    """Two virtual stages a rank in a V; forward of one and backward of the other run in pairs, some of the last backward passes are split.

    A pair takes as long as its passes, one after the other, as in torch. Exchanges of experts that overlap with the other pass are not in
    the times of the passes (`hides_exchanges` of a framework).

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, and its code (deepseek-ai/DualPipe); torch's `ScheduleDualPipeV`.
    """

    least = 2

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        later = num_ranks - rank - 1
        run = _Run()
        run.add((FORWARD, 0), times=2 * later)
        run.add((FORWARD, 0), (FORWARD, 1), times=rank + 1)
        for _ in range(later):
            run.add((INPUT_GRADIENT, 1))
            run.add_weights()
            run.add((FORWARD, 1))
        paired = num_microbatches - 2 * num_ranks + rank + 1
        if not later:  # the first two passes of the last rank are not a pair, which shortens the bubble
            run.add((FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (PAIRED_BACKWARD, 0))
            paired -= 1
        run.add((FORWARD, 0), (PAIRED_BACKWARD, 1), (FORWARD, 1), (PAIRED_BACKWARD, 0), times=paired)
        run.add((BACKWARD, 1), (FORWARD, 1), (PAIRED_BACKWARD, 0), times=later)
        # the second half of the last backward passes is split; in the middle, one chunk of an even rank is not
        ends = [(BACKWARD, chunk) for _ in range(rank + 1) for chunk in (1, 0)]
        split = 2 * ((rank + 1) // 2) + (rank + 1) % 2
        for _, chunk in ends[:split]:
            run.add((BACKWARD, chunk))
        for _, chunk in ends[split:]:
            run.add((INPUT_GRADIENT, chunk))
        for _ in range(later):
            run.add_weights()
            run.add((INPUT_GRADIENT, 0))
        for _ in range(rank + 1):
            run.add_weights()
        return run.passes


class _Run:
    """Passes of a rank in order; the n-th pass of a kind and chunk is of micro-batch n.

    counts   passes so far by kind and chunk; full backward passes count as gradients of inputs
    pending  split backward passes without gradients of weights yet
    """

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.counts = Counter[tuple[str, int]]()
        self.pending: list[tuple[int, int]] = []

    def add(self, *kinds: tuple[str, int], times: int = 1) -> None:
        """Add passes of these kinds and chunks, one after the other, several times."""
        for kind, chunk in kinds * times:
            counted = INPUT_GRADIENT if kind in (BACKWARD, PAIRED_BACKWARD) else kind
            microbatch = self.counts[counted, chunk]
            self.counts[counted, chunk] += 1
            self.passes.append((kind, chunk, microbatch))
            if kind == INPUT_GRADIENT:
                self.pending.append((chunk, microbatch))

    def add_weights(self) -> None:
        """Add the gradients of weights that have waited for the longest, if there are any."""
        if self.pending:
            self.passes.append((WEIGHT_GRADIENT, *self.pending.pop(0)))


class FromFile(Simulated):
    """A schedule from a file, for one number of ranks and of micro-batches."""

    most = np.inf

    def __init__(self, table: ScheduleTable) -> None:
        self.table, self.placement = table, table.placement

    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        return list(self.table.orders[rank])

    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        return np.ones(np.shape(num_microbatches))

    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        return np.array([in_flight(self.table.orders[rank], chunks)])


@session_cache(maxsize=64)
def _from_file(table: ScheduleTable) -> FromFile:
    return FromFile(table)


def schedule_of(schedule: AnySchedule) -> Schedule:
    """Return the orders and times of a schedule."""
    return _from_file(schedule) if isinstance(schedule, ScheduleTable) else SCHEDULES[schedule]


SCHEDULES: dict[PipelineSchedule, Schedule] = {
    PipelineSchedule.GPIPE: GPipe(),
    PipelineSchedule.ONE_F_ONE_B: OneForwardOneBackward(),
    PipelineSchedule.INTERLEAVED: Interleaved(),
    PipelineSchedule.ZERO_BUBBLE: ZeroBubble(),
    PipelineSchedule.ZBV: ZBV(),
    PipelineSchedule.DUALPIPEV: DualPipeV(),
}


def _in_groups(kind: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    """Return the passes of a kind: groups of `num_ranks` micro-batches, each through all chunks, forward from the first, else the last."""
    passes: list[Pass] = []
    for i in range(num_microbatches * num_chunks):
        group, within = divmod(i, num_ranks * num_chunks)
        chunk, index = divmod(within, num_ranks)
        passes.append((kind, chunk if kind == FORWARD else num_chunks - 1 - chunk, group * num_ranks + index))
    return passes


def _without_chunks(held: float, most: float, *, ends: float, ran: float) -> tuple[float, ...]:
    """Return the fields of `LiveLayers` of a rank with one virtual stage.

    ends   1 if no forward pass follows the first backward pass   ran   1 if one backward pass has ended when the most are in flight
    """
    return (most, most, ran, ran, ran, ends * held, ends, ends * held, 0.0, held, ends * held, ends * held, *[0.0] * 4)


def _live_passes(chunks: tuple[int, ...], num_ranks: int, num_microbatches: int, ahead: int) -> tuple[float, ...]:
    """Return the fields of `LiveLayers` up to `over_at_first` from the order of passes.

    The order is `ahead` forward passes, then one forward and one backward pass in turn, then the remaining backward passes. Groups of pp
    micro-batches run through the virtual stages: forward from the first to the last, backward from the last to the first.
    """
    p, v = num_ranks, len(chunks)
    total = num_microbatches * v
    layers = np.repeat(np.array(chunks, dtype=np.float64), p)
    groups = -(-num_microbatches // p)
    done = np.arange(total)  # finished backward passes
    begun = np.minimum(ahead + 1 + done, total)
    forward, backward = (np.concatenate(([0.0], np.cumsum(np.tile(order, groups)))) for order in (layers, layers[::-1]))
    alive = forward[begun] - backward[done]
    most = alive.max()
    last = total - 1 - int(alive[::-1].argmax())
    first_of_all = min(p * (v - 1) + 1, total - 1)  # backward passes until the first virtual stage has had one
    gone = max(first_of_all - last, 0)
    share = min(-(-last // p), v)
    present = sum(chunks[v - share :]) / sum(chunks) if sum(chunks) else share / v
    fewer = most - alive[first_of_all:].max() if gone else 0.0
    arriving = chunks[v - 1 - share] if last % p == 0 and share < v else 0
    by_group = alive.reshape(groups, v, p)  # [group, virtual stage from the last, backward pass]
    at_last, at_first = by_group[:, 0].max(), by_group[:, -1].max() - chunks[0]
    later_at_last = by_group[1:, 0].max(initial=0.0)
    later_at_first = max(by_group[0, -1, 1:].max(initial=0.0), by_group[1:, -1].max(initial=0.0)) - chunks[0]
    turning = float(most - at_last), float(most - at_first), float(at_last - later_at_last), float(at_first - later_at_first)
    held = max(sum(chunks), 1)
    over = sum(chunks[1:]) / held if groups == 1 else 0.0
    ran = float(share == v), float(share > 0)
    return float(alive[0]), float(most), present, *ran, float(fewer), float(min(gone, 1)), float(arriving), *turning, over
