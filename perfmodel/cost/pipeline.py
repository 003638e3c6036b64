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
) -> Any:
    """One step's microbatches through the pipeline, without sends. [s]

    gpipe        F + B + (m - 1) (max f + max b)
    1f1b         F + B + (m - 1) max(f + b)
    interleaved  (F + B) / v + (m - 1/v) max(f + b)

    total_forward, total_backward  F, B  sums over the stages of one microbatch's time   [s]
    slowest_*                            the largest over the stages                      [s]
    num_microbatches m, virtual_stages v                                                   [-]

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (SC21), section 2.2: bubble (p - 1)/m, and (p - 1)/(v m) interleaved.
    """
    F, B, m, v = total_forward, total_backward, num_microbatches, virtual_stages
    match schedule:
        case PipelineSchedule.GPIPE:
            return (F + B) + (m - 1.0) * (slowest_forward + slowest_backward)
        case PipelineSchedule.ONE_F_ONE_B:
            return (F + B) + (m - 1.0) * slowest
        case PipelineSchedule.INTERLEAVED:
            return (F + B) / v + (m - 1.0 / v) * slowest


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
