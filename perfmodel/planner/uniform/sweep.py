"""Evaluate every plan of a space as columns, and keep the best.

Plans come in blocks of one pipeline degree, one data-parallel degree and one rule set: [layouts, micro-batches, recompute,
schedules] for each ZeRO stage. Every cell is legal but for schedules that need more microbatches, which are masked. A cell costs
a handful of additions; all else is computed on the factors that it depends on, by the functions that predict single plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.chip import fixed_memory, outside_bytes, reserve_factor, reserved_memory, runs_at, static_memory
from perfmodel.cost.memory.moments import ActivationTerms, At, keeps_gathered
from perfmodel.cost.memory.plan import Holding, activations_as, besides_of, crowding_of, rank_holding, replicas
from perfmodel.cost.microbatch import microbatch_depends_on
from perfmodel.cost.parameters import parameters_depend_on
from perfmodel.cost.step import ParameterTerms, RegionTimes, hop_time
from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.memory_room import MemoryDoubt, RankNeed, memory_rule
from perfmodel.frameworks.memory_uncertainty import memory_doubt
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.folding import takes_replicas
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.layout import AttentionKernel, Dispatcher, Recompute
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.planner.uniform.runnable import runnable_layouts, runnable_ways
from perfmodel.planner.uniform.schedules import legal_choices, pipeline_times, schedule_columns
from perfmodel.planner.uniform.space import (
    LayoutRows,
    PipelineChoice,
    PipelineGroup,
    Space,
    layout_blocks,
    micro_batches,
    recompute_choices,
)
from perfmodel.planner.uniform.step_times import step_times
from perfmodel.planner.uniform.tables import (
    MicrobatchTable,
    ParameterTable,
    distinct,
    join_grids,
    layout_grid,
    microbatch_table,
    parameter_table,
    take_grid,
)
from perfmodel.search.select import Front, Smallest

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Cells = NDArray[np.bool_]
Only = Literal["time", "memory"]
KeptTables = dict[tuple[object, ...], ParameterTable]

#: Cells evaluated at once: large enough to amortise a numpy call, small enough for the caches.
BLOCK_CELLS = 1 << 17

#: Lists of recomputed modules are tried in spaces of so many plans at most, without them: they are as many again before the slow ones go.
LISTS_UP_TO = 1 << 25

OUT_OF_MEMORY_STATIC = "does not fit: weights, gradients and optimizer state alone exceed the memory"
OUT_OF_MEMORY = "does not fit: activations, temporaries and what the framework needs exceed what is left of the memory"
TIGHT = "tight: within the memory, but with less than the headroom left, or too likely not to fit"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Segment:
    """Where the ids of one block of cells begin, and how to read them."""

    first_id: int
    shape: tuple[int, int, int, int]
    rows: LayoutRows
    zero: int
    rules: RuleSet
    dispatcher: Dispatcher
    micro: tuple[int, ...]
    choices: tuple[PipelineChoice, ...]
    recomputes: tuple[Recompute, ...]
    recompute_operators: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """Restriction of a sweep to the best plan by one criterion; the default restricts nothing.

    only      the one criterion that counts: of the time `Sweep.slowest`, of the memory `Sweep.capacity` fall to the best so far; all
              else is left out where it costs more, and nothing is counted
    at_most   maximum cost of a plan by that criterion   [s or byte]
    beyond    plans that the framework of this space can run are left out, too
    """

    only: Only | None = None
    at_most: float = inf
    beyond: Space | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Sweep:
    """A pass over a space: counts, the best by each criterion, and the way from an id back to its plan.

    doubt        how far what a plan needs lies from what is predicted
    ratio        what of that is not sure may be so many times what is predicted; None: any number of times
    capacity     what a plan that fits may take at most: the usable memory less the headroom   [byte]
    num_static   plans whose weights, gradients and optimizer state alone exceed the usable memory
    num_tight    plans within the usable memory that do not leave the headroom
    recomputes, recompute_operators   of the pass at hand
    slowest      plans that surely take longer may be left out, and are not counted   [s]
    needless     plans that surely need more than the capacity and more than this may be left out, and are not counted; none: all are
                 evaluated  [byte]
    better       see `Better`
    """

    estimator: Estimator
    space: Space
    doubt: MemoryDoubt
    ratio: float | None
    capacity: float
    attention: AttentionKernel
    recompute_operators: tuple[str, ...]
    recomputes: list[Recompute]
    best_time: Smallest
    best_memory: Smallest
    least: Smallest
    front: Front
    num_evaluated: int = 0
    num_feasible: int = 0
    num_static: int = 0
    num_tight: int = 0
    segments: list[_Segment] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    next_id: int = 0
    interrupted: bool = False
    needless: float | None = None
    slowest: float = inf
    better: Better

    @property
    def worth_knowing(self) -> float:
        """Who needs more than this needs more than the least: `needless`, or the least so far. [byte]"""
        return self.least.bound if self.needless is None else min(self.needless, self.least.bound)

    def plan(self, plan_id: int) -> Plan:
        segment = self.segments[bisect_right(self.starts, plan_id) - 1]
        row, m, r, v = np.unravel_index(plan_id - segment.first_id, segment.shape)
        choice = segment.choices[int(v)]
        rows, i = segment.rows, int(row)
        machine = self.estimator.machine
        return make_plan(
            self.estimator.job,
            cluster=machine.cluster,
            num_chips=self.estimator.cluster.num_chips,
            pp=rows.pp,
            dp_replicate=int(rows.dp_replicate[i]),
            dp_shard=int(rows.dp_shard[i]),
            cp=int(rows.cp[i]),
            tp=int(rows.tp[i]),
            ep=int(rows.ep[i]),
            etp=int(rows.etp[i]),
            dispatcher=str(segment.dispatcher),
            zero=segment.zero,
            order=self.space.orders[int(rows.order[i])],
            rules=segment.rules,
            micro_batch=segment.micro[int(m)],
            recompute=str(segment.recomputes[int(r)]),
            recompute_operators=segment.recompute_operators,
            schedule=str(choice.schedule),
            virtual_stages=choice.virtual_stages,
            stage_layers=choice.stage_layers,
            attention=str(self.attention),
            profile=self.estimator.profile.name,
            calibration=machine.calibration,
        )


def sweep(
    estimator: Estimator,
    space: Space,
    *,
    top: int,
    memory_headroom: float | None = None,
    risk: float | None = None,
    attention: AttentionKernel | None = None,
    recompute_operators: tuple[str, ...] | None = None,
    progress: Callable[[float], bool | None] | None = None,
    needless: float | None = None,
    better: Better | None = None,
    kept_tables: KeptTables | None = None,
) -> Sweep:
    """Evaluate every plan of the space; where `progress` answers True it ends with what it has.

    risk          in place of the headroom, the probability that a plan that fits does not
    needless      see `Sweep`
    better        search only for the best plan by one criterion
    kept_tables   of parameters, for passes over other batches of the same space: looked into, and added to
    """
    routing = estimator.job.routing
    if routing.counts is not None:
        remedy = f"predict plans with them, or search with skew:{routing.skew:.4g}, as their fullest rank has it"
        raise bad_field("routing", str(routing), "counts are of one ep and one micro-batch, of which a search tries others", remedy)
    rule, doubt = memory_rule(memory_headroom, risk), memory_doubt(estimator.profile)
    better = better or Better()
    capacity = min(rule.room(estimator.machine.memory_usable), better.at_most if better.only == "memory" else inf)
    attention = attention or AttentionKernel(estimator.profile.kernels.default_attention)
    recompute_operators = recompute_operators or space.recompute_operators
    state = Sweep(
        estimator=estimator,
        space=space,
        doubt=doubt,
        ratio=rule.ratio(doubt),
        capacity=capacity,
        attention=attention,
        recompute_operators=recompute_operators,
        recomputes=recompute_choices(space, attention, recompute_operators),
        best_time=Smallest(count=top),
        best_memory=Smallest(count=top),
        least=Smallest(count=1),
        front=Front(low=0.0, high=max(capacity, 1.0)),
        needless=needless,
        slowest=better.at_most if better.only == "time" else inf,
        better=better,
    )
    blocks = list(layout_blocks(estimator.job, estimator.cluster.num_chips, space, attention)) if state.recomputes else []
    if blocks:
        kept_tables = {} if kept_tables is None else kept_tables
        tables = _Tables(state, blocks, kept_tables)
        if better.only == "time":
            _evaluate_quickest_first(state, tables, blocks)
            return state
        for i, rows in enumerate(blocks):
            _evaluate_rows(state, tables, i, rows, tables.micro)
            if progress is not None and progress((i + 1) / len(blocks)):
                state.interrupted = i + 1 < len(blocks)
                break
        if needless is None and better.only is None and not state.interrupted and state.num_evaluated <= LISTS_UP_TO:
            _try_lists(state, blocks, kept_tables)
    return state


def _try_lists(state: Sweep, blocks: list[LayoutRows], kept_tables: KeptTables) -> None:
    """Lists of recomputed operators, of the layouts whose passes alone take no longer than the best plans so far."""
    first = state.recomputes, state.recompute_operators
    for operators in state.space.lists:
        state.recomputes, state.recompute_operators = [Recompute.SELECTIVE], operators
        tables = _Tables(state, blocks, kept_tables)
        for i, rows in enumerate(blocks):
            state.slowest = state.best_time.bound
            _evaluate_rows(state, tables, i, rows, tables.micro)
    state.recomputes, state.recompute_operators = first
    state.slowest = inf


class _Tables:
    """Tables over all blocks: keys of every layout, microbatch tables by rule set, parameter tables by ZeRO stage."""

    def __init__(self, state: Sweep, blocks: list[LayoutRows], kept: KeptTables) -> None:
        estimator, space = state.estimator, state.space
        self.cuts = space.cuts(estimator.job)
        self.grids = [layout_grid(estimator, rows, space.orders) for rows in blocks]
        whole = join_grids(self.grids)
        bounds = np.cumsum([0, *(len(rows) for rows in blocks)])
        first, keys = distinct(microbatch_depends_on(whole, estimator.profile))
        sizes: set[int] = set()
        for rows in blocks:
            sizes.update(micro_batches(estimator.job, rows.data_parallel, space))
        self.sizes = sorted(sizes)
        self.micro: dict[int, MicrobatchTable] = {}
        parameter_first, parameter_key = distinct(parameters_depend_on(whole))
        self.parameter_keys = [parameter_key[bounds[i] : bounds[i + 1]] for i in range(len(blocks))]
        layouts = take_grid(whole, parameter_first)
        columns = [column.tobytes() for by_axis in (layouts.degree, *layouts.inside) for column in by_axis.values()]
        columns += [column.tobytes() for column in layouts.hop]
        self.parameters: dict[tuple[int, int, bool], Callable[[], ParameterTable]] = {}
        pipelined = {rows.pp > 1 for rows in blocks}
        self.micro_keys: dict[int, list[Index]] = {}
        self.passes: dict[int, Array] = {}
        ways = np.concatenate([rows.rules for rows in blocks])
        used = int(np.bitwise_or.reduce(ways))
        for index, (rules, dispatcher) in enumerate(self.cuts):
            if not used >> index & 1:
                continue
            program = estimator.programs.program(rules, state.attention, state.recompute_operators, dispatcher)
            # of the layouts those that are cut so
            own = np.unique(keys[(ways >> index & 1).astype(bool)])
            place = np.zeros(len(first), dtype=np.int64)
            place[own] = np.arange(len(own))
            self.micro_keys[index] = [place[keys[bounds[i] : bounds[i + 1]]] for i in range(len(blocks))]
            self.micro[index] = microbatch_table(estimator, program, take_grid(whole, first[own]), self.sizes, state.recomputes)
            self.passes[index] = self.micro[index].passes()
            for zero in range(4):
                for in_pipeline in pipelined:
                    if space.admits("zero", zero) and space.runs.admits_zero(zero, pipelined=in_pipeline, replicated=False):
                        key = (program.parameters, program.regions, zero, in_pipeline, *columns)  # however tokens reach experts
                        make = partial(parameter_table, estimator, program, rules, zero, layouts, pipelined=in_pipeline)
                        self.parameters[index, zero, in_pipeline] = cache(partial(_kept_or_made, kept, key, make))


def _kept_or_made(kept: KeptTables, key: tuple[object, ...], make: Callable[[], ParameterTable]) -> ParameterTable:
    if key not in kept:
        kept[key] = make()
    return kept[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Layouts with micro-batches and kinds of recomputation: what no schedule and no stage changes.

    place      of its pipeline and data-parallel degree among the blocks of the space
    index      which of the rows there
    keys       row of each layout in the parameter tables
    rule       place of rules and dispatcher among `Space.cuts`
    sharding   0: nothing to shard over, 1: cp alone, 2: dp_shard, 3: dp_shard and dp_replicate
    """

    place: int
    index: Index
    rows: LayoutRows
    keys: Index
    sharding: Index
    rule: int
    rules: RuleSet
    dispatcher: Dispatcher
    micro: tuple[int, ...]
    recomputes: Index
    num_microbatches: Array
    regions: RegionTimes
    activations: ActivationTerms
    activation_bytes: float
    grid: LayoutGrid
    hop: Callable[[], Any]
    least_times: Callable[[], Array]


def _evaluate_quickest_first(state: Sweep, tables: _Tables, blocks: list[LayoutRows]) -> None:
    """All plans that may be quicker than the quickest so far, the most promising degrees and rules first."""
    parts = []
    for place, rows in enumerate(blocks):
        for rule in tables.micro:
            own = np.flatnonzero(rows.rules >> rule & 1)
            if len(own):
                micro = micro_batches(state.estimator.job, rows.data_parallel, state.space)
                times = _least_times(state, tables, place, rows, own, rule, micro)
                parts.append((float(times.min()), place, rule))
    for least, place, rule in sorted(parts):
        if least > state.slowest:
            break
        _evaluate_rows(state, tables, place, blocks[place], (rule,))


def _evaluate_rows(state: Sweep, tables: _Tables, block: int, rows: LayoutRows, rules: Iterable[int]) -> None:
    """One (pipeline, data-parallel) degree under these rules, in pieces that fit the caches."""
    job, space = state.estimator.job, state.space
    micro = micro_batches(job, rows.data_parallel, space)
    num_choices = max(len(group.choices) for group in rows.pipelines)
    # rows without sharding axes first, rows with dp_shard last, replicas of shards behind: each ZeRO stage is legal on a contiguous range
    by_group = np.argsort(_sharding(rows), kind="stable")
    for rule in rules:
        order = by_group[(rows.rules[by_group] >> rule & 1).astype(bool)]
        cells = len(micro) * len(state.recomputes) * num_choices
        step = max(1, BLOCK_CELLS // max(cells, 1))
        for part in _alike_in_zero(space, rows, order):
            for begin in range(0, len(part), step):
                _evaluate_block(state, tables, block, rows, part[begin : begin + step], rule, micro)


def _sharding(rows: LayoutRows) -> Index:
    """`_Block.sharding` of each row."""
    by_cp = (rows.cp > 1) & ~takes_replicas(dp_shard=rows.dp_shard, cp=rows.cp, tp=rows.tp, ep=rows.ep, etp=rows.etp)
    return np.where(rows.dp_shard > 1, np.where(rows.dp_replicate > 1, 3, 2), np.where(by_cp, 1, 0))


def _alike_in_zero(space: Space, rows: LayoutRows, order: Index) -> list[Index]:
    """The rows in this order, apart where the framework has other ZeRO stages beside tp or cp."""
    if set(space.runs.zero) <= set(space.runs.zero_beside_axes):
        return [order]
    beside = ((rows.tp[order] > 1) | (rows.cp[order] > 1)) & (rows.data_parallel * rows.cp[order] > 1)
    return [part for part in (order[~beside], order[beside]) if len(part)]


def _evaluate_block(state: Sweep, tables: _Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: list[int]) -> None:
    recomputes = np.arange(len(state.recomputes))
    if state.slowest < inf:
        quick = _least_times(state, tables, block, rows, index, rule, micro) <= state.slowest
        if not quick.any():
            return
        kept, some, those = _of_cells(quick)
        index = index[kept]
        if state.better.only:
            micro, recomputes = [micro[i] for i in some], recomputes[those]
    here = _block_of(state, tables, block, rows, index, rule, micro, recomputes)
    for pipelines in rows.pipelines:
        if state.better.only:
            _evaluate_promising(state, tables, here, rows, pipelines)
        else:
            _evaluate_group(state, tables, here, pipelines, range(4))


def _of_cells(cells: Cells) -> list[Index]:
    """Indices of each dim that has any cell."""
    dims = range(cells.ndim)
    return [np.flatnonzero(cells.any(axis=tuple(other for other in dims if other != dim))) for dim in dims]


def _least_times(state: Sweep, tables: _Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: Sequence[int]) -> Array:
    """All passes of a rank, on average over the ranks, less rounding: no step is shorter. [layouts, micro-batches, recompute]"""
    at = np.ix_(tables.micro_keys[rule][block][index], np.searchsorted(tables.sizes, micro))
    num_microbatches = state.estimator.job.global_batch / (rows.data_parallel * np.array(micro, dtype=np.float64))
    return np.moveaxis(tables.passes[rule][:, at[0], at[1]] * num_microbatches / rows.pp * (1.0 - 1e-9), 0, -1)


def _block_of(
    state: Sweep, tables: _Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: Sequence[int], recomputes: Index
) -> _Block:
    estimator, table = state.estimator, tables.micro[rule]
    chosen = rows.select(index)
    rules, dispatcher = tables.cuts[rule]
    regions, activations = table.block(tables.micro_keys[rule][block][index], np.searchsorted(tables.sizes, micro), recomputes)
    grid = _column_grid(take_grid(tables.grids[block], index))
    return _Block(
        place=block,
        index=index,
        rows=chosen,
        keys=tables.parameter_keys[block][index],
        sharding=_sharding(chosen),
        rule=rule,
        rules=rules,
        dispatcher=dispatcher,
        micro=tuple(micro),
        recomputes=recomputes,
        num_microbatches=(estimator.job.global_batch / (rows.data_parallel * np.array(micro, dtype=np.float64)))[None, :, None, None],
        regions=regions,
        activations=activations,
        activation_bytes=table.program.rows.activation_bytes,
        grid=grid,
        least_times=cache(lambda: _least_times(state, tables, block, rows, index, rule, micro)[..., recomputes]),
        hop=cache(
            lambda: hop_time(
                activations.boundary, grid.degree["tp"], estimator.profile, estimator.machine, grid, is_scattered=rules.scatters_residual
            )
        ),
    )


def _evaluate_promising(state: Sweep, tables: _Tables, block: _Block, rows: LayoutRows, pipelines: PipelineGroup) -> None:
    """Evaluate the plans of a block that may be the best by the objective, before their other cost is known."""
    legal = legal_choices(pipelines.choices, block.num_microbatches, block.rows.pp, _least_microbatches(state, block.rows.pp))
    possible = np.broadcast_to(legal[None, :, None, :], (len(block.index), len(block.micro), len(block.recomputes), len(pipelines.choices)))
    if state.slowest < inf:
        # what waits for parameters hides sends, and nothing else of the pipeline
        possible = possible & (_pipeline_of(state, block, pipelines, hop=np.zeros((1, 1, 1, 1))) * (1.0 - 1e-9) <= state.slowest)
    if not possible.any():
        return
    cells_of = _promising_cells(state, block, pipelines)
    job, beyond = state.estimator.job, state.better.beyond
    recomputes = [state.recomputes[i] for i in block.recomputes]
    ways = None if beyond is None else runnable_ways(beyond, block.micro, recomputes, pipelines.choices, block.rows, job.global_batch)
    for zero, part in _zero_parts(state, tables, block, range(4)):
        wanted = possible[part]
        if beyond is not None and ways is not None:
            layouts = runnable_layouts(beyond, block.rows.select(part), block.rules, block.dispatcher, zero=zero, seq_len=job.seq_len)
            wanted = wanted & ~(layouts[:, None, None, None] & ways)
        if not wanted.any():
            continue
        terms, tied = tables.parameters[block.rule, zero, block.rows.pp > 1]().block(block.keys[part])
        cells = cells_of(part, terms, tied) & wanted
        if not cells.any():
            continue
        rest, micro, some, choices = _of_cells(cells)
        index, sizes = block.index[part][rest], [block.micro[i] for i in micro]
        narrow = _block_of(state, tables, block.place, rows, index, block.rule, sizes, block.recomputes[some])
        _evaluate_group(state, tables, narrow, pipelines.take(choices), (zero,))


def _pipeline_of(state: Sweep, block: _Block, pipelines: PipelineGroup, hop: Array) -> Array:
    """[layouts, micro-batches, recompute, schedules]"""
    shape = (len(block.index), len(block.micro), len(block.recomputes), len(pipelines.choices))
    return pipeline_times(state.estimator, block.regions, pipelines, block.rows.pp, block.num_microbatches, hop, shape)


def _promising_cells(state: Sweep, block: _Block, pipelines: PipelineGroup) -> Callable[[slice, ParameterTerms, Array], Cells]:
    """Which plans of a ZeRO stage do not surely need more than `Sweep.capacity`, and take no longer than `Sweep.slowest`."""
    estimator, stages, pp, m = state.estimator, pipelines.stages, block.rows.pp, block.num_microbatches
    ranks, least = _ranks_to_compare(estimator.profile, pipelines, pp), _least_microbatches(state, pp)
    outside = np.broadcast_to(outside_bytes(estimator.profile, estimator.machine, block.grid), block.grid.degree["pp"].shape)
    kept, _, _ = schedule_columns(estimator, block.activations, pipelines, block.activation_bytes, pp, m, ranks, least)
    pipeline = cache(lambda: _pipeline_of(state, block, pipelines, block.hop()))

    def of(part: slice, terms: ParameterTerms, tied: Array) -> Cells:
        static = static_memory(terms, stages, estimator.programs.sizes, num_replicas=replicas(block.grid)[part])
        cells = np.asarray(_surely_needs(pipelines, kept, static, ranks, part, outside[part]) <= state.capacity)
        if state.slowest == inf or not cells.any():
            return cells
        regions, hop = block.regions.as_made(itemgetter(part)), block.hop()[part]
        step = step_times(estimator, pipeline()[part], terms, tied, regions, pipelines, pp=pp, num_microbatches=m, hop=hop)
        return np.asarray((step <= state.slowest) & cells)

    return of


def _least_microbatches(state: Sweep, pp: int) -> int:
    return 1 if state.space.runs.few_microbatches else pp


def _zero_parts(state: Sweep, tables: _Tables, block: _Block, zeros: Iterable[int]) -> Iterator[tuple[int, slice]]:
    """ZeRO stages of the block, and the layouts that have each."""
    runs, pp = state.space.runs, block.rows.pp
    of_first = {axis: int(getattr(block.rows, axis)[0]) for axis in ("tp", "cp")}  # all of a block are alike in this
    for zero in zeros:
        if (block.rule, zero, pp > 1) not in tables.parameters:
            continue
        # groups are sorted: 0 and 1 admit stage 0, 1 to 3 the others
        if not runs.admits_zero(zero, pipelined=pp > 1, replicated=False):
            continue
        if runs.refuses_beside_axes(zero, **of_first, data=block.rows.data_parallel):
            continue
        last = 4 if runs.admits_zero(zero, pipelined=pp > 1, replicated=True) else 3
        begin, end = (0, int(np.searchsorted(block.sharding, 2))) if zero == 0 else map(int, np.searchsorted(block.sharding, [1, last]))
        if begin < end:
            yield zero, slice(begin, end)


def _evaluate_group(state: Sweep, tables: _Tables, block: _Block, pipelines: PipelineGroup, zeros: Iterable[int]) -> None:
    """Some schedules of a block, side by side, with these ZeRO stages."""
    estimator, stages, choices = state.estimator, pipelines.stages, pipelines.choices
    profile, machine, sizes = estimator.profile, estimator.machine, estimator.programs.sizes
    activations, grid, m, pp = block.activations, block.grid, block.num_microbatches, block.rows.pp
    rule, activation_bytes = block.rule, block.activation_bytes
    ranks = _ranks_to_compare(profile, pipelines, pp)
    factor, outside = reserve_factor(profile, machine), np.broadcast_to(outside_bytes(profile, machine, grid), grid.degree["pp"].shape)
    crowded = crowding_of(estimator.job.model, pp, stages, state.doubt)
    least = _least_microbatches(state, pp)
    kept, live, legal = schedule_columns(estimator, activations, pipelines, activation_bytes, pp, m, ranks, least)
    shape, num_recompute = kept[0][At.BLOCKS].shape[1:], len(block.recomputes)
    legal_cells = int(legal.sum()) * num_recompute
    if not legal_cells:
        return
    keys = block.keys
    for zero, part in _zero_parts(state, tables, block, zeros):
        begin, end = part.start, part.stop
        terms, tied = tables.parameters[rule, zero, pp > 1]().block(keys[part])
        num_replicas = replicas(grid)[part]
        static = static_memory(terms, stages, sizes, num_replicas=num_replicas)
        if state.needless is not None:
            least_need = float(_surely_needs(pipelines, kept, static, ranks, part, outside[part]).min())
            if least_need > max(state.capacity, state.worth_knowing):
                continue
        holding = Holding(
            activations=activations_as(activations, itemgetter(part)),
            terms=terms,
            stages=stages,
            static=static,
            num_replicas=num_replicas,
            num_microbatches=m,
            tp=grid.degree["tp"][part],
            is_scattered=block.rules.scatters_residual,
            activation_bytes=activation_bytes,
            profile=profile,
            sizes=sizes,
            factor=factor,
            outside=outside[part],
        )
        memory: Any = None
        alone: Any = 0.0
        is_sure: Any = None
        beside = besides_of(holding, state.doubt)
        for rank in ranks:
            here = rank_holding(holding, rank, live[rank], of_live=pipelines.stages_of())
            fixed = pipelines.of_choices(here.fixed)
            most = _surely(state, here.fixed, outside[part], crowded[rank], beside[rank])
            # where gradients wait, each moment has others beside it, whatever is under way then
            times = runs_at(rank, stages) if keeps_gathered(terms.program) else tuple(kept[rank])
            largest: Any = None
            for at in times:
                under_way = kept[rank].get(at, kept[rank][At.BLOCKS])
                need = reserved_memory(under_way[part], pipelines.of_choices(here.base(at, times)), here.unreduced.at(at))
                largest = need if largest is None else np.maximum(largest, need, out=largest)
            if most is not None:
                most = pipelines.of_choices(most)
                is_sure = largest <= most if is_sure is None else is_sure & (largest <= most)
            memory = largest if memory is None else np.maximum(memory, largest, out=memory)
            alone = np.maximum(alone, fixed)
        fits = memory <= state.capacity
        if is_sure is not None:
            fits &= is_sure
        feasible = int(np.count_nonzero(fits))
        state.segments.append(
            _Segment(
                first_id=state.next_id,
                shape=(end - begin, *shape),
                rows=block.rows.select(part),
                zero=zero,
                rules=block.rules,
                dispatcher=block.dispatcher,
                micro=block.micro,
                choices=choices,
                recomputes=tuple(state.recomputes[i] for i in block.recomputes),
                recompute_operators=state.recompute_operators,
            )
        )
        state.starts.append(state.next_id)
        state.num_evaluated += legal_cells * (end - begin)
        state.num_feasible += feasible
        state.num_static += int(np.count_nonzero((alone > machine.memory_usable) & legal[None, :, None, :])) * num_recompute
        if feasible < memory.size:
            state.num_tight += int(np.count_nonzero(memory <= machine.memory_usable)) - feasible
        flat_memory = memory.reshape(-1)
        state.least.offer(np.minimum(flat_memory.min(), np.inf).reshape(1), state.next_id + int(flat_memory.argmin()))
        if feasible:
            if feasible < memory.size:
                memory = np.where(fits, memory, np.inf)
            if state.better.only == "memory":
                state.best_memory.offer(memory.reshape(-1), state.next_id)
                state.capacity = min(state.capacity, state.best_memory.bound)
                worth = np.empty(0, dtype=np.int64)
            else:
                worth = _worth_timing(state, block.least_times()[part], memory)
            if len(worth):
                if len(worth) < end - begin:
                    terms, tied = tables.parameters[rule, zero, pp > 1]().block(keys[part][worth])
                _offer_times(state, block, pipelines, terms, tied, worth, begin, memory[worth])
            if state.better.only == "time":
                state.slowest = min(state.slowest, state.best_time.bound)
        state.next_id += memory.size


def _worth_timing(state: Sweep, least_times: Array, memory: Array) -> Index:
    """Layouts of which a plan may be kept: as quick as the quickest, as small as the smallest, or on the front.

    least_times   no plan takes less  [layouts, micro-batches, recompute]
    memory        infinite where a plan does not fit  [layouts, micro-batches, recompute, schedules]
    """
    smallest = memory.min(axis=-1)
    may_lead = (least_times <= state.best_time.bound) | (smallest <= state.best_memory.bound) | state.front.may_take(least_times, smallest)
    return np.flatnonzero((may_lead & (smallest < inf)).any(axis=(1, 2)))


def _offer_times(
    state: Sweep, block: _Block, pipelines: PipelineGroup, terms: ParameterTerms, tied: Array, place: Index, begin: int, memory: Array
) -> None:
    """Times of some layouts of a block, at these places of those that begin here, to all that keeps the best."""
    index = begin + place
    estimator, pp, m = state.estimator, block.rows.pp, block.num_microbatches
    regions, hop = block.regions.as_made(itemgetter(index)), block.hop()[index]
    pipeline = pipeline_times(estimator, regions, pipelines, pp, m, hop, memory.shape)
    step = step_times(estimator, pipeline, terms, tied, regions, pipelines, pp=pp, num_microbatches=m, hop=hop)
    flat, flat_memory = np.where(memory < inf, step, inf).reshape(-1), memory.reshape(-1)
    per_layout = flat.size // len(place)
    ids = (state.next_id + place[:, None] * per_layout + np.arange(per_layout)).reshape(-1)
    state.best_time.offer(flat, ids, flat_memory)
    state.best_memory.offer(flat_memory, ids, flat)
    state.front.offer(flat, np.minimum(flat_memory, state.capacity), ids)


def _surely(state: Sweep, sure: Any, outside: Any, crowding: Column, beside: Any) -> Any:
    """Largest prediction of a rank that fits at the risk, as columns; None if the headroom is stricter. [byte]"""
    if state.ratio is None:
        return None
    usable = state.estimator.machine.memory_usable
    if np.all(crowding == 1.0) and isinstance(beside, float) and usable / state.ratio >= state.capacity:
        return None  # the least that may be predicted where something is sure
    need = RankNeed(total=0.0, sure=sure, outside=outside, crowding=crowding, beside=beside)
    return np.asarray(need.room(usable, state.ratio))


def _column_grid(grid: LayoutGrid) -> LayoutGrid:
    """The same layouts as columns [layouts, 1, 1, 1], to broadcast against micro-batches, recomputation and schedules."""

    def wide(column: Array) -> Array:
        return column[:, None, None, None]

    return LayoutGrid(
        degree={axis: wide(c) for axis, c in grid.degree.items()},
        fine={axis: wide(c) for axis, c in grid.fine.items()},
        inside=tuple({axis: wide(c) for axis, c in tier.items()} for tier in grid.inside),
        hop=tuple(wide(c) for c in grid.hop),
    )


def _ranks_to_compare(profile: ExecutionProfile, pipelines: PipelineGroup, pp: int) -> tuple[int, ...]:
    """Pipeline ranks, of those that `Stages` tells apart, of which one is the fullest.

    A middle one with no more layers, and no more of them under way, holds no more than the first, unless it has room for twice the
    boundaries; rounding keeps the order.
    """
    ranks = tuple(range(pipelines.stages.num_ranks))
    if pp > 2 and (profile.stages.pipeline_keeps_boundaries or pipelines.fuller_middle):
        return ranks
    return ranks[0], ranks[-1]


def _surely_needs(
    pipelines: PipelineGroup, kept: dict[int, dict[At, Array]], static: list[Any], ranks: tuple[int, ...], part: slice, outside: Any
) -> Array:
    """No plan needs less: what is kept of microbatches and what always stays, without what comes and goes. [byte]"""
    whole: Any = 0.0
    for rank in ranks:
        stays = pipelines.of_choices(fixed_memory(static[rank]) + outside)
        for under_way in kept[rank].values():
            whole = np.maximum(whole, under_way[part] + stays)
    return np.asarray(whole)
