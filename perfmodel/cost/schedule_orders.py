"""Event simulation of a pipeline: the start of each pass of each micro-batch, from the order of passes in each schedule.

Each rank has a list of passes in the order in which it issues them. A pass starts as soon as its rank is free and its inputs are ready.
A forward pass depends on the forward of the previous virtual stage; a backward pass depends on the backward of the next one and on its
own forward. The simulation uses no formula for bubbles: predictions do (`cost/pipeline.py`), and a test compares both. Orders after
Huang et al. 2019 (GPipe), and Narayanan et al. 2021 (SC21), figures 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfmodel.parallel.layout import PipelineSchedule

FORWARD, BACKWARD = "F", "B"

#: One pass: kind, virtual stage of the rank (chunk), microbatch.
Pass = tuple[str, int, int]


def gpipe_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Pass]:
    """Return all forward passes, then all backward passes."""
    forward = [(FORWARD, 0, i) for i in range(num_microbatches)]
    return forward + [(BACKWARD, 0, i) for i in range(num_microbatches)]


def one_f_one_b_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Pass]:
    """Return warm-up forward passes for the later ranks, one forward and one backward in turn, then the remaining backward passes."""
    warm = min(num_ranks - rank - 1, num_microbatches)
    order: list[Pass] = [(FORWARD, 0, i) for i in range(warm)]
    for i in range(num_microbatches - warm):
        order += [(FORWARD, 0, warm + i), (BACKWARD, 0, i)]
    return order + [(BACKWARD, 0, i) for i in range(num_microbatches - warm, num_microbatches)]


def interleaved_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    """Return micro-batches in groups of `num_ranks`, each group through all chunks, after a warm-up of 2 (p - rank - 1) + (v - 1) p passes.

    Earlier releases of Megatron-LM ran all forward passes first if the number of micro-batches is the number of ranks. This order and torch
    do not.
    """
    total = num_microbatches * num_chunks
    forward, backward = [], []
    for i in range(total):
        group, within = divmod(i, num_ranks * num_chunks)
        chunk, index = divmod(within, num_ranks)
        microbatch = group * num_ranks + index
        forward.append((FORWARD, chunk, microbatch))
        backward.append((BACKWARD, num_chunks - 1 - chunk, microbatch))
    warm = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks, total)
    order = forward[:warm]
    for i in range(total - warm):
        order += [forward[warm + i], backward[i]]
    return order + backward[total - warm :]


def order_of(schedule: PipelineSchedule, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    """Return the passes of a rank in the order in which it issues them."""
    match schedule:
        case PipelineSchedule.GPIPE:
            return gpipe_order(rank, num_ranks, num_microbatches)
        case PipelineSchedule.ONE_F_ONE_B:
            return one_f_one_b_order(rank, num_ranks, num_microbatches)
        case PipelineSchedule.INTERLEAVED:
            return interleaved_order(rank, num_ranks, num_microbatches, num_chunks)


def pass_starts(
    orders: Sequence[Sequence[Pass]], forward: Sequence[float], backward: Sequence[float], *, hop: float = 0.0
) -> list[list[float]]:
    """Return the start of each pass of each rank. [s]

    forward, backward   time of each virtual stage, in model order; stage k runs on rank k % p   [s]
    hop                 time of a send from rank to rank, while both compute   [s]
    """
    num_ranks, num_stages = len(orders), len(forward)
    num_microbatches = 1 + max(microbatch for order in orders for _, _, microbatch in order)
    lengths = {FORWARD: forward, BACKWARD: backward}
    ends = {kind: [[math.nan] * num_microbatches for _ in range(num_stages)] for kind in lengths}  # nan: not yet run
    free = [0.0] * num_ranks
    starts: list[list[float]] = [[] for _ in orders]
    while any(len(begun) < len(order) for begun, order in zip(starts, orders, strict=True)):
        progressed = False
        for rank, (order, begun) in enumerate(zip(orders, starts, strict=True)):
            while len(begun) < len(order):
                kind, chunk, microbatch = order[len(begun)]
                stage = chunk * num_ranks + rank
                before = stage - 1 if kind == FORWARD else stage + 1
                received = ends[kind][before][microbatch] + hop if 0 <= before < num_stages else 0.0
                forward_end = 0.0 if kind == FORWARD else ends[FORWARD][stage][microbatch]
                if math.isnan(received + forward_end):
                    break
                ready = max(free[rank], received, forward_end)
                begun.append(ready)
                free[rank] = ends[kind][stage][microbatch] = ready + lengths[kind][stage]
                progressed = True
        assert progressed, "the schedule waits for itself"
    return starts
