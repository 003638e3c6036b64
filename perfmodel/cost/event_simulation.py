"""Event simulation of a pipeline: the start of each pass of each micro-batch, from the order of passes in each schedule.

Each rank has a list of passes in the order in which it issues them. A pass starts as soon as its rank is free and its inputs are ready.
A forward pass depends on the forward of the previous virtual stage; a backward pass depends on the backward of the next one and on its
own forward. If backward is split, this holds for the gradients of inputs, and gradients of weights depend on those. The simulation uses no
formula for bubbles: predictions do (`cost/schedules.py`), and a test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfmodel.cost.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Pass

#: Pass of the same virtual stage and micro-batch that must have ended, and step to the stage whose pass of the same kind must have.
_DEPENDS_ON = {FORWARD: ("", -1), BACKWARD: (FORWARD, 1), INPUT_GRADIENT: (FORWARD, 1), WEIGHT_GRADIENT: (INPUT_GRADIENT, 0)}


def pass_starts(orders: Sequence[Sequence[Pass]], lengths: Mapping[str, Sequence[float]], *, hop: float = 0.0) -> list[list[float]]:
    """Return the start of each pass of each rank. [s]

    lengths   time of each kind of pass on each virtual stage, in model order; stage k runs on rank k % p   [s]
    hop       time of a send from rank to rank, while both compute   [s]
    """
    num_ranks, num_stages = len(orders), len(lengths[FORWARD])
    num_microbatches = 1 + max(microbatch for order in orders for _, _, microbatch in order)
    ends = {kind: [[math.nan] * num_microbatches for _ in range(num_stages)] for kind in lengths}  # nan: not yet run
    free = [0.0] * num_ranks
    starts: list[list[float]] = [[] for _ in orders]
    while any(len(begun) < len(order) for begun, order in zip(starts, orders, strict=True)):
        progressed = False
        for rank, (order, begun) in enumerate(zip(orders, starts, strict=True)):
            while len(begun) < len(order):
                kind, chunk, microbatch = order[len(begun)]
                stage = chunk * num_ranks + rank
                before, step = _DEPENDS_ON[kind]
                received = ends[kind][stage + step][microbatch] + hop if step and 0 <= stage + step < num_stages else 0.0
                ended = ends[before][stage][microbatch] if before else 0.0
                if math.isnan(received + ended):
                    break
                ready = max(free[rank], received, ended)
                begun.append(ready)
                free[rank] = ends[kind][stage][microbatch] = ready + lengths[kind][stage]
                progressed = True
        assert progressed, "the schedule waits for itself"
    return starts
