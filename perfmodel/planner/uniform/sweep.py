"""Evaluation of every plan of a space as columns, keeping the best.

Plans come in blocks of one pipeline degree, one data-parallel degree and one rule set: [layouts, micro-batches, recompute,
schedules] for each ZeRO stage. All cells are legal except schedules with too few microbatches, which are masked. A cell costs a few
additions. Everything else is computed once per distinct input, by the functions that predict single plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.step import ParameterTerms
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.memory_headroom import memory_rule
from perfmodel.frameworks.memory_uncertainty import uncertainty_of_memory
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.layout import AttentionKernel, Dispatcher, Recompute
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.planner.uniform.blocks import Columns, Flight, MemoryLimit, memory_lower_bound, plan_memory
from perfmodel.planner.uniform.schedules import legal_choices, pipeline_times
from perfmodel.planner.uniform.space import (
    LayoutRows,
    PipelineChoice,
    PipelineGroup,
    Space,
    layout_blocks,
    micro_batches,
    recompute_choices,
)
from perfmodel.planner.uniform.state_memory import layouts_of, least_state_memory, state_memory, zero_parts
from perfmodel.planner.uniform.step_times import step_times
from perfmodel.planner.uniform.tables import KeptTables, Tables, take_grid
from perfmodel.search.select import Front, Smallest

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Cells = NDArray[np.bool_]

#: Cells evaluated at once: large enough to amortise a numpy call, small enough for the caches.
BLOCK_CELLS = 1 << 17

#: Largest space, in plans, in which lists of recomputed modules are tried: each list adds as much work before slow layouts are dropped.
LISTS_UP_TO = 1 << 25

OUT_OF_MEMORY_STATIC = "does not fit: weights, gradients and optimizer state alone exceed the memory"
OUT_OF_MEMORY = "does not fit: activations, temporaries and what the framework needs exceed what is left of the memory"
TIGHT = "tight: within the memory, but with less than the headroom left, or too likely not to fit"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Segment:
    """First id of a block of cells, and the choices that its ids stand for."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class Sweep:
    """State of a pass over a space: counts, the best plans by each criterion, and the plan of each id.

    num_static   plans whose weights, gradients and optimizer state alone exceed the usable memory
    num_tight    plans within the usable memory that do not leave the headroom
    recomputes, recompute_operators   of the current pass
    slowest      plans that surely take longer may be skipped, and are not counted   [s]
    counts       whether evaluated plans are counted: not if they were counted before, by their state alone
    needless     plans that surely need more than the capacity and more than this may be skipped, and are not counted; None: all are
                 evaluated  [byte]
    """

    estimator: Estimator
    space: Space
    memory_limit: MemoryLimit
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
    counts: bool = True

    @property
    def largest_state(self) -> float:
        """State memory above which a plan neither fits nor is tight. [byte]"""
        return max(self.estimator.machine.memory.usable, self.memory_limit.capacity)

    @property
    def largest_need(self) -> float:
        """Need above which a plan cannot be the one with the least memory: `needless`, or the least so far. [byte]"""
        return self.least.bound if self.needless is None else min(self.needless, self.least.bound)

    def plan(self, plan_id: int) -> Plan:
        segment = self.segments[bisect_right(self.starts, plan_id) - 1]
        row, m, r, v = np.unravel_index(plan_id - segment.first_id, segment.shape)
        return plan_of(
            self.estimator,
            self.space,
            segment.rows,
            int(row),
            zero=segment.zero,
            rules=segment.rules,
            dispatcher=segment.dispatcher,
            micro_batch=segment.micro[int(m)],
            recompute=segment.recomputes[int(r)],
            recompute_operators=segment.recompute_operators,
            choice=segment.choices[int(v)],
            attention=self.attention,
        )


def plan_of(
    estimator: Estimator,
    space: Space,
    rows: LayoutRows,
    row: int,
    *,
    zero: int,
    rules: RuleSet,
    dispatcher: Dispatcher,
    micro_batch: int,
    recompute: Recompute,
    recompute_operators: tuple[str, ...],
    choice: PipelineChoice,
    attention: AttentionKernel,
) -> Plan:
    """Return the plan of one layout of the space with these choices."""
    machine = estimator.machine
    return make_plan(
        estimator.job,
        cluster=machine.cluster,
        num_chips=estimator.cluster.num_chips,
        pp=rows.pp,
        dp_replicate=int(rows.dp_replicate[row]),
        dp_shard=int(rows.dp_shard[row]),
        cp=int(rows.cp[row]),
        tp=int(rows.tp[row]),
        ep=int(rows.ep[row]),
        etp=int(rows.etp[row]),
        dispatcher=str(dispatcher),
        zero=zero,
        order=space.orders[int(rows.order[row])],
        rules=rules,
        micro_batch=micro_batch,
        recompute=str(recompute),
        recompute_operators=recompute_operators,
        schedule=str(choice.schedule),
        virtual_stages=choice.virtual_stages,
        stage_layers=choice.stage_layers,
        attention=str(attention),
        profile=estimator.profile.name,
        calibration=machine.basis.calibration,
    )


def check_searchable(estimator: Estimator) -> None:
    """Refuse counts of tokens by expert: they are valid for one ep and one micro-batch only."""
    routing = estimator.job.routing
    if routing.counts is not None:
        remedy = f"predict plans with them, or search with skew:{routing.skew:.4g}, as their fullest rank has it"
        raise bad_field("routing", str(routing), "counts are of one ep and one micro-batch, of which a search tries others", remedy)


def memory_limit_of(estimator: Estimator, *, memory_headroom: float | None, risk: float | None) -> MemoryLimit:
    """Return the limit of memory with this headroom, or at this risk."""
    rule, uncertainty = memory_rule(memory_headroom, risk), uncertainty_of_memory(estimator.profile)
    return MemoryLimit(uncertainty=uncertainty, ratio=rule.ratio(uncertainty), capacity=rule.allowed(estimator.machine.memory.usable))


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
    kept_tables: KeptTables | None = None,
) -> Sweep:
    """Evaluate every plan of the space; end early with the results so far if `progress` returns True.

    risk          largest probability that a plan does not fit, in place of the headroom
    needless      see `Sweep`
    kept_tables   tables shared with further passes
    """
    check_searchable(estimator)
    memory_limit = memory_limit_of(estimator, memory_headroom=memory_headroom, risk=risk)
    attention = attention or AttentionKernel(estimator.profile.kernels.default_attention)
    recompute_operators = recompute_operators or space.recompute_operators
    state = Sweep(
        estimator=estimator,
        space=space,
        memory_limit=memory_limit,
        attention=attention,
        recompute_operators=recompute_operators,
        recomputes=recompute_choices(space, attention, recompute_operators),
        best_time=Smallest(count=top),
        best_memory=Smallest(count=top),
        least=Smallest(count=1),
        front=Front(low=0.0, high=max(memory_limit.capacity, 1.0)),
        needless=needless,
    )
    blocks = list(layout_blocks(estimator.job, estimator.cluster.num_chips, space, attention)) if state.recomputes else []
    if blocks:
        kept_tables = kept_tables or KeptTables()
        tables = _tables(state, blocks, kept_tables)
        least = least_state_memory(estimator, space, tables, blocks)
        small = {rule: of_rule <= state.largest_state for rule, of_rule in least.items()}
        _add_microbatches(tables, small)
        for i, rows in enumerate(blocks):
            _evaluate_rows(state, tables, i, rows, small)
            if progress is not None and progress((i + 1) / len(blocks)):
                state.interrupted = i + 1 < len(blocks)
                break
        if not state.interrupted:
            if needless is None and state.num_evaluated <= LISTS_UP_TO:
                _try_lists(state, blocks, kept_tables, small, tables)
            _find_least_memory(state, tables, blocks, least)
    return state


def _find_least_memory(state: Sweep, tables: Tables, blocks: list[LayoutRows], least: Mapping[int, Array]) -> None:
    """Evaluate the layouts that do not fit by their state alone, as far as they may need less memory than every other.

    The smallest states come first: those of most other layouts then exceed the least memory.
    """
    known, smallest = state.largest_state, min((float(of_rule.min(initial=inf)) for of_rule in least.values()), default=inf)
    state.counts = False
    for largest in (max(smallest * 1.25, known), inf):
        upper = min(largest, state.largest_need)
        larger = {rule: (of_rule > known) & (of_rule <= upper) & (of_rule < inf) for rule, of_rule in least.items()}
        if any(layouts.any() for layouts in larger.values()):
            _add_microbatches(tables, larger)
            for i, rows in enumerate(blocks):
                _evaluate_rows(state, tables, i, rows, larger)
        known = largest
    state.counts = True


def _try_lists(state: Sweep, blocks: list[LayoutRows], kept_tables: KeptTables, small: Mapping[int, Cells], first: Tables) -> None:
    """Lists of recomputed operators, of the layouts whose passes alone take no longer than the best plans so far.

    first   tables of the pass without lists: no pass takes less time than one without recomputation
    """
    recomputes, recompute_operators = state.recomputes, state.recompute_operators
    for operators in state.space.lists:
        quick = _quick_layouts(state, blocks, small, first) if Recompute.NONE in recomputes else small
        state.recomputes, state.recompute_operators = [Recompute.SELECTIVE], operators
        tables = _tables(state, blocks, kept_tables)
        _add_microbatches(tables, quick)
        for i, rows in enumerate(blocks):
            state.slowest = state.best_time.bound
            _evaluate_rows(state, tables, i, rows, quick)
        state.recomputes, state.recompute_operators = recomputes, recompute_operators
    state.slowest = inf


def _quick_layouts(state: Sweep, blocks: list[LayoutRows], small: Mapping[int, Cells], tables: Tables) -> dict[int, Cells]:
    """Return the layouts that have a micro-batch whose passes take no longer than the slowest of the best plans."""
    quick = {rule: np.zeros_like(of_rule) for rule, of_rule in small.items()}
    for i, rows in enumerate(blocks):
        micro = micro_batches(state.estimator.job, rows.data_parallel, state.space)
        for rule, of_rule in quick.items():
            layouts = np.flatnonzero(small[rule][tables.rows[i]])
            if layouts.size:
                times = _least_times(state, tables, i, rows, layouts, rule, micro)
                of_rule[tables.rows[i].start + layouts] = (times <= state.best_time.bound).any(axis=(1, 2))
    return quick


def _tables(state: Sweep, blocks: list[LayoutRows], kept: KeptTables) -> Tables:
    return Tables(
        state.estimator,
        state.space,
        blocks,
        kept,
        attention=state.attention,
        recomputes=state.recomputes,
        recompute_operators=state.recompute_operators,
    )


def _add_microbatches(tables: Tables, layouts: Mapping[int, Cells]) -> None:
    for rule, of_rule in layouts.items():
        if (rows := np.flatnonzero(of_rule)).size:
            tables.add_microbatches(rule, rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Layouts with micro-batches and kinds of recomputation.

    keys       row of each layout in the parameter tables
    rule       index of rules and dispatcher in `Space.cuts`
    """

    rows: LayoutRows
    keys: Index
    rule: int
    rules: RuleSet
    dispatcher: Dispatcher
    micro: tuple[int, ...]
    columns: Columns
    hop: Callable[[], Array]
    least_times: Callable[[], Array]


def _evaluate_rows(state: Sweep, tables: Tables, block: int, rows: LayoutRows, layouts: Mapping[int, Cells]) -> None:
    """Evaluate these layouts, by rule set, of one (pipeline, data-parallel) degree, in pieces that fit the caches."""
    micro = micro_batches(state.estimator.job, rows.data_parallel, state.space)
    cells = len(micro) * len(state.recomputes) * max(len(group.choices) for group in rows.pipelines)
    step = max(1, BLOCK_CELLS // max(cells, 1))
    for rule, of_rule in layouts.items():
        for group in layouts_of(state.space, rows, rule):
            evaluated = of_rule[tables.rows[block]][group]
            part = group[evaluated]
            if state.counts and state.slowest == inf and len(part) < len(group):
                _count_too_large(state, tables, rows.select(group[~evaluated]), rule, micro)
            for begin in range(0, len(part), step):
                _evaluate_block(state, tables, block, rows, part[begin : begin + step], rule, micro)


def _num_microbatches(state: Sweep, rows: LayoutRows, micro: Sequence[int]) -> Array:
    """Return the micro-batches of a step. [1, micro-batches, 1, 1]"""
    return (state.estimator.job.global_batch / (rows.data_parallel * np.array(micro, dtype=np.float64)))[None, :, None, None]


def _count_too_large(state: Sweep, tables: Tables, rows: LayoutRows, rule: int, micro: Sequence[int]) -> None:
    """Count the plans of layouts whose state alone exceeds the memory with every ZeRO stage and schedule."""
    m, least_microbatches = _num_microbatches(state, rows, micro), state.space.least_microbatches(rows.pp)
    num_layouts = sum(part.stop - part.start for _, part in zero_parts(state.space.runs, tables, rows, rule))
    legal = sum(int(legal_choices(group.choices, m, rows.pp, least_microbatches).sum()) for group in rows.pipelines)
    legal *= len(state.recomputes) * num_layouts
    state.num_evaluated, state.num_static = state.num_evaluated + legal, state.num_static + legal


def _evaluate_block(state: Sweep, tables: Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: list[int]) -> None:
    if state.slowest < inf:
        index = index[(_least_times(state, tables, block, rows, index, rule, micro) <= state.slowest).any(axis=(1, 2))]
        if not len(index):
            return
    columns = _block_of(state, tables, block, rows, index, rule, micro)
    for pipelines in rows.pipelines:
        _evaluate_group(state, tables, columns, pipelines)


def _least_times(state: Sweep, tables: Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: list[int]) -> Array:
    """Return a lower bound of step times: all passes of a mean rank, less rounding. [layouts, micro-batches, recompute]"""
    at = np.ix_(tables.micro_keys[rule][tables.rows[block]][index], np.searchsorted(tables.sizes, micro))
    num_microbatches = _num_microbatches(state, rows, micro)[0, :, 0, 0]
    return np.moveaxis(tables.passes[rule][:, at[0], at[1]] * num_microbatches / rows.pp * (1.0 - 1e-9), 0, -1)


def _block_of(state: Sweep, tables: Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: list[int]) -> _Block:
    estimator, table, chosen = state.estimator, tables.micro[rule], rows.select(index)
    rules, dispatcher = tables.cuts[rule]
    regions, activations = table.block(
        tables.micro_keys[rule][tables.rows[block]][index][:, None, None],
        np.searchsorted(tables.sizes, micro)[None, :, None],
        np.arange(len(state.recomputes))[None, None, :],
    )
    columns = Columns.at(
        estimator,
        take_grid(tables.grid, tables.rows[block].start + index),
        pp=rows.pp,
        regions=regions,
        activations=activations,
        activation_bytes=table.program.rows.activation_bytes,
        num_microbatches=_num_microbatches(state, rows, micro),
        is_scattered=rules.scatters_residual,
    )
    return _Block(
        rows=chosen,
        keys=tables.parameter_keys[tables.rows[block]][index],
        rule=rule,
        rules=rules,
        dispatcher=dispatcher,
        micro=tuple(micro),
        columns=columns,
        hop=cache(columns.hop),
        least_times=cache(lambda: _least_times(state, tables, block, rows, index, rule, micro)),
    )


def _evaluate_group(state: Sweep, tables: Tables, block: _Block, pipelines: PipelineGroup) -> None:
    """Evaluate some schedules of a block, side by side, with each ZeRO stage."""
    estimator, columns, pp = state.estimator, block.columns, block.rows.pp
    flight = Flight.of(columns, pipelines, state.space.least_microbatches(pp))
    num_recompute = len(state.recomputes)
    legal_cells = int(flight.legal.sum()) * num_recompute
    if not legal_cells:
        return
    keys, usable = block.keys, estimator.machine.memory.usable
    for zero, part in zero_parts(state.space.runs, tables, block.rows, block.rule):
        begin, end = part.start, part.stop
        terms, tied = tables.parameters[block.rule, zero, pp > 1]().block(keys[part])
        some, in_flight = columns.take(part), flight.take(part)
        static, alone = state_memory(estimator, pipelines, terms, pp=pp, num_replicas=some.num_replicas)
        if state.needless is not None:
            least_need = float(memory_lower_bound(in_flight, pipelines, static, some.outside).min())
            if least_need > max(state.memory_limit.capacity, state.largest_need):
                continue
        memory, fits = plan_memory(some, in_flight, pipelines, terms, static, state.memory_limit)
        feasible = int(np.count_nonzero(fits))
        state.segments.append(
            _Segment(
                first_id=state.next_id,
                shape=memory.shape,
                rows=block.rows.select(part),
                zero=zero,
                rules=block.rules,
                dispatcher=block.dispatcher,
                micro=block.micro,
                choices=pipelines.choices,
                recomputes=tuple(state.recomputes),
                recompute_operators=state.recompute_operators,
            )
        )
        state.starts.append(state.next_id)
        if state.counts:
            state.num_evaluated += legal_cells * (end - begin)
            state.num_feasible += feasible
            state.num_static += int(np.count_nonzero((alone > usable) & flight.legal)) * num_recompute
            if feasible < memory.size:
                state.num_tight += int(np.count_nonzero(memory <= usable)) - feasible
        flat_memory = memory.reshape(-1)
        state.least.offer(np.minimum(flat_memory.min(), np.inf).reshape(1), state.next_id + int(flat_memory.argmin()))
        if feasible:
            if feasible < memory.size:
                memory = np.where(fits, memory, np.inf)
            worth = _worth_timing(state, block.least_times()[part], memory)
            if len(worth):
                if len(worth) < end - begin:
                    terms, tied = tables.parameters[block.rule, zero, pp > 1]().block(keys[part][worth])
                _offer_times(state, block, pipelines, terms, tied, worth, begin, memory[worth])
        state.next_id += memory.size


def _worth_timing(state: Sweep, least_times: Array, memory: Array) -> Index:
    """Return the layouts of which a plan may be kept: as fast as the best, as small as the smallest, or on the front.

    least_times   lower bound of the step time  [layouts, micro-batches, recompute]
    memory        infinite where a plan does not fit  [layouts, micro-batches, recompute, schedules]
    """
    smallest = memory.min(axis=-1)
    may_lead = (least_times <= state.best_time.bound) | (smallest <= state.best_memory.bound) | state.front.may_take(least_times, smallest)
    return np.flatnonzero((may_lead & (smallest < inf)).any(axis=(1, 2)))


def _offer_times(
    state: Sweep, block: _Block, pipelines: PipelineGroup, terms: ParameterTerms, tied: Array, offsets: Index, begin: int, memory: Array
) -> None:
    """Offer the step times of some layouts of a block, at these offsets from `begin`, to the best plans and the front."""
    index = begin + offsets
    estimator, pp, m = state.estimator, block.rows.pp, block.columns.num_microbatches
    regions, hop = block.columns.regions.map_columns(itemgetter(index)), block.hop()[index]
    pipeline = pipeline_times(estimator, regions, pipelines, pp, m, hop, memory.shape)
    step = step_times(estimator, pipeline, terms, tied, regions, pipelines, pp=pp, num_microbatches=m, hop=hop)
    flat, flat_memory = np.where(memory < inf, step, inf).reshape(-1), memory.reshape(-1)
    per_layout = flat.size // len(offsets)
    ids = (state.next_id + offsets[:, None] * per_layout + np.arange(per_layout)).reshape(-1)
    state.best_time.offer(flat, ids, flat_memory)
    state.best_memory.offer(flat_memory, ids, flat)
    state.front.offer(flat, np.minimum(flat_memory, state.memory_limit.capacity), ids)
