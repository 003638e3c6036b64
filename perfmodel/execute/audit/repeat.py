"""Counts of a step with many micro-batches, extrapolated from two short steps.

After the pipeline's warm-up, each further micro-batch repeats the last. Each count is therefore linear in the number m of
micro-batches: a constant per step plus m times the count per micro-batch. Peak memory is linear too. Its slope is what the schedule
keeps per micro-batch: all activations under GPipe, and the tokens of the step under any schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from perfmodel.cost.counts import RankCounts
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.schedule_table import ScheduleTable


def counted_microbatches(plan: Plan, stage: int = 0) -> tuple[int, ...]:
    """Return the micro-batch counts to run for a rank of the stage: two, or the plan's own if two are no less work.

    Memory is the last count to become linear. It needs the largest number of in-flight micro-batches and the gradients of all local stages.
    Without a pipeline, or under GPipe, the first and the last micro-batch differ from the others. Under 1F1B at most pp - stage are in
    flight, and the first backward pass follows them. Under interleaving, a rank runs fewer than pp (v + 1) forward passes ahead. It then
    runs pp v backward passes until each of its v stages has had one, in groups of pp micro-batches: three groups. In a V, at most 2 pp
    micro-batches of a stage are in flight.
    """
    p, m = plan.layout.pp, plan.num_microbatches
    if isinstance(plan.schedule, ScheduleTable) or (plan.schedule.groups and m % p):
        return (m,)
    if plan.schedule.groups and p > 1:
        first, step = 3 * p, p
    elif plan.schedule.is_simulated:
        first, step = 2 * p + 1, 1
    elif plan.schedule is PipelineSchedule.GPIPE or p == 1:
        first, step = 2, 1
    else:
        first, step = p - stage + 1, 1
    few = (first, first + step)
    return few if sum(few) < m else (m,)


def with_microbatches(plan: Plan, num_microbatches: int) -> Plan:
    """Return the plan with another number of micro-batches: only the global batch changes."""
    batch = num_microbatches * plan.layout.data_parallel * plan.micro_batch
    return replace(plan, job=replace(plan.job, global_batch=batch))


def extrapolate(counted: Mapping[int, RankCounts], num_microbatches: int) -> RankCounts:
    """Return the counts of a step of `num_microbatches`, given the counts for one or two numbers of micro-batches."""
    if num_microbatches in counted:
        return counted[num_microbatches]
    (m1, first), (m2, second) = sorted(counted.items())

    def line(left: Any, right: Any) -> Any:
        """Extrapolate numbers, tuples or mappings of numbers; other values do not depend on m."""
        if isinstance(left, Mapping):
            zero = next((0.0 if isinstance(value, (int, float)) else (0,) * len(value) for value in (*left.values(), *right.values())), 0.0)
            return {key: line(left.get(key, zero), right.get(key, zero)) for key in dict.fromkeys((*left, *right))}
        if isinstance(left, tuple) and not any(isinstance(value, str) for value in left):
            return tuple(line(*pair) for pair in zip(left, right, strict=True))
        if isinstance(left, int):
            return left + (right - left) * (num_microbatches - m1) // (m2 - m1)
        if isinstance(left, float):
            # the quotient is the count per micro-batch: an integer for counts, so no rounding occurs
            return left + (right - left) / (m2 - m1) * (num_microbatches - m1)
        return right

    counts = {field.name: line(getattr(first, field.name), getattr(second, field.name)) for field in fields(RankCounts)}
    return RankCounts(**counts)
