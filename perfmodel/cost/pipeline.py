"""Time of m micro-batches through a pipeline, from the forward and backward times of its stages.

Stages may be uneven: the first holds the embedding, the last the head, and layers need not divide. The closed forms are exact for
even stages and for the slowest-stage bound of uneven ones. `tests/oracles` compares them with a simulation of the schedule tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column
from perfmodel.parallel.layout import PipelineSchedule


def pipeline_time(
    *,
    schedule: PipelineSchedule,
    total_forward: Column,
    total_backward: Column,
    slowest_forward: Column,
    slowest_backward: Column,
    slowest: Column,
    num_microbatches: Column,
    virtual_stages: Column,
    num_ranks: Column = 1.0,
    unequal: Column = 0.0,
) -> Any:
    """Return the time of one step's micro-batches through the pipeline, without sends. [s]

    gpipe        F + B + (m - 1) (max f + max b)
    1f1b         F + B + (m - 1) max(f + b)
    interleaved  (F + B) / v + (m - 1/v) max(f + b) + (p - 1) e m / p

    total_forward, total_backward  F, B  sums over the stages of one micro-batch's time   [s]
    slowest_*                            the largest over the stages                       [s]
    num_microbatches m, virtual_stages v, num_ranks p                                       [-]
    unequal  e   the longest virtual stage over the mean of those of the slowest rank       [s]

    Each group of p micro-batches fills and drains at the pace of the longest virtual stage. Unequal virtual stages therefore gain nothing
    over fewer equal ones of that length. Exact for one group if all ranks hold the same number of layers, else within 6 % of the simulated
    schedule (126 and 96 layers).

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (SC21), section 2.2: bubble (p - 1)/m, and (p - 1)/(v m) interleaved.
    """
    F, B, m, v = total_forward, total_backward, num_microbatches, virtual_stages
    match schedule:
        case PipelineSchedule.GPIPE:
            return (F + B) + (m - 1.0) * (slowest_forward + slowest_backward)
        case PipelineSchedule.ONE_F_ONE_B:
            return (F + B) + (m - 1.0) * slowest
        case PipelineSchedule.INTERLEAVED:
            return ((F + B) / v + (m - 1.0 / v) * slowest) + (num_ranks - 1.0) * unequal * (m / num_ranks)


def send_delay(
    *, schedule: PipelineSchedule, hop: Column, chunk: Column, num_ranks: Column, num_microbatches: Column, virtual_stages: Column
) -> Any:
    """Return the time that overlapped sends between ranks add to a step: a pass waits for its input in flight. [s]

    gpipe        2 h (p - 1) + (m - 1) max(0, 2 h - c)
    1f1b         2 h ((p - 1) + (m - 1) - ceil((m - 1) / p))
    interleaved  2 h (v p - 1) + (m v - 1) max(0, h - c / 2)

    hop h    one send                                                                  [s]
    chunk c  forward and backward of one micro-batch through one virtual stage          [s]

    1f1b has few micro-batches in flight: each round trip of p of them exposes (p - 1) hops each way, however short. Interleaving has more
    in flight and exposes only one pass through the virtual stages. The last terms are the pace of hops that take longer than compute.

    Source: exact on a simulation of the schedule tables with even stages (`tests/oracles`) while hops are short; for 1f1b always.
    """
    h, c, p, m, v = hop, chunk, num_ranks, num_microbatches, virtual_stages
    match schedule:
        case PipelineSchedule.GPIPE:
            return 2.0 * h * (p - 1.0) + (m - 1.0) * np.maximum(2.0 * h - c, 0.0)
        case PipelineSchedule.ONE_F_ONE_B:
            return 2.0 * h * ((p - 1.0) + (m - 1.0) - np.ceil((m - 1.0) / p))
        case PipelineSchedule.INTERLEAVED:
            return 2.0 * h * (v * p - 1.0) + (m * v - 1.0) * np.maximum(h - c / 2.0, 0.0)


def live_microbatches(
    *, schedule: PipelineSchedule, rank: Column, num_ranks: Column, num_microbatches: Column, virtual_stages: Column
) -> Any:
    """Return the maximum of in-flight micro-batches of a pipeline rank, in units of its full share of the layers. [-]

    gpipe        m
    1f1b         min(m, p - i)
    interleaved  min(m v, 2 (p - i - 1) + (v - 1) p + 1) / v

    rank i (from 0), num_ranks p. Source: Korthikanti et al. 2022, section 4.2.3 (first stage: 1 + (p - 1)/(p v) of p).
    """
    i, p, m, v = rank, num_ranks, num_microbatches, virtual_stages
    match schedule:
        case PipelineSchedule.GPIPE:
            return m + 0.0 * p
        case PipelineSchedule.ONE_F_ONE_B:
            return np.minimum(m, p - i)
        case PipelineSchedule.INTERLEAVED:
            return np.minimum(m * v, 2.0 * (p - i - 1.0) + (v - 1.0) * p + 1.0) / v


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLayers:
    """In-flight layers of a rank: forward passes of each virtual stage without their backward pass, times the stage's layers.

    at_first  when the first backward pass begins
    most      maximum of the step
    present   share of the layers that have had a backward pass when `most` is reached for the last time   [-]
    first_ran, last_ran  1 if the first, the last virtual stage has had one then, else 0
    fewer     `most` less the maximum once all layers have had a backward pass
    ended     1 if passes of the last virtual stage have ended by then, else 0
    arriving  layers of the virtual stage with its first backward pass when `most` is reached for the last time, else 0
    fewer_at_last    `most` less the maximum while the last virtual stage turns from forward to backward
    fewer_at_first   `most` less the maximum when all layers of the first virtual stage have just run backward for a micro-batch
    later_at_last, later_at_first   further decrease once all layers have had a backward pass before
    over_at_first    share of the layers that have had their last backward pass when the first virtual stage has its second one
    """

    at_first: Column
    most: Column
    present: Column
    first_ran: Column
    last_ran: Column
    fewer: Column
    ended: Column
    arriving: Column
    fewer_at_last: Column
    fewer_at_first: Column
    later_at_last: Column
    later_at_first: Column
    over_at_first: Column


#: Groups of pp micro-batches after which further groups change nothing: forward and backward passes alternate through a full group.
_STEADY_GROUPS = 3


def live_layers(*, schedule: PipelineSchedule, chunks: Sequence[int], rank: int, num_ranks: int, num_microbatches: int) -> LiveLayers:
    """Return the live layers of one rank. chunks: layers of each of its virtual stages."""
    rows = _live_rows(schedule, tuple(chunks), rank, num_ranks)
    return _columns(rows[_live_row(schedule, num_ranks, num_microbatches)], schedule, num_microbatches)


def three_live_layers(
    table: NDArray[np.float64], *, schedule: PipelineSchedule, num_ranks: int, num_microbatches: Column, num_between: int = 1
) -> list[LiveLayers]:
    """Return the live layers of the first, a middle (repeated) and the last rank.

    table   a `live_table`, or several as [row, schedule, rank, field]: then the last dim of `num_microbatches`, of size 1, becomes that of
            schedules
    """
    row = _live_row(schedule, num_ranks, num_microbatches)
    selected = table[row if table.ndim == 3 else row[..., 0]]
    first, middle, last = (_columns(selected[..., i, :], schedule, num_microbatches) for i in range(3))
    return [first, *[middle] * num_between, last]


@lru_cache(maxsize=4096)
def live_table(schedule: PipelineSchedule, stage_layers: tuple[int, ...], num_ranks: int) -> NDArray[np.float64]:
    """Return [number of micro-batches, rank, field of `LiveLayers`] for the first, the fullest middle and the last rank.

    Without a middle rank its entries are zeros. `_live_row` maps a number of micro-batches to a row. Entries of gpipe are per micro-batch.
    """
    p = num_ranks
    first, last = _live_rows(schedule, stage_layers[::p], 0, p), _live_rows(schedule, stage_layers[p - 1 :: p], p - 1, p)
    # among ranks with equal layers, the first has the most in flight
    ranks = {stage_layers[rank::p]: rank for rank in range(p - 2, 0, -1)}
    middle = np.zeros_like(first)
    if ranks:
        candidates = np.array([_live_rows(schedule, chunks, rank, p) for chunks, rank in ranks.items()])
        middle = np.take_along_axis(candidates, candidates[..., 1].argmax(axis=0)[None, :, None], axis=0)[0]
    return np.stack([first, middle, last], axis=1)


def live_of_table(table: NDArray[np.float64]) -> LiveLayers:
    """Return all rows of a `live_table`, [number of micro-batches, rank]; entries of gpipe are per micro-batch."""
    return _columns(table, PipelineSchedule.ONE_F_ONE_B, 1)


def _columns(rows: NDArray[np.float64], schedule: PipelineSchedule, num_microbatches: Column) -> LiveLayers:
    values = np.moveaxis(rows, -1, 0) if rows.ndim > 1 else rows.tolist()
    columns: dict[str, Column] = {column.name: value for column, value in zip(fields(LiveLayers), values, strict=True)}
    if schedule is PipelineSchedule.GPIPE:
        columns |= {name: num_microbatches * columns[name] for name in ("at_first", "most")}
    return LiveLayers(**columns)


def _live_row(schedule: PipelineSchedule, num_ranks: int, num_microbatches: Column) -> Any:
    """Return the row of a table for a number of micro-batches. Numbers beyond the last row change nothing."""
    match schedule:
        case PipelineSchedule.GPIPE:
            row = np.minimum(num_microbatches, 2.0)
        case PipelineSchedule.ONE_F_ONE_B:
            row = np.minimum(num_microbatches, num_ranks + 1.0)
        case PipelineSchedule.INTERLEAVED:
            row = np.minimum(np.ceil(num_microbatches / num_ranks), _STEADY_GROUPS)
    return np.asarray(row).astype(np.int64) - 1


@lru_cache(maxsize=4096)
def _live_rows(schedule: PipelineSchedule, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
    p, held = num_ranks, float(sum(chunks))
    if schedule is PipelineSchedule.INTERLEAVED:
        ahead = 2 * (p - rank - 1) + (len(chunks) - 1) * p
        return np.array([_live_passes(chunks, p, groups * p, ahead) for groups in range(1, _STEADY_GROUPS + 1)])
    rows = []
    for m in range(1, 3 if schedule is PipelineSchedule.GPIPE else p + 2):
        alive = m if schedule is PipelineSchedule.GPIPE else min(m, p - rank)
        ends = float(m == alive)  # no forward pass after the first backward pass
        most = held if schedule is PipelineSchedule.GPIPE else alive * held
        ran = float(m > alive)
        rows.append((most, most, ran, ran, ran, ends * held, ends, ends * held, 0.0, held, ends * held, ends * held, 0.0))
    return np.array(rows)


def _live_passes(chunks: tuple[int, ...], num_ranks: int, num_microbatches: int, ahead: int) -> tuple[float, ...]:
    """Return the fields of `LiveLayers` from the order of passes.

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
