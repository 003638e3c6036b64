"""The best plan of a space by one criterion: bounds of all plans first, then exact costs of the promising ones, best bound first.

`sweep` counts every plan; this module evaluates only combinations of layout, micro-batch and recomputation whose lower bounds of time and
memory are promising. They are rows [rows, 1, 1, schedules] of one pipeline degree and rule set, with any data-parallel degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import itemgetter
from typing import Any

import numpy as np

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.chip import outside_bytes, reserve_factor, static_memory
from perfmodel.cost.memory.plan import activations_as, replicas
from perfmodel.cost.stages import Stages, inner_regions, sum_of
from perfmodel.parallel.choices import ZERO_STAGES, AttentionKernel, Recompute
from perfmodel.parallel.layout import Placement
from perfmodel.parallel.pass_orders import MOST_GATHERED
from perfmodel.parallel.plan import Plan
from perfmodel.planner.uniform.blocks import Array, Cells, Columns, Flight, Index, MemoryLimit, column_grid, memory_lower_bound, plan_memory
from perfmodel.planner.uniform.chunks import BLOCK_CELLS, LESS
from perfmodel.planner.uniform.runnable import admitted_zero, runnable_layouts, runnable_ways
from perfmodel.planner.uniform.schedules import least_rounds, legal_choices, most_chunks, pipeline_times
from perfmodel.planner.uniform.space import (
    LAYOUT_COLUMNS,
    LayoutRows,
    PipelineChoice,
    PipelineGroup,
    Space,
    layout_blocks,
    recompute_choices,
)
from perfmodel.planner.uniform.state_memory import sharding_of
from perfmodel.planner.uniform.step_times import add_repeated_gathers, step_times
from perfmodel.planner.uniform.sweep import check_searchable, memory_limit_of, plan_of
from perfmodel.planner.uniform.tables import KeptTables, Tables, take_grid


def best_plan(
    estimator: Estimator,
    space: Space,
    *,
    by_memory: bool = False,
    at_most: float = inf,
    beyond: Space | None = None,
    memory_headroom: float | None = None,
    risk: float | None = None,
    attention: AttentionKernel | None = None,
    recompute_operators: tuple[str, ...] | None = None,
    kept_tables: KeptTables | None = None,
) -> tuple[float, Plan] | None:
    """Return the least cost of a plan that fits, in seconds or bytes, and the plan; None if none costs at most `at_most`.

    beyond   skip plans that the framework of this space can run
    """
    check_searchable(estimator)
    attention = attention or AttentionKernel(estimator.profile.kernels.default_attention)
    operators = recompute_operators or space.recompute_operators
    recomputes = recompute_choices(space, attention, operators)
    blocks = list(layout_blocks(estimator.job, estimator.cluster.num_chips, space, attention)) if recomputes else []
    if not blocks:
        return None
    tables = Tables(
        estimator, space, blocks, kept_tables or KeptTables(), attention=attention, recomputes=recomputes, recompute_operators=operators
    )
    columns: dict[str, Any] = {name: np.concatenate([getattr(rows, name) for rows in blocks]) for name in LAYOUT_COLUMNS}
    search = _Search(
        estimator=estimator,
        space=space,
        beyond=beyond,
        by_memory=by_memory,
        memory_limit=memory_limit_of(estimator, memory_headroom=memory_headroom, risk=risk),
        tables=tables,
        rows=replace(blocks[0], **columns),  # with pp and data_parallel of the first block
        pipelines={rows.pp: rows.pipelines for rows in blocks},
        pp=np.concatenate([np.full(len(rows), rows.pp) for rows in blocks]),
        recomputes=recomputes,
        limit=at_most,
    )
    groups = [group for rule in tables.programs for group in search.groups(rule)]
    for group in sorted(groups, key=lambda group: group.least):
        search.evaluate(group)
    if search.best is None:
        return None
    rule, row, size, recompute, zero, choice = search.best
    rules, dispatcher = tables.cuts[rule]
    plan = plan_of(
        estimator,
        space,
        replace(search.rows, pp=int(search.pp[row])),
        row,
        zero=zero,
        rules=rules,
        dispatcher=dispatcher,
        micro_batch=tables.sizes[size],
        recompute=recomputes[recompute],
        recompute_operators=operators,
        choice=choice,
        attention=attention,
    )
    return search.limit, plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Rows of one pipeline degree and rule set.

    rows       indices of layouts of the space
    bounds     lower bound of the cost   [rows, micro-batches, recompute], infinite where there is no plan
    may_fit    [ZeRO stages, rows, micro-batches, recompute]
    """

    rule: int
    pp: int
    rows: Index
    bounds: Array
    may_fit: Cells
    least: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """State of a search for one plan.

    limit   cost of the best plan so far, or largest allowed cost   [s or byte]
    best    its (rule, row, micro-batch, recompute, zero, schedule)
    """

    estimator: Estimator
    space: Space
    beyond: Space | None
    by_memory: bool
    memory_limit: MemoryLimit
    tables: Tables
    rows: LayoutRows
    pipelines: dict[int, tuple[PipelineGroup, ...]]
    pp: Index
    recomputes: list[Recompute]
    limit: float
    best: tuple[int, int, int, int, int, PipelineChoice] | None = None

    @property
    def capacity(self) -> float:
        return min(self.memory_limit.capacity, self.limit) if self.by_memory else self.memory_limit.capacity

    def groups(self, rule: int) -> Iterator[_Group]:
        """Yield all rows under a rule set that may fit and cost no more than the limit, by pipeline degree."""
        rows = np.flatnonzero(self.tables.ways >> rule & 1)
        needs = self._least_memory(rule, rows)
        possible = (needs.max(axis=0) <= self.capacity).any(axis=0)
        rows, needs = rows[possible], needs[..., possible]
        if not len(rows):
            return
        self.tables.add_microbatches(rule, rows)
        table, keys, pp = self.tables.micro[rule], self.tables.micro_keys[rule][rows], self.pp[rows]
        per_replica = self.estimator.job.global_batch // (self.rows.dp_replicate[rows] * self.rows.dp_shard[rows])
        m = per_replica[:, None] / np.array(self.tables.sizes)  # not whole where the micro-batch does not divide
        # step times are no less than the passes of a mean rank with the least pipeline bubble
        most = {degree: most_chunks(groups) for degree, groups in self.pipelines.items()}
        most_virtual = np.array([most[degree] for degree in pp.tolist()])[:, None]
        weights = np.where(m % 1.0 == 0.0, least_rounds(m, pp[:, None], most_virtual), inf)
        bounds = np.moveaxis(self.tables.passes[rule][:, keys] * weights * LESS, 0, -1)
        # the first rank keeps no less than the activations of its blocks: of min(m, pp) microbatches in flight under 1f1b, m under gpipe;
        # interleaving keeps at least pp of each virtual stage; no bound is used for simulated schedules
        kept = np.minimum.reduce([table.kept[i][:, keys] for i, region in enumerate(table.program.regions) if region.is_block])
        blocks = np.array([min(float(np.min(group.stages.blocks[0])) for group in self.pipelines[degree]) for degree in pp.tolist()])
        is_bounded = not any(schedule.is_simulated for schedule in self.space.schedules)
        alive = blocks[:, None] * np.minimum(m, pp[:, None]) * float(is_bounded)
        kept = np.moveaxis(kept * (alive * (reserve_factor(self.estimator.profile, self.estimator.machine) * LESS)), 0, -1)
        memory = np.maximum(needs[0][..., None, None], needs[1][..., None, None] + kept)
        if self.by_memory:
            bounds = np.where(bounds < inf, memory.min(axis=0), inf)
        may_fit = memory <= self.capacity
        bounds = np.where(may_fit.any(axis=0), bounds, inf)
        possible = (bounds <= self.limit).any(axis=(1, 2)) & (bounds < inf).any(axis=(1, 2))
        for degree in np.unique(pp[possible]):
            at = np.flatnonzero(possible & (pp == degree))
            least = float(bounds[at].min())
            yield _Group(rule=rule, pp=int(degree), rows=rows[at], bounds=bounds[at], may_fit=may_fit[:, at], least=least)

    def _least_memory(self, rule: int, rows: Index) -> Array:
        """Return lower bounds of fixed memory, of a mean rank and of the first; infinite without the stage. [2, ZeRO stages, rows]"""
        estimator, tables = self.estimator, self.tables
        regions = tables.programs[rule].regions
        counts = tuple(float(region.count) for region in regions)
        # least number of runs of each region on the first rank
        runs = {
            pp: [min(float(np.min(runs)) for runs in region) for region in zip(*(group.stages.runs[0] for group in groups), strict=True)]
            for pp, groups in self.pipelines.items()
        }
        is_folded = any(schedule.placement is Placement.V for schedule in self.space.schedules)
        # many virtual stages do not all keep their weights gathered
        chosen_stages = (choice.virtual_stages for groups in self.pipelines.values() for group in groups for choice in group.choices)
        frees = max(chosen_stages) > MOST_GATHERED
        memory = np.full((2, len(ZERO_STAGES), len(rows)), inf)
        for in_pipeline in (False, True):
            at = np.flatnonzero((self.pp[rows] > 1) == in_pipeline)
            if not len(at):
                continue
            chosen = replace(self.rows.select(rows[at]), pp=1 + in_pipeline)
            sharding, grid = sharding_of(chosen), column_grid(take_grid(tables.grid, rows[at]))
            outside = outside_bytes(estimator.profile, estimator.machine, grid)
            mean = tuple(count / grid.degree["pp"] for count in counts)
            first = tuple(np.array([runs[pp] for pp in self.pp[rows[at]].tolist()]).T[..., None, None, None])
            # in a V the first rank has both ends, with one copy of a matrix that both read
            is_single = 1.0 if is_folded else 1.0 - in_pipeline
            stages = Stages(regions=regions, inner=inner_regions(regions), runs=(mean, first), total=counts, is_single=is_single)
            for zero in ZERO_STAGES:
                table = tables.parameters.get((rule, zero, in_pipeline))
                legal = ((sharding <= 1) if zero == 0 else (sharding >= 1)) & admitted_zero(self.space.runs.sharding, chosen, zero)
                if table is None or not legal.any():
                    continue
                terms, _ = table().block(tables.parameter_keys[rows[at]])
                static = static_memory(terms, stages, estimator.programs.sizes, num_replicas=replicas(grid))
                for rank in range(2):
                    weights, gradients, states, gathered = static[rank]
                    fixed = sum_of((weights, gradients, states, 0.0 if in_pipeline and frees else gathered))
                    memory[rank, zero, at] = np.where(legal, (fixed + outside)[:, 0, 0, 0] * LESS, inf)
        return memory

    def evaluate(self, group: _Group) -> None:
        for pipelines in self.pipelines[group.pp]:
            rows, sizes, recomputes = np.nonzero((group.bounds <= (self.capacity if self.by_memory else self.limit)) & (group.bounds < inf))
            step = max(1, BLOCK_CELLS // len(pipelines.choices))
            for begin in range(0, len(rows), step):
                part = slice(begin, begin + step)
                self._evaluate(group, pipelines, rows[part], sizes[part], recomputes[part])

    def _evaluate(self, group: _Group, pipelines: PipelineGroup, at: Index, sizes: Index, recomputes: Index) -> None:
        estimator, tables, space, rule, pp = self.estimator, self.tables, self.space, group.rule, group.pp
        rows = group.rows[at]
        chosen = replace(self.rows.select(rows), pp=pp)
        m = estimator.job.global_batch / (chosen.dp_replicate * chosen.dp_shard * np.array(tables.sizes)[sizes])[:, None, None, None]
        rules, dispatcher = tables.cuts[rule]
        table = tables.micro[rule]
        keys = tables.micro_keys[rule][rows]
        regions, activations = table.block(*(index[:, None, None] for index in (keys, sizes, recomputes)))
        possible = np.broadcast_to(
            legal_choices(pipelines.choices, m, pp, space.least_microbatches(pp)), (len(rows), 1, 1, len(pipelines.choices))
        )
        if not self.by_memory and self.limit < inf:
            # waits for parameters can overlap sends, but nothing else of the pipeline
            possible = possible & (pipeline_times(estimator, regions, pipelines, pp, m, 0.0, possible) * LESS <= self.limit)
        if not possible.any():
            return
        ways = None
        if self.beyond is not None:
            ways = runnable_ways(self.beyond, self.recomputes, recomputes, pipelines.choices, m, pp)
        wanted: dict[int, Cells] = {}
        for zero in ZERO_STAGES:
            cells = possible & group.may_fit[zero, at, sizes, recomputes][:, None, None, None]
            if self.beyond is not None and ways is not None:
                layouts = runnable_layouts(self.beyond, chosen, rules, dispatcher, zero=zero, seq_len=estimator.job.seq_len)
                cells = cells & ~(layouts[:, None, None, None] & ways)
            if cells.any():
                wanted[zero] = cells
        if not wanted:
            return
        some = np.flatnonzero(np.logical_or.reduce(list(wanted.values())).any(axis=(1, 2, 3)))
        columns = Columns.at(
            estimator,
            take_grid(tables.grid, rows[some]),
            pp=pp,
            regions=regions.map_columns(itemgetter(some)),
            activations=activations_as(activations, itemgetter(some)),
            activation_bytes=table.program.rows.activation_bytes,
            num_microbatches=m[some],
            is_scattered=rules.scatters_residual,
        )
        keys, m = tables.parameter_keys[rows[some]], m[some]
        flight = cache(lambda: Flight.of(columns, pipelines, space.least_microbatches(pp)))
        hop = pipeline = np.empty(0)
        if not self.by_memory:
            hop = columns.hop()
            pipeline = pipeline_times(estimator, columns.regions, pipelines, pp, m, hop, possible[some])
        for zero, cells in wanted.items():
            cost = np.zeros((len(some), 1, 1, 1))
            cells = cells[some]
            if not self.by_memory:
                timed = np.flatnonzero(cells.any(axis=(1, 2, 3)))
                terms, tied = tables.parameters[rule, zero, pp > 1]().block(keys[timed])
                passes = columns.regions.map_columns(itemgetter(timed))
                cost = np.full(cells.shape, inf)
                times = step_times(
                    estimator, pipeline[timed], terms, tied, passes, pipelines, pp=pp, num_microbatches=m[timed], hop=hop[timed]
                )
                if terms.program.keeps_gathered:
                    parameters, needed = tables.parameters[rule, zero, pp > 1](), cells[timed] & (times <= self.limit)
                    add_repeated_gathers(
                        estimator,
                        times,
                        pipeline[timed],
                        needed,
                        parameters,
                        keys[timed],
                        passes,
                        pipelines,
                        pp=pp,
                        num_microbatches=m[timed],
                    )
                cost[timed] = times
                cells = cells & (cost <= self.limit)
            if not cells.any():
                continue
            left, choices = np.flatnonzero(cells.any(axis=(1, 2, 3))), np.flatnonzero(cells.any(axis=(0, 1, 2)))
            narrow, fewer, in_flight = columns.take(left), pipelines.take(choices), flight().take(left, choices)
            terms, _ = tables.parameters[rule, zero, pp > 1]().block(keys[left])
            static = static_memory(terms, fewer.stages, estimator.programs.sizes, num_replicas=narrow.num_replicas)
            cells = cells[left][..., choices] & (memory_lower_bound(in_flight, fewer, static, narrow.outside) <= self.capacity)
            if not cells.any():
                continue
            memory, fits = plan_memory(narrow, in_flight, fewer, terms, static, self.memory_limit)
            cost = np.where(cells & fits, memory if self.by_memory else cost[left][..., choices], inf)
            least = int(cost.argmin())
            value = float(cost.reshape(-1)[least])
            if value < self.limit or (value == self.limit < inf and self.best is None):
                row, _, _, choice = np.unravel_index(least, cost.shape)
                i = some[left[row]]
                self.limit = value
                self.best = (rule, int(rows[i]), int(sizes[i]), int(recomputes[i]), zero, fewer.choices[int(choice)])
