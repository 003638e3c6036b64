"""Layers of the micro-batches in flight on each rank of a pipeline, at the moments that may give the peak of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.schedules import schedule_of
from perfmodel.foundation.columns import Column
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.placement import Placement, stages_of_ranks
from perfmodel.parallel.schedule_table import AnySchedule, ScheduleTable


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
    freed_weights    share of the layers whose sharded weights torch's pipelines have freed when `most` is reached   [-]
    first_freed, last_freed  1 if those of the first, the last virtual stage are freed then, else 0
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
    freed_weights: Column
    first_freed: Column
    last_freed: Column


def live_layers(*, schedule: AnySchedule, chunks: Sequence[int], rank: int, num_ranks: int, num_microbatches: int) -> LiveLayers:
    """Return the live layers of one rank. chunks: layers of each of its virtual stages."""
    rows = _live_rows(schedule, tuple(chunks), rank, num_ranks)
    return _columns(rows[_live_row(schedule, num_ranks, num_microbatches)], schedule, num_microbatches)


def three_live_layers(
    table: NDArray[np.float64], *, schedule: AnySchedule, num_ranks: int, num_microbatches: Column, num_between: int = 1
) -> list[LiveLayers]:
    """Return the live layers of the first, a middle (repeated) and the last rank.

    table   a `live_table`, or several as [row, schedule, rank, field]: then the last dim of `num_microbatches`, of size 1, becomes that of
            schedules
    """
    row = _live_row(schedule, num_ranks, num_microbatches)
    selected = table[row if table.ndim == 3 else row[..., 0]]
    first, middle, last = (_columns(selected[..., i, :], schedule, num_microbatches) for i in range(3))
    return [first, *[middle] * num_between, last]


@session_cache(maxsize=4096)
def live_table(schedule: AnySchedule, stage_layers: tuple[int, ...], num_ranks: int) -> NDArray[np.float64]:
    """Return [number of micro-batches, rank, field of `LiveLayers`] for the first, the fullest middle and the last rank.

    Without a middle rank its entries are zeros. `_live_row` maps a number of micro-batches to a row. Entries of gpipe are per micro-batch.
    """
    p = num_ranks
    chunks_of_ranks = [
        tuple(stage_layers[stage] for stage in stages) for stages in stages_of_ranks(p, len(stage_layers), schedule.placement)
    ]
    first, last = (_live_rows(schedule, chunks_of_ranks[rank], rank, p) for rank in (0, p - 1))
    # among ranks with equal layers, the first has the most in flight; in a V the last one, if the second virtual stage is the longer one
    ranks = {chunks_of_ranks[rank]: rank for rank in range(p - 2, 0, -1)}
    fullest = set(ranks.values())
    if isinstance(schedule, ScheduleTable):
        fullest = {*range(1, p - 1)}
    elif schedule.placement is Placement.V:
        fullest |= {*{chunks_of_ranks[rank]: rank for rank in range(1, p - 1)}.values()}
    middle = np.zeros_like(first)
    if fullest:
        candidates = np.array([_live_rows(schedule, chunks_of_ranks[rank], rank, p) for rank in sorted(fullest)])
        middle = np.take_along_axis(candidates, candidates[..., 1].argmax(axis=0)[None, :, None], axis=0)[0]
    return np.stack([first, middle, last], axis=1)


def live_of_table(table: NDArray[np.float64]) -> LiveLayers:
    """Return all rows of a `live_table`, [number of micro-batches, rank]; entries of gpipe are per micro-batch."""
    return _columns(table, PipelineSchedule.ONE_F_ONE_B, 1)


def _columns(rows: NDArray[np.float64], schedule: AnySchedule, num_microbatches: Column) -> LiveLayers:
    values = np.moveaxis(rows, -1, 0) if rows.ndim > 1 else rows.tolist()
    columns: dict[str, Column] = {column.name: value for column, value in zip(fields(LiveLayers), values, strict=True)}
    if schedule_of(schedule).keeps_all:
        columns |= {name: num_microbatches * columns[name] for name in ("at_first", "most")}
    return LiveLayers(**columns)


def _live_row(schedule: AnySchedule, num_ranks: int, num_microbatches: Column) -> Any:
    return np.asarray(schedule_of(schedule).live_row(num_ranks, num_microbatches)).astype(np.int64) - 1


@session_cache(maxsize=4096)
def _live_rows(schedule: AnySchedule, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
    return schedule_of(schedule).live_rows(chunks, rank, num_ranks)
