"""A step of many microbatches counted from two short ones: past the pipeline's warm-up every further microbatch repeats the last.

Each count is then a straight line in the number of microbatches m: what happens once a step, and m times what happens in a
microbatch. Peak memory is one too, its slope what a schedule keeps alive of every microbatch (all of GPipe's activations; the
tokens of the step under any).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from perfmodel.cost.counts import RankCounts
from perfmodel.parallel.layout import PipelineSchedule
from perfmodel.parallel.plan import Plan


def counted_microbatches(plan: Plan, stage: int = 0) -> tuple[int, ...]:
    """How many microbatches to count a rank of that pipeline stage with: two numbers, or the plan's own alone where the two would be no
    less work.

    Memory is steady last: once as many microbatches are alive as ever will be, and the gradients of every stage here exist beside them.
    Without a pipeline, or with all forward passes first, the first and the last microbatch differ from those between. Under 1F1B at most
    pp - stage are alive, and the first backward pass follows them. Interleaved, a rank runs fewer than pp (v + 1) forward passes ahead,
    then pp v backward passes until each of its v stages has had one, in whole groups of pp microbatches: three groups.
    """
    p, m = plan.layout.pp, plan.num_microbatches
    if plan.schedule is PipelineSchedule.INTERLEAVED and p > 1:
        first, step = 3 * p, p
    elif plan.schedule is PipelineSchedule.GPIPE or p == 1:
        first, step = 2, 1
    else:
        first, step = p - stage + 1, 1
    few = (first, first + step)
    return few if sum(few) < m else (m,)


def with_microbatches(plan: Plan, num_microbatches: int) -> Plan:
    """The same plan with another number of microbatches: a smaller or larger global batch, all else alike."""
    batch = num_microbatches * plan.layout.data_parallel * plan.micro_batch
    return replace(plan, job=replace(plan.job, global_batch=batch))


def extrapolate(counted: Mapping[int, RankCounts], num_microbatches: int) -> RankCounts:
    """Counts of a step of `num_microbatches`, from those of one or two numbers of microbatches."""
    if num_microbatches in counted:
        return counted[num_microbatches]
    (m1, first), (m2, second) = sorted(counted.items())

    def line(left: Any, right: Any) -> Any:
        """Through two numbers, pairs of numbers, or maps of either; what else there is does not depend on m."""
        if isinstance(left, Mapping):
            zero = next((0.0 if isinstance(value, (int, float)) else (0,) * len(value) for value in (*left.values(), *right.values())), 0.0)
            return {key: line(left.get(key, zero), right.get(key, zero)) for key in dict.fromkeys((*left, *right))}
        if isinstance(left, tuple) and not any(isinstance(value, str) for value in left):
            return tuple(line(*pair) for pair in zip(left, right, strict=True))
        if isinstance(left, int):
            return left + (right - left) * (num_microbatches - m1) // (m2 - m1)
        if isinstance(left, float):
            # the quotient is what one microbatch adds: for counts a whole number, so that nothing is rounded
            return left + (right - left) / (m2 - m1) * (num_microbatches - m1)
        return right

    counts = {field.name: line(getattr(first, field.name), getattr(second, field.name)) for field in fields(RankCounts)}
    return RankCounts(**counts)
