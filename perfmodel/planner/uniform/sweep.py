"""Evaluation of every plan of a space as columns, keeping the best.

Plans come in blocks of one pipeline degree, one data-parallel degree and one rule set: [layouts, micro-batches, recompute,
schedules] for each ZeRO stage. All cells are legal except schedules with too few microbatches, which are masked. A cell costs a few
additions. Everything else is computed once per distinct input, by the functions that predict single plans.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.memory_headroom import memory_rule
from perfmodel.frameworks.profile import uncertainty_of_memory
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.choices import AttentionKernel, Dispatcher, Recompute
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.planner.uniform.blocks import MemoryLimit
from perfmodel.planner.uniform.chunks import ChunkCosts, chunk_of, evaluate_rows, least_times, mean_rounds, time_pending
from perfmodel.planner.uniform.kept import KeptSpace, LayoutChunk, PlanCounts, PlanMemory, PlanRange
from perfmodel.planner.uniform.space import (
    LayoutRows,
    PipelineChoice,
    Space,
    layout_blocks,
    micro_batches,
    recompute_choices,
)
from perfmodel.planner.uniform.state_memory import least_state_memory
from perfmodel.planner.uniform.tables import KeptTables, Tables
from perfmodel.search.select import Front, Smallest

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Cells = NDArray[np.bool_]

#: Largest space, in plans, in which lists of recomputed modules are tried: each list adds as much work before slow layouts are dropped.
LISTS_UP_TO = 1 << 25

OUT_OF_MEMORY_STATIC = "does not fit: weights, gradients and optimizer state alone exceed the memory"
OUT_OF_MEMORY = "does not fit: activations, temporaries and what the framework needs exceed what is left of the memory"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestPlans:
    """Ids of the best plans so far, by each criterion.

    time     the fastest plans
    memory   the plans that fit with the least memory
    least    the plan with the least memory, whether it fits or not
    front    time against memory
    also     criteria in addition to time: memory fills `memory`, front fills `front`
    """

    time: Smallest
    memory: Smallest
    least: Smallest
    front: Front
    also: Collection[str]


@dataclass(slots=True, kw_only=True, eq=False)
class NumberedPlans:
    """Evaluated plans by id. ranges: consecutive ids; `starts` are their first ids."""

    ranges: list[PlanRange] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    next_id: int = 0

    def add(self, plans: PlanRange) -> int:
        """Number the plans of a range and return the first of their ids."""
        first_id = self.next_id
        self.ranges.append(plans)
        self.starts.append(first_id)
        self.next_id += prod(plans.shape)
        return first_id

    def at(self, plan_id: int) -> tuple[PlanRange, tuple[int, ...]]:
        """Return the range of a plan, and its indices in it."""
        number = bisect_right(self.starts, plan_id) - 1
        plans = self.ranges[number]
        return plans, tuple(map(int, np.unravel_index(plan_id - self.starts[number], plans.shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPass:
    """Choices of one pass over the layouts of a space.

    slowest      plans that surely take longer may be skipped, and are not counted   [s]
    is_counted   whether evaluated plans are counted: not if they were counted before, by their state alone
    """

    recomputes: tuple[Recompute, ...]
    recompute_operators: tuple[str, ...]
    slowest: float = inf
    is_counted: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Sweep:
    """State of a sweep over a space: counts, the best plans by each criterion, and the plan of each id.

    kept       layouts and memory of the space
    pending    memory and first ids of plans that are not timed yet
    latest     costs of the latest chunk on this machine
    needless   plans that surely need more than the capacity and more than this may be skipped, and are not counted; None: all are
               evaluated  [byte]
    """

    estimator: Estimator
    space: Space
    memory_limit: MemoryLimit
    attention: AttentionKernel
    best: BestPlans
    current: SweepPass
    kept: KeptSpace
    counts: PlanCounts = PlanCounts()
    numbered: NumberedPlans = field(default_factory=NumberedPlans)
    pending: list[tuple[PlanMemory, int]] = field(default_factory=list)
    latest: dict[LayoutChunk, ChunkCosts] = field(default_factory=dict)
    interrupted: bool = False
    needless: float | None = None

    @property
    def largest_state(self) -> float:
        """State memory above which a plan neither fits nor is tight; the largest number where all are evaluated. [byte]"""
        if not self.space.is_pruned:
            return sys.float_info.max
        return max(self.estimator.machine.memory.usable, self.memory_limit.capacity)

    @property
    def largest_need(self) -> float:
        """Need above which a plan cannot be the one with the least memory: `needless`, or the least so far. [byte]"""
        return self.best.least.bound if self.needless is None else min(self.needless, self.best.least.bound)

    def plan(self, plan_id: int) -> Plan:
        plans, (row, m, r, v) = self.numbered.at(plan_id)
        chunk = plans.chunk
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
        schedule=choice.schedule,
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
    also          see `BestPlans`
    """
    check_searchable(estimator)
    memory_limit = memory_limit_of(estimator, memory_headroom=memory_headroom, risk=risk)
    attention = attention or AttentionKernel(estimator.profile.kernels.default_attention)
    recompute_operators = recompute_operators or space.recompute_operators
    recomputes = tuple(recompute_choices(space, attention, recompute_operators))
    kept_tables = kept_tables or KeptTables()
    kept = KeptSpace()
    if kept_tables.spaces is not None and needless is None:
        kept = kept_tables.spaces.of(estimator, space, attention, recompute_operators, memory_limit)
    state = Sweep(
        estimator=estimator,
        space=space,
        memory_limit=memory_limit,
        attention=attention,
        best=BestPlans(
            time=Smallest(count=top),
            memory=Smallest(count=top),
            least=Smallest(count=1),
            front=Front(low=0.0, high=max(memory_limit.capacity, 1.0)),
            also=also,
        ),
        current=SweepPass(recomputes=recomputes, recompute_operators=recompute_operators),
        kept=kept,
        needless=needless,
    )
    num_chips = estimator.cluster.num_chips
    blocks = kept.once("blocks", lambda: list(layout_blocks(estimator.job, num_chips, space, attention))) if recomputes else []
    if blocks:
        tables = _tables(state, blocks, kept_tables)
        least = kept.once("least state memory", lambda: least_state_memory(estimator, space, tables, blocks))
        small = {rule: of_rule <= state.largest_state for rule, of_rule in least.items()}
        _add_microbatches(tables, small)
        for i, rows in enumerate(blocks):
            evaluate_rows(state, tables, i, rows, small)
            if progress is not None and progress((i + 1) / len(blocks)):
                state.interrupted = i + 1 < len(blocks)
                break
        time_pending(state, tables)
        if not state.interrupted:
            if needless is None and state.counts.num_evaluated <= LISTS_UP_TO:
                _try_lists(state, blocks, kept_tables, small, tables)
            _find_least_memory(state, tables, blocks, least)
    return state


def _find_least_memory(state: Sweep, tables: Tables, blocks: list[LayoutRows], least: Mapping[int, Array]) -> None:
    """Evaluate the layouts that do not fit by their state alone, as far as they may need less memory than every other.

    The smallest states come first: those of most other layouts then exceed the least memory.
    """
    known, smallest = state.largest_state, min((float(of_rule.min(initial=inf)) for of_rule in least.values()), default=inf)
    state.current = replace(state.current, is_counted=False)
    for largest in (max(smallest * 1.25, known), inf):
        upper = min(largest, state.largest_need)
        larger = {rule: (of_rule > known) & (of_rule <= upper) & (of_rule < inf) for rule, of_rule in least.items()}
        if any(layouts.any() for layouts in larger.values()):
            _add_microbatches(tables, larger)
            for i, rows in enumerate(blocks):
                evaluate_rows(state, tables, i, rows, larger)
            time_pending(state, tables)
        known = largest
    state.current = replace(state.current, is_counted=True)


def _try_lists(state: Sweep, blocks: list[LayoutRows], kept_tables: KeptTables, small: Mapping[int, Cells], first: Tables) -> None:
    """Lists of recomputed operators, of the layouts whose passes alone take no longer than the best plans so far.

    first   tables of the pass without lists: no pass takes less time than one without recomputation
    """
    usual = state.current
    for operators in state.space.lists:
        quick = _quick_layouts(state, blocks, small, first) if Recompute.NONE in usual.recomputes and state.space.is_pruned else small
        state.current = SweepPass(recomputes=(Recompute.SELECTIVE,), recompute_operators=operators)
        tables = _tables(state, blocks, kept_tables)
        _add_microbatches(tables, quick)
        for i, rows in enumerate(blocks):
            if state.space.is_pruned:
                state.current = replace(state.current, slowest=state.best.time.bound)
            evaluate_rows(state, tables, i, rows, quick)
        state.current = usual


def _quick_layouts(state: Sweep, blocks: list[LayoutRows], small: Mapping[int, Cells], tables: Tables) -> dict[int, Cells]:
    """Return the layouts that have a micro-batch whose passes take no longer than the slowest of the best plans."""
    quick = {rule: np.zeros_like(of_rule) for rule, of_rule in small.items()}
    for i, rows in enumerate(blocks):
        micro = micro_batches(state.estimator.job, rows.data_parallel, state.space)
        for rule, of_rule in quick.items():
            layouts = np.flatnonzero(small[rule][tables.rows[i]])
            if layouts.size:
                chunk = chunk_of(state, tables, i, rows, layouts, rule, micro)
                times = least_times(tables, chunk, mean_rounds(chunk))
                of_rule[tables.rows[i].start + layouts] = (times <= state.best.time.bound).any(axis=(1, 2))
    return quick


def _tables(state: Sweep, blocks: list[LayoutRows], kept: KeptTables) -> Tables:
    def make() -> Tables:
        return Tables(
            state.estimator,
            state.space,
            blocks,
            KeptTables(),
            attention=state.attention,
            recomputes=state.current.recomputes,
            recompute_operators=state.current.recompute_operators,
        )

    return state.kept.once(("tables", state.current.recompute_operators), make).on(state.estimator, kept)


def _add_microbatches(tables: Tables, layouts: Mapping[int, Cells]) -> None:
    for rule, of_rule in layouts.items():
        if (rows := np.flatnonzero(of_rule)).size:
            tables.add_microbatches(rule, rows)
