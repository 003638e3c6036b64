"""Memory, count and lower bounds of time of the plans of a chunk, and the times of those that may be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfmodel.planner.uniform.blocks import Columns, Flight, memory_lower_bound, plan_memory
from perfmodel.planner.uniform.kept import LayoutChunk, PlanCounts, PlanMemory, PlanRange
from perfmodel.planner.uniform.schedules import least_rounds, legal_choices, most_chunks, pipeline_times
from perfmodel.planner.uniform.space import LayoutRows, PipelineGroup, micro_batches
from perfmodel.planner.uniform.state_memory import layouts_of, state_memory, zero_parts
from perfmodel.planner.uniform.step_times import add_repeated_gathers, step_times
from perfmodel.planner.uniform.tables import Tables, take_grid

if TYPE_CHECKING:
    from perfmodel.planner.uniform.sweep import Sweep

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Cells = NDArray[np.bool_]

#: Cells evaluated at once: large enough to amortise a numpy call, small enough for the caches.
BLOCK_CELLS = 1 << 17

#: Factor of lower bounds that allows for rounding.
LESS = 1.0 - 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkCosts:
    """Costs of a chunk on one machine."""

    columns: Callable[[], Columns]
    hop: Callable[[], Array]
    least_times: Callable[[], Array]


def evaluate_rows(state: Sweep, tables: Tables, block: int, rows: LayoutRows, layouts: Mapping[int, Cells]) -> None:
    """Evaluate these layouts, by rule set, of one (pipeline, data-parallel) degree.

    The memory of all of them is evaluated. Only plans that may be kept are timed: later by `time_pending` if the memory is kept.
    """
    of_block = {rule: of_rule[tables.rows[block]] for rule, of_rule in layouts.items()}
    if state.current.slowest < inf:
        for part in _memory_of_rows(state, tables, block, rows, of_block):
            _time_part(state, tables, part, _count_part(state, part))
        return
    key = block, state.current.is_counted, *((rule, chosen.tobytes()) for rule, chosen in of_block.items())
    if state.current.is_counted:
        too_large = state.kept.once(("too large", *key), lambda: _num_too_large(state, tables, rows, of_block))
        state.counts += PlanCounts(num_evaluated=too_large, num_static=too_large)
    for part in state.kept.parts(key, lambda: _memory_of_rows(state, tables, block, rows, of_block)):
        first_id = _count_part(state, part)
        if key in state.kept.values:
            state.pending.append((part, first_id))
        else:
            _time_part(state, tables, part, first_id)


def time_pending(state: Sweep, tables: Tables) -> None:
    """Time the pending parts. If only the fastest plans are kept, chunks with the least lower bound come first."""
    bounds, of_chunk = [], dict[LayoutChunk, float]()
    for part, _ in state.pending:
        has_fitting = np.isfinite(part.memory).any(axis=-1)
        bounds.append(float(_least_times_of(state, tables, part).min(where=has_fitting, initial=inf)) if part.counts.num_feasible else inf)
        of_chunk[part.plans.chunk] = min(bounds[-1], of_chunk.get(part.plans.chunk, inf))
    order = list(range(len(bounds)))
    if not state.best.also:
        order.sort(key=lambda number: of_chunk[state.pending[number][0].plans.chunk])
    for number in order:
        if state.best.also or bounds[number] <= state.best.time.bound:
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
            num_layouts = sum(
                part.stop - part.start for _, part in zero_parts(state.space.runs.sharding, tables, rows.select(others), rule)
            )
            legal = sum(int(legal_choices(choices.choices, m, rows.pp, least_microbatches).sum()) for choices in rows.pipelines)
            number += legal * len(state.current.recomputes) * num_layouts
    return number


def _memory_of_rows(state: Sweep, tables: Tables, block: int, rows: LayoutRows, layouts: Mapping[int, Cells]) -> Iterator[PlanMemory]:
    """Yield the memory of the plans of these layouts of a block, in chunks that fit the caches."""
    micro = micro_batches(state.estimator.job, rows.data_parallel, state.space)
    cells = len(micro) * len(state.current.recomputes) * max(len(group.choices) for group in rows.pipelines)
    step = max(1, BLOCK_CELLS // max(cells, 1))
    for rule, of_rule in layouts.items():
        for group in layouts_of(state.space, rows, rule):
            chosen = group[of_rule[group]]
            for begin in range(0, len(chosen), step):
                chunk = chunk_of(state, tables, block, rows, chosen[begin : begin + step], rule, micro)
                if state.current.slowest < inf:
                    quick = np.flatnonzero((least_times(tables, chunk, mean_rounds(chunk)) <= state.current.slowest).any(axis=(1, 2)))
                    chunk = replace(chunk, rows=chunk.rows.select(quick), layouts=chunk.layouts[quick])
                for pipelines in rows.pipelines if len(chunk.rows) else ():
                    yield from _memory_of_chunk(state, tables, chunk, pipelines)


def chunk_of(state: Sweep, tables: Tables, block: int, rows: LayoutRows, index: Index, rule: int, micro: Sequence[int]) -> LayoutChunk:
    rules, dispatcher = tables.cuts[rule]
    return LayoutChunk(
        rows=rows.select(index),
        layouts=tables.rows[block].start + index,
        rule=rule,
        rules=rules,
        dispatcher=dispatcher,
        micro=tuple(micro),
        num_microbatches=_num_microbatches(state, rows, micro),
        recomputes=state.current.recomputes,
        recompute_operators=state.current.recompute_operators,
    )


def least_times(tables: Tables, chunk: LayoutChunk, rounds: Array) -> Array:
    """Return a lower bound of step times, less rounding. [layouts, micro-batches, recompute]

    rounds   lower bound of the passes of a micro-batch over all layers   [micro-batches]
    """
    at = np.ix_(tables.micro_keys[chunk.rule][chunk.layouts], np.searchsorted(tables.sizes, chunk.micro))
    return np.moveaxis(tables.passes[chunk.rule][:, at[0], at[1]] * rounds * LESS, 0, -1)


def mean_rounds(chunk: LayoutChunk) -> Array:
    """Return the passes of a mean rank of the pipeline. [micro-batches]"""
    return np.asarray(chunk.num_microbatches[0, :, 0, 0] / chunk.rows.pp)


def _block_of(state: Sweep, tables: Tables, chunk: LayoutChunk) -> ChunkCosts:
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

    rounds = least_rounds(chunk.num_microbatches[0, :, 0, 0], chunk.rows.pp, most_chunks(chunk.rows.pipelines))
    state.latest[chunk] = block = ChunkCosts(
        columns=columns,
        hop=cache(lambda: columns().hop()),
        least_times=cache(lambda: least_times(tables, chunk, rounds)),
    )
    return block


def _memory_of_chunk(state: Sweep, tables: Tables, chunk: LayoutChunk, pipelines: PipelineGroup) -> Iterator[PlanMemory]:
    """Yield the memory of a chunk's plans on some schedules, side by side, with each ZeRO stage."""
    estimator, columns, pp = state.estimator, _block_of(state, tables, chunk).columns(), chunk.rows.pp
    flight = Flight.of(columns, pipelines, state.space.least_microbatches(pp))
    num_recompute = len(state.current.recomputes)
    legal_cells = int(flight.legal.sum()) * num_recompute
    if not legal_cells:
        return
    keys, usable = tables.parameter_keys[chunk.layouts], estimator.machine.memory.usable
    for zero, part in zero_parts(state.space.runs.sharding, tables, chunk.rows, chunk.rule):
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
            counts=PlanCounts(
                num_evaluated=legal_cells * (part.stop - part.start),
                num_feasible=feasible,
                num_static=int(np.count_nonzero((alone > usable) & flight.legal)) * num_recompute,
                num_tight=int(np.count_nonzero(memory <= usable)) - feasible if feasible < memory.size else 0,
            ),
            least=float(memory.reshape(-1)[least]),
            least_index=least,
            fitting=fitting,
            memory=memory if feasible == memory.size else np.where(fits[fitting], memory[fitting], inf),
        )


def _count_part(state: Sweep, part: PlanMemory) -> int:
    """Count the plans of a part and return the first of their ids."""
    first_id = state.numbered.add(part.plans)
    if state.current.is_counted:
        state.counts += part.counts
    state.best.least.offer(np.array([part.least]), first_id + part.least_index)
    return first_id


def _time_part(state: Sweep, tables: Tables, part: PlanMemory, first_id: int) -> None:
    """Time the layouts of a part of which a plan may be kept, and offer their plans."""
    if not part.counts.num_feasible:
        return
    may_be_kept = _worth_timing(state, _least_times_of(state, tables, part), part.memory)
    worth = np.flatnonzero(may_be_kept.any(axis=(1, 2, 3)))
    if not len(worth):
        return
    offsets, memory, is_timed = part.fitting[worth], part.memory[worth], may_be_kept[worth]
    plans, pipelines, chunk = part.plans, part.plans.pipelines, part.plans.chunk
    index = plans.layouts.start + offsets
    estimator, pp, m, block = state.estimator, chunk.rows.pp, chunk.num_microbatches, _block_of(state, tables, chunk)
    table, keys = tables.parameters[chunk.rule, plans.zero, pp > 1](), tables.parameter_keys[chunk.layouts[index]]
    terms, tied = table.block(keys)
    regions, hop = block.columns().regions.map_columns(itemgetter(index)), block.hop()[index]
    pipeline = pipeline_times(estimator, regions, pipelines, pp, m, hop, is_timed)
    step = step_times(estimator, pipeline, terms, tied, regions, pipelines, pp=pp, num_microbatches=m, hop=hop)
    if terms.program.keeps_gathered:
        is_timed = is_timed & _may_be_kept(state, step, memory)
        add_repeated_gathers(estimator, step, pipeline, is_timed, table, keys, regions, pipelines, pp=pp, num_microbatches=m)
    flat, flat_memory = np.where(is_timed, step, inf).reshape(-1), memory.reshape(-1)
    per_layout = flat.size // len(offsets)
    ids = (first_id + offsets[:, None] * per_layout + np.arange(per_layout)).reshape(-1)
    state.best.time.offer(flat, ids, flat_memory)
    if "memory" in state.best.also:
        state.best.memory.offer(flat_memory, ids, flat)
    if "front" in state.best.also:
        state.best.front.offer(flat, np.minimum(flat_memory, state.memory_limit.capacity), ids)


def _least_times_of(state: Sweep, tables: Tables, part: PlanMemory) -> Array:
    """Return lower bounds of the step times of the fitting layouts. [layouts, micro-batches, recompute]"""
    return _block_of(state, tables, part.plans.chunk).least_times()[part.plans.layouts][part.fitting]


def _worth_timing(state: Sweep, bounds: Array, memory: Array) -> NDArray[np.bool_]:
    """Return the plans that may be kept: as fast as the best, as small as the smallest, or on the front.

    bounds   lower bound of the step time  [layouts, micro-batches, recompute]
    memory   infinite where a plan does not fit  [layouts, micro-batches, recompute, schedules]
    """
    return np.asarray(_may_be_kept(state, bounds, memory.min(axis=-1))[..., None] & (memory < inf))


def _may_be_kept(state: Sweep, bounds: Array, memory: Array) -> NDArray[np.bool_]:
    may_lead = bounds <= (state.best.time.bound if state.space.is_pruned else inf)
    if "memory" in state.best.also:
        may_lead |= memory <= state.best.memory.bound
    if "front" in state.best.also:
        may_lead |= state.best.front.may_take(bounds, memory)
    return may_lead
