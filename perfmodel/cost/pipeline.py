"""A pipeline, the times of a micro-batch on its ranks, and what each class of schedule defines (`cost/schedules.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column
from perfmodel.parallel.pass_orders import Pass
from perfmodel.parallel.schedule_table import AnySchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one micro-batch on the ranks of a pipeline. [s]

    total_forward, total_backward  F, B  sums over the ranks
    slowest_forward, slowest_backward, slowest   f, b, c: the largest forward, backward and sum of both over the ranks
    unequal  e   the longest virtual stage over the mean of those of the slowest rank
    total_weights, slowest_weights  W, w   part of backward that a schedule may postpone: gradients of weights, as products alone
    by_stage   forward, backward and gradients of weights of each virtual stage, in model order; empty unless the schedule is simulated
    """

    total_forward: Column
    total_backward: Column
    slowest_forward: Column
    slowest_backward: Column
    slowest: Column
    unequal: Column = 0.0
    total_weights: Column = 0.0
    slowest_weights: Column = 0.0
    by_stage: tuple[tuple[Column, Column, Column], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Schedule, and numbers of ranks p, micro-batches m and virtual stages of a rank v, as columns.

    is_timed   columns whose time is needed; that of others may be any number
    """

    schedule: AnySchedule
    num_ranks: Column
    num_microbatches: Column
    virtual_stages: Column
    is_timed: Any = True


class Schedule(ABC):
    """A pipeline schedule.

    paces_apart   the slowest forward and the slowest backward pass each set a pace, else the slowest sum of both
    keeps_all     all micro-batches are in flight when the first backward pass begins
    """

    paces_apart: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False

    @abstractmethod
    def order(self, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
        """Return the passes of a rank in the order in which it issues them."""

    @abstractmethod
    def time(self, times: StageTimes, pipeline: Pipeline) -> Any:
        """Return the time of one step's micro-batches through the pipeline, without sends. [s]"""

    @abstractmethod
    def send_delay(self, hop: Column, chunk: Column, pipeline: Pipeline) -> Any:
        """Return the time that overlapped sends between ranks add to a step: a pass waits for its input in flight. [s]

        hop h    one send                                                                  [s]
        chunk c  forward and backward of one micro-batch through one virtual stage          [s]

        Source: exact on a simulation of the orders with even stages (`tests/oracles`) while hops are short; for 1f1b always.
        """

    @abstractmethod
    def begun(self, rank: Column, pipeline: Pipeline) -> Any:
        """Return the micro-batches in flight in the first virtual stage of a rank i (from 0) as its first backward pass begins. [-]"""

    def ended(self, rank: Column, pipeline: Pipeline) -> Any:
        """Return the maximum of micro-batches in flight that have run the last virtual stage, of its rank. [-]"""
        return pipeline.num_microbatches if self.keeps_all else 1.0

    def postponed(self, rank: Column, pipeline: Pipeline) -> Any:
        """Return the maximum of passes of a rank's virtual stages without gradients of weights yet. [-]"""
        return 0.0

    @abstractmethod
    def live_row(self, num_ranks: int, num_microbatches: Column) -> Any:
        """Return the number of the row in `live_rows` for a number of micro-batches, from 1. Beyond the last row nothing changes."""

    @abstractmethod
    def live_rows(self, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
        """Return [number of micro-batches, field of `LiveLayers`] of a rank. chunks: layers of its virtual stages."""
