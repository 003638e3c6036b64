"""Weights, gradients and optimizer state of the layouts of a space: plans that these alone keep from fitting are not evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.chip import static_memory
from perfmodel.cost.memory.plan import replicas
from perfmodel.cost.update import ParameterTerms
from perfmodel.frameworks.runnable import ZeroRuns
from perfmodel.parallel.algebra.folding import takes_replicas
from perfmodel.planner.uniform.blocks import column_grid, least_fixed, ranks_to_compare
from perfmodel.planner.uniform.runnable import with_other_axes
from perfmodel.planner.uniform.space import LayoutRows, PipelineGroup, Space
from perfmodel.planner.uniform.tables import Tables, take_grid

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def sharding_of(rows: LayoutRows) -> Index:
    """Return 0: nothing to shard over, 1: cp alone, 2: dp_shard, 3: dp_shard and dp_replicate."""
    by_cp = (rows.cp > 1) & ~takes_replicas(dp_shard=rows.dp_shard, cp=rows.cp, tp=rows.tp, ep=rows.ep, etp=rows.etp)
    return np.where(rows.dp_shard > 1, np.where(rows.dp_replicate > 1, 3, 2), np.where(by_cp, 1, 0))


def layouts_of(space: Space, rows: LayoutRows, rule: int) -> list[Index]:
    """Return the rows of a block under one of the rule sets, in groups that have the same ZeRO stages.

    Rows without sharding axes come first, then those with dp_shard, then replicas of shards: each ZeRO stage is legal on a range.
    """
    order = np.argsort(sharding_of(rows), kind="stable")
    order = order[(rows.rules[order] >> rule & 1).astype(bool)]
    stages = space.runs.sharding
    if {0, *stages.zero} <= set(stages.zero_beside_axes):
        return [order] if len(order) else []
    by_axes = with_other_axes(rows)[order]
    return [part for part in (order[~by_axes], order[by_axes]) if len(part)]


def zero_parts(stages: ZeroRuns, tables: Tables, rows: LayoutRows, rule: int) -> Iterator[tuple[int, slice]]:
    """Yield the ZeRO stages of layouts of one group (`layouts_of`), and the range of layouts that may have each."""
    sharding, pp = sharding_of(rows), rows.pp
    by_axes = bool(with_other_axes(rows)[0])  # a group is alike in this
    for zero in range(4):
        if (rule, zero, pp > 1) not in tables.parameters:
            continue
        if not stages.admits(zero, pipelined=pp > 1, replicated=False):
            continue
        if zero not in stages.zero_of_ranks and rows.num_chips[0] > 1:
            continue
        if by_axes and not stages.admits_axes(zero, replicas_alone=False):
            continue
        # 0 and 1 admit stage 0, 1 to 3 the others; with dp_shard=1, all data ranks of a layout are replicas
        needs_shards = by_axes and rows.data_parallel > 1 and not stages.admits_axes(zero, replicas_alone=True)
        last = 4 if stages.admits(zero, pipelined=pp > 1, replicated=True) else 3
        kinds = (0, 2) if zero == 0 else (2 if needs_shards else 1, last)
        begin, end = map(int, np.searchsorted(sharding, kinds))
        if begin < end:
            yield zero, slice(begin, end)


def state_memory(
    estimator: Estimator, pipelines: PipelineGroup, terms: ParameterTerms, *, pp: int, num_replicas: Any
) -> tuple[list[tuple[Any, Any, Any, Any]], Array]:
    """Return the memory that each rank holds all through a step (`static_memory`), and the sum on the fullest rank.

    The sum is [layouts, 1, 1, schedules]. [byte]
    """
    static = static_memory(terms, pipelines.stages, estimator.programs.sizes, num_replicas=num_replicas)
    ranks = ranks_to_compare(estimator.profile, pipelines, pp)
    return static, reduce(np.maximum, (np.asarray(least_fixed(static[rank], pipelines)) for rank in ranks))


def least_state_memory(estimator: Estimator, space: Space, tables: Tables, blocks: list[LayoutRows]) -> dict[int, Array]:
    """Return, by rule set, the least state memory of each layout over ZeRO stages and schedules; infinite where it has no plan. [byte]"""
    least = {rule: np.full(len(tables.ways), np.inf) for rule in tables.programs}
    for block, rows in enumerate(blocks):
        first = tables.rows[block].start
        for rule, of_rule in least.items():
            for group in layouts_of(space, rows, rule):
                layouts = rows.select(group)
                num_replicas = replicas(column_grid(take_grid(tables.grid, first + group)))
                for zero, part in zero_parts(space.runs.sharding, tables, layouts, rule):
                    keys = tables.parameter_keys[first + group[part]]
                    terms, _ = tables.parameters[rule, zero, rows.pp > 1]().block(keys)
                    for pipelines in rows.pipelines:
                        _, total = state_memory(estimator, pipelines, terms, pp=rows.pp, num_replicas=num_replicas[part])
                        of_rule[first + group[part]] = np.minimum(of_rule[first + group[part]], total.min(axis=(1, 2, 3)))
    return least
