"""Evaluation of every plan of a space as columns, keeping the best.

Plans come in blocks of one pipeline degree, one data-parallel degree and one rule set: [layouts, micro-batches, recompute,
schedules] for each ZeRO stage. All cells are legal except schedules with too few microbatches, which are masked. A cell costs a few
additions. Everything else is computed once per distinct input, by the functions that predict single plans.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.memory_headroom import memory_rule
from perfmodel.frameworks.memory_uncertainty import uncertainty_of_memory
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.layout import AttentionKernel, Dispatcher, Recompute
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.planner.uniform.blocks import Columns, Flight, MemoryLimit, memory_lower_bound, plan_memory
from perfmodel.planner.uniform.kept import KeptSpace, LayoutChunk, PlanMemory, PlanRange
from perfmodel.planner.uniform.schedules import least_rounds, legal_choices, pipeline_times
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

#: Factor of lower bounds that allows for rounding.
LESS = 1.0 - 1e-9

OUT_OF_MEMORY_STATIC = "does not fit: weights, gradients and optimizer state alone exceed the memory"
OUT_OF_MEMORY = "does not fit: activations, temporaries and what the framework needs exceed what is left of the memory"
TIGHT = "tight: within the memory, but with less than the headroom left, or too likely not to fit"


@dataclass(slots=True, kw_only=True, eq=False)
class Sweep:
    """State of a pass over a space: counts, the best plans by each criterion, and the plan of each id.

    num_static   plans whose weights, gradients and optimizer state alone exceed the usable memory
    num_tight    plans within the usable memory that do not leave the headroom
    kept         layouts and memory of the space
    ranges       evaluated plans; `starts` are their first ids
    pending      memory and first ids of plans that are not timed yet
    latest       costs of the latest chunk on this machine
    also         criteria in addition to time: memory fills `best_memory`, front fills `front`
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
    kept: KeptSpace
    also: Collection[str] = ("memory", "front")
    num_evaluated: int = 0
    num_feasible: int = 0
    num_static: int = 0
    num_tight: int = 0
    ranges: list[PlanRange] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    next_id: int = 0
    pending: list[tuple[PlanMemory, int]] = field(default_factory=list)
    latest: dict[LayoutChunk, _Block] = field(default_factory=dict)
    interrupted: bool = False
    needless: float | None = None
    slowest: float = inf
    counts: bool = True

    @property
    def largest_state(self) -> float:
        """State memory above which a plan neither fits nor is tight; the largest number where all are evaluated. [byte]"""
        if not self.space.is_pruned:
            return sys.float_info.max
        return max(self.estimator.machine.memory.usable, self.memory_limit.capacity)

    @property
    def largest_need(self) -> float:
        """Need above which a plan cannot be the one with the least memory: `needless`, or the least so far. [byte]"""
        return self.least.bound if self.needless is None else min(self.needless, self.least.bound)

    def plan(self, plan_id: int) -> Plan:
        number = bisect_right(self.starts, plan_id) - 1
        plans, chunk = self.ranges[number], self.ranges[number].chunk
        row, m, r, v = map(int, np.unravel_index(plan_id - self.starts[number], plans.shape))
        return plan_of(
            self.estimator,
            self.space,
            chunk.rows,
            plans.layouts.start + row,
            zero=plans.zero,
            rules=chunk.rules,
            dispatcher=chunk.dispatcher,
            micro_batch=chunk.micro[m],
            recompute=chunk.recomputes[r],
            recompute_operators=chunk.recompute_operators,
            choice=plans.pipelines.choices[v],
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
    also: Collection[str] = ("memory", "front"),
) -> Sweep:
    """Evaluate every plan of the space; end early with the results so far if `progress` returns True.

    risk          largest probability that a plan does not fit, in place of the headroom
    needless      see `Sweep`
    kept_tables   tables shared with further passes
    also          see `Sweep`
    """
    check_searchable(estimator)
    memory_limit = memory_limit_of(estimator, memory_headroom=memory_headroom, risk=risk)
    attention = attention or AttentionKernel(estimator.profile.kernels.default_attention)
    recompute_operators = recompute_operators or space.recompute_operators
    recomputes = recompute_choices(space, attention, recompute_operators)
    kept_tables = kept_tables or KeptTables()
    kept = KeptSpace()
    if kept_tables.spaces is not None and needless is None:
        kept = kept_tables.spaces.of(estimator, space, attention, recompute_operators, memory_limit)
    state = Sweep(
        estimator=estimator,
        space=space,
        memory_limit=memory_limit,
        attention=attention,
        recompute_operators=recompute_operators,
        recomputes=recomputes,
        best_time=Smallest(count=top),
        best_memory=Smallest(count=top),
        least=Smallest(count=1),
        front=Front(low=0.0, high=max(memory_limit.capacity, 1.0)),
        kept=kept,
        needless=needless,
        also=also,
    )
    num_chips = estimator.cluster.num_chips
    blocks = kept.once("blocks", lambda: list(layout_blocks(estimator.job, num_chips, space, attention))) if recomputes else []
    if blocks:
        tables = _tables(state, blocks, kept_tables)
        least = kept.once("least state memory", lambda: least_state_memory(estimator, space, tables, blocks))
        small = {rule: of_rule <= state.largest_state for rule, of_rule in least.items()}
        _add_microbatches(tables, small)
        for i, rows in enumerate(blocks):
            _evaluate_rows(state, tables, i, rows, small)
            if progress is not None and progress((i + 1) / len(blocks)):
                state.interrupted = i + 1 < len(blocks)
                break
        _time_pending(state, tables)
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
            _time_pending(state, tables)
        known = largest
    state.counts = True


def _try_lists(state: Sweep, blocks: list[LayoutRows], kept_tables: KeptTables, small: Mapping[int, Cells], first: Tables) -> None:
    """Lists of recomputed operators, of the layouts whose passes alone take no longer than the best plans so far.

    first   tables of the pass without lists: no pass takes less time than one without recomputation
    """
    recomputes, recompute_operators = state.recomputes, state.recompute_operators
    for operators in state.space.lists:
        quick = _quick_layouts(state, blocks, small, first) if Recompute.NONE in recomputes and state.space.is_pruned else small
        state.recomputes, state.recompute_operators = [Recompute.SELECTIVE], operators
        tables = _tables(state, blocks, kept_tables)
        _add_microbatches(tables, quick)
        for i, rows in enumerate(blocks):
            state.slowest = state.best_time.bound if state.space.is_pruned else inf
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
                chunk = _chunk(state, tables, i, rows, layouts, rule, micro)
                times = _least_times(tables, chunk, _mean_rounds(chunk))
                of_rule[tables.rows[i].start + layouts] = (times <= state.best_time.bound).any(axis=(1, 2))
    return quick


def _tables(state: Sweep, blocks: list[LayoutRows], kept: KeptTables) -> Tables:
    def make() -> Tables:
        return Tables(
            state.estimator,
            state.space,
            blocks,
            KeptTables(),
            attention=state.attention,
            recomputes=state.recomputes,
            recompute_operators=state.recompute_operators,
        )

    return state.kept.once(("tables", state.recompute_operators), make).on(state.estimator, kept)


def _add_microbatches(tables: Tables, layouts: Mapping[int, Cells]) -> None:
    for rule, of_rule in layouts.items():
        if (rows := np.flatnonzero(of_rule)).size:
            tables.add_microbatches(rule, rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Costs of a chunk on one machine."""

    columns: Callable[[], Columns]
    hop: Callable[[], Array]
    least_times: Callable[[], Array]


def _evaluate_rows(state: Sweep, tables: Tables, block: int, rows: LayoutRows, layouts: Mapping[int, Cells]) -> None:
    """Evaluate these layouts, by rule set, of one (pipeline, data-parallel) degree.

    The memory of all of them is evaluated. Only plans that may be kept are timed: later by `_time_pending` if the memory is kept.
    """
    of_block = {rule: of_rule[tables.rows[block]] for rule, of_rule in layouts.items()}
    if state.slowest < inf:
        for part in _memory_of_rows(state, tables, block, rows, of_block):
            _time_part(state, tables, part, _count_part(state, part))
        return
    key = block, state.counts, *((rule, chosen.tobytes()) for rule, chosen in of_block.items())
    if state.counts:
        too_large = state.kept.once(("too large", *key), lambda: _num_too_large(state, tables, rows, of_block))
        state.num_evaluated, state.num_static = state.num_evaluated + too_large, state.num_static + too_large
    for part in state.kept.parts(key, lambda: _memory_of_rows(state, tables, block, rows, of_block)):
        first_id = _count_part(state, part)
        if key in state.kept.values:
            state.pending.append((part, first_id))
        else:
            _time_part(state, tables, part, first_id)


def _time_pending(state: Sweep, tables: Tables) -> None:
    """Time the pending parts. If only the fastest plans are kept, chunks with the least lower bound come first."""
    bounds, of_chunk = [], dict[LayoutChunk, float]()
    for part, _ in state.pending:
        has_fitting = np.isfinite(part.memory).any(axis=-1)
        bounds.append(float(_least_times_of(state, tables, part).min(where=has_fitting, initial=inf)) if part.num_feasible else inf)
        of_chunk[part.plans.chunk] = min(bounds[-1], of_chunk.get(part.plans.chunk, inf))
    order = list(range(len(bounds)))
    if not state.also:
        order.sort(key=lambda number: of_chunk[state.pending[number][0].plans.chunk])
    for number in order:
        if state.also or bounds[number] <= state.best_time.bound:
            _time_part(state, tables, *state.pending[number])
    state.pending.clear()


def _num_microbatches(state: Sweep, rows: LayoutRows, micro: Sequence[int]) -> Array:
    """Return the micro-batches of a step. [1, micro-batches, 1, 1]"""
    return (state.estimator.job.global_batch / (rows.data_parallel * np.array(micro, dtype=np.float64)))[None, :, None, None]


def _num_too_large(state: Sweep, tables: Tables, rows: LayoutRows, layouts: Mapping[int, Cells]) -> int:
    """Return the number of plans of the other layouts: their state alone exceeds the memory with every ZeRO stage and schedule."""
    m = _num_microbatches(state, rows, micro_batches(state.estimator.job, rows.data_parallel, state.space))
    least_microbatches, number = state.space.least_microbatches(rows.pp), 0
    for rule, of_rule in layouts.items():
        for group in layouts_of(state.space, rows, rule):
            if not (others := group[~of_rule[group]]).size:
                continue
            num_layouts = sum(part.stop - part.start for _, part in zero_parts(state.space.runs, tables, rows.select(others), rule))
            legal = sum(int(legal_choices(choices.choices, m, rows.pp, least_microbatches).sum()) for choices in rows.pipelines)
            number += legal * len(state.recomputes) * num_layouts
    return number


def _memory_of_rows(state: Sweep, tables: Tables, block: int, rows: LayoutRows, layouts: Mapping[int, Cells]) -> Iterator[PlanMemory]:
    """Yield the memory of the plans of these layouts of a block, in chunks that fit the caches."""
    micro = micro_batches(state.estimator.job, rows.data_parallel, state.space)
    cells = len(micro) * len(state.recomputes) * max(len(group.choices) for group in rows.pipelines)
    step = max(1, BLOCK_CELLS // max(cells, 1))
    for rule, of_rule in layouts.items():
        for group in layouts_of(state.space, rows, rule):
            chosen = group[of_rule[group]]
            for begin in range(0, len(chosen), step):
                chunk = _chunk(state, tables, block, rows, chosen[begin : begin + step], rule, micro)
                if state.slowest < inf:
                    quick = np.flatnonzero((_least_times(tables, chunk, _mean_rounds(chunk)) <= state.slowest).any(axis=(1, 2)))
                    chunk = replace(chunk, rows=chunk.rows.select(quick), layouts=chunk.layouts[quick])
                for pipelines in rows.pipelines if len(chunk.rows) else ():
                    yield from _memory_of_chunk(state, tables, chunk, pipelines)


def _chunk(state: Sweep, tables: Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: Sequence[int]) -> LayoutChunk:
    rules, dispatcher = tables.cuts[rule]
    return LayoutChunk(
        rows=rows.select(index),
        layouts=tables.rows[block].start + index,
        rule=rule,
        rules=rules,
        dispatcher=dispatcher,
        micro=tuple(micro),
        num_microbatches=_num_microbatches(state, rows, micro),
        recomputes=tuple(state.recomputes),
        recompute_operators=state.recompute_operators,
    )


def _least_times(tables: Tables, chunk: LayoutChunk, rounds: Array) -> Array:
    """Return a lower bound of step times, less rounding. [layouts, micro-batches, recompute]

    rounds   lower bound of the passes of a micro-batch over all layers   [micro-batches]
    """
    at = np.ix_(tables.micro_keys[chunk.rule][chunk.layouts], np.searchsorted(tables.sizes, chunk.micro))
    return np.moveaxis(tables.passes[chunk.rule][:, at[0], at[1]] * rounds * LESS, 0, -1)


def _mean_rounds(chunk: LayoutChunk) -> Array:
    """Return the passes of a mean rank of the pipeline. [micro-batches]"""
    return np.asarray(chunk.num_microbatches[0, :, 0, 0] / chunk.rows.pp)


def _block_of(state: Sweep, tables: Tables, chunk: LayoutChunk) -> _Block:
    """Return the costs of a chunk, on demand. Those of the latest chunk are kept."""
    if chunk in state.latest:
        return state.latest[chunk]
    state.latest.clear()
    table = tables.micro[chunk.rule]

    @cache
    def columns() -> Columns:
        regions, activations = table.block(
            tables.micro_keys[chunk.rule][chunk.layouts][:, None, None],
            np.searchsorted(tables.sizes, chunk.micro)[None, :, None],
            np.arange(len(chunk.recomputes))[None, None, :],
        )
        return Columns.at(
            state.estimator,
            take_grid(tables.grid, chunk.layouts),
            pp=chunk.rows.pp,
            regions=regions,
            activations=activations,
            activation_bytes=table.program.rows.activation_bytes,
            num_microbatches=chunk.num_microbatches,
            is_scattered=chunk.rules.scatters_residual,
        )

    most_virtual = max(choice.virtual_stages for group in chunk.rows.pipelines for choice in group.choices)
    rounds = least_rounds(chunk.num_microbatches[0, :, 0, 0], chunk.rows.pp, most_virtual)
    state.latest[chunk] = block = _Block(
        columns=columns,
        hop=cache(lambda: columns().hop()),
        least_times=cache(lambda: _least_times(tables, chunk, rounds)),
    )
    return block


def _memory_of_chunk(state: Sweep, tables: Tables, chunk: LayoutChunk, pipelines: PipelineGroup) -> Iterator[PlanMemory]:
    """Yield the memory of a chunk's plans on some schedules, side by side, with each ZeRO stage."""
    estimator, columns, pp = state.estimator, _block_of(state, tables, chunk).columns(), chunk.rows.pp
    flight = Flight.of(columns, pipelines, state.space.least_microbatches(pp))
    num_recompute = len(state.recomputes)
    legal_cells = int(flight.legal.sum()) * num_recompute
    if not legal_cells:
        return
    keys, usable = tables.parameter_keys[chunk.layouts], estimator.machine.memory.usable
    for zero, part in zero_parts(state.space.runs, tables, chunk.rows, chunk.rule):
        terms, _ = tables.parameters[chunk.rule, zero, pp > 1]().block(keys[part])
        some, in_flight = columns.take(part), flight.take(part)
        static, alone = state_memory(estimator, pipelines, terms, pp=pp, num_replicas=some.num_replicas)
        if state.needless is not None:
            least_need = float(memory_lower_bound(in_flight, pipelines, static, some.outside).min())
            if least_need > max(state.memory_limit.capacity, state.largest_need):
                continue
        memory, fits = plan_memory(some, in_flight, pipelines, terms, static, state.memory_limit)
        feasible, least = int(np.count_nonzero(fits)), int(memory.argmin())
        fitting = np.flatnonzero(fits.any(axis=(1, 2, 3)))
        yield PlanMemory(
            plans=PlanRange(chunk=chunk, pipelines=pipelines, zero=zero, layouts=part, shape=memory.shape),
            num_evaluated=legal_cells * (part.stop - part.start),
            num_feasible=feasible,
            num_static=int(np.count_nonzero((alone > usable) & flight.legal)) * num_recompute,
            num_tight=int(np.count_nonzero(memory <= usable)) - feasible if feasible < memory.size else 0,
            least=float(memory.reshape(-1)[least]),
            least_index=least,
            fitting=fitting,
            memory=memory if feasible == memory.size else np.where(fits[fitting], memory[fitting], inf),
        )


def _count_part(state: Sweep, part: PlanMemory) -> int:
    """Count the plans of a part and return the first of their ids."""
    first_id = state.next_id
    state.ranges.append(part.plans)
    state.starts.append(first_id)
    if state.counts:
        state.num_evaluated += part.num_evaluated
        state.num_feasible += part.num_feasible
        state.num_static += part.num_static
        state.num_tight += part.num_tight
    state.least.offer(np.array([part.least]), first_id + part.least_index)
    state.next_id += math.prod(part.plans.shape)
    return first_id


def _time_part(state: Sweep, tables: Tables, part: PlanMemory, first_id: int) -> None:
    """Time the layouts of a part of which a plan may be kept, and offer their plans."""
    if not part.num_feasible:
        return
    worth = _worth_timing(state, _least_times_of(state, tables, part), part.memory)
    if not len(worth):
        return
    offsets, memory = part.fitting[worth], part.memory[worth]
    plans, pipelines, chunk = part.plans, part.plans.pipelines, part.plans.chunk
    index = plans.layouts.start + offsets
    estimator, pp, m, block = state.estimator, chunk.rows.pp, chunk.num_microbatches, _block_of(state, tables, chunk)
    terms, tied = tables.parameters[chunk.rule, plans.zero, pp > 1]().block(tables.parameter_keys[chunk.layouts[index]])
    regions, hop = block.columns().regions.map_columns(itemgetter(index)), block.hop()[index]
    pipeline = pipeline_times(estimator, regions, pipelines, pp, m, hop, memory.shape)
    step = step_times(estimator, pipeline, terms, tied, regions, pipelines, pp=pp, num_microbatches=m, hop=hop)
    flat, flat_memory = np.where(memory < inf, step, inf).reshape(-1), memory.reshape(-1)
    per_layout = flat.size // len(offsets)
    ids = (first_id + offsets[:, None] * per_layout + np.arange(per_layout)).reshape(-1)
    state.best_time.offer(flat, ids, flat_memory)
    if "memory" in state.also:
        state.best_memory.offer(flat_memory, ids, flat)
    if "front" in state.also:
        state.front.offer(flat, np.minimum(flat_memory, state.memory_limit.capacity), ids)


def _least_times_of(state: Sweep, tables: Tables, part: PlanMemory) -> Array:
    """Return lower bounds of the step times of the fitting layouts. [layouts, micro-batches, recompute]"""
    return _block_of(state, tables, part.plans.chunk).least_times()[part.plans.layouts][part.fitting]


def _worth_timing(state: Sweep, least_times: Array, memory: Array) -> Index:
    """Return the layouts of which a plan may be kept: as fast as the best, as small as the smallest, or on the front.

    least_times   lower bound of the step time  [layouts, micro-batches, recompute]
    memory        infinite where a plan does not fit  [layouts, micro-batches, recompute, schedules]
    """
    smallest = memory.min(axis=-1)
    may_lead = least_times <= (state.best_time.bound if state.space.is_pruned else inf)
    if "memory" in state.also:
        may_lead |= smallest <= state.best_memory.bound
    if "front" in state.also:
        may_lead |= state.front.may_take(least_times, smallest)
    return np.flatnonzero((may_lead & (smallest < inf)).any(axis=(1, 2)))
