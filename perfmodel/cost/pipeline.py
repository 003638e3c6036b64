"""How long m microbatches take through a pipeline, from the forward and backward time of its stages.

Stages may be uneven: the first holds the embedding, the last the head, and layers need not divide. The closed forms are exact for
even stages and for the slowest-stage bound of uneven ones; `tests/oracles` holds them against a simulation of the schedule tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perfmodel.cost.compute import Num
from perfmodel.parallel.layout import PipelineSchedule


def pipeline_time(
    *,
    schedule: PipelineSchedule,
    total_forward: Num,
    total_backward: Num,
    slowest_forward: Num,
    slowest_backward: Num,
    slowest: Num,
    num_microbatches: Num,
    virtual_stages: Num,
    num_ranks: Num = 1.0,
    unequal: Num = 0.0,
) -> Any:
    """One step's microbatches through the pipeline, without sends. [s]

    gpipe        F + B + (m - 1) (max f + max b)
    1f1b         F + B + (m - 1) max(f + b)
    interleaved  (F + B) / v + (m - 1/v) max(f + b) + (p - 1) e m / p

    total_forward, total_backward  F, B  sums over the stages of one microbatch's time   [s]
    slowest_*                            the largest over the stages                      [s]
    num_microbatches m, virtual_stages v, num_ranks p                                      [-]
    unequal  e   the longest virtual stage over the mean of those of the slowest rank      [s]

    Each group of p microbatches fills and drains at the pace of the longest virtual stage: unequal ones gain nothing over fewer equal
    ones as long. Exact for one group where all ranks hold as much, else within 6 % of the simulation below (126 and 96 layers).

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


def send_delay(*, schedule: PipelineSchedule, hop: Num, chunk: Num, num_ranks: Num, num_microbatches: Num, virtual_stages: Num) -> Any:
    """What sends between ranks add to a step although they run beside compute: a pass waits for what is still under way. [s]

    gpipe        2 h (p - 1) + (m - 1) max(0, 2 h - c)
    1f1b         2 h ((p - 1) + (m - 1) - ceil((m - 1) / p))
    interleaved  2 h (v p - 1) + (m v - 1) max(0, h - c / 2)

    hop h    one send                                                                  [s]
    chunk c  forward and backward of one microbatch through one virtual stage           [s]

    1f1b keeps so few microbatches under way that each round trip of p of them shows (p - 1) hops each way, however short; interleaving has
    more under way and hides all but one pass through the virtual stages. Source: exact on a simulation of the schedule tables with even
    stages (`tests/oracles`) while hops are short, and beyond that for 1f1b; the last terms are the pace of hops that take longer.
    """
    h, c, p, m, v = hop, chunk, num_ranks, num_microbatches, virtual_stages
    match schedule:
        case PipelineSchedule.GPIPE:
            return 2.0 * h * (p - 1.0) + (m - 1.0) * np.maximum(2.0 * h - c, 0.0)
        case PipelineSchedule.ONE_F_ONE_B:
            return 2.0 * h * ((p - 1.0) + (m - 1.0) - np.ceil((m - 1.0) / p))
        case PipelineSchedule.INTERLEAVED:
            return 2.0 * h * (v * p - 1.0) + (m * v - 1.0) * np.maximum(h - c / 2.0, 0.0)


def live_microbatches(*, schedule: PipelineSchedule, rank: Num, num_ranks: Num, num_microbatches: Num, virtual_stages: Num) -> Any:
    """Most microbatches whose activations a pipeline rank keeps at once, in units of its whole share of the layers. [-]

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
