"""Memory of one plan as numbers: of the pipeline ranks that may be the fullest, and by class at the peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.memory.chip import (
    MEMORY,
    ActivationBytes,
    LiveLayers,
    UnreducedGradients,
    kept_memory,
    live_table,
    outside_bytes,
    reserve_factor,
    static_memory,
    three_live_layers,
    unreduced_gradients,
    waiting_memory,
)
from perfmodel.cost.memory.moments import ActivationTerms, At, MemoryTerms, Moment, rank_moments
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.stages import Stages, slowest_stage, sum_of
from perfmodel.cost.update import ParameterTerms, held_elements
from perfmodel.foundation.columns import Column
from perfmodel.foundation.memory_headroom import MemoryUncertainty, RankNeed
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.stage_cuts import imbalance
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.network_model import NetworkModel

if TYPE_CHECKING:
    from perfmodel.cost.assemble import PlanColumns
    from perfmodel.cost.estimate import Estimator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemoryTerms:
    """Memory of one rank: static memory, moments, gradients that stay unreduced (None: none), and memory that always waits for reuse."""

    static: tuple[Any, Any, Any, Any]
    fixed: Column
    moments: list[Moment]
    unreduced: UnreducedGradients | None
    waiting: Column
    factor: float
    outside: Column

    def base(self, at: At, times: Container[At]) -> Any:
        """Return the memory while this part runs, without passes in flight. times: parts with their own passes in flight. [byte]"""
        totals = []
        for moment in self.moments:
            if (moment.at if moment.at in times else At.BLOCKS) is at:
                totals.append(moment.total)
        # the largest moment with fragmentation
        return ((slowest_stage(totals) * self.factor + self.fixed) + self.waiting) + self.outside


def rank_memory_terms(of: MemoryTerms, rank: int, live: LiveLayers, *, of_live: Stages | None = None) -> RankMemoryTerms:
    """Return the memory terms of a distinct rank, with these blocks in flight.

    of_live   stages with an entry for each of `live`, if there are more than in `of`
    """
    unreduced = None
    if of.terms.program.keeps_gathered:
        unreduced = unreduced_gradients(of, rank, live, of_live or of.stages)
    return RankMemoryTerms(
        static=of.static[rank],
        fixed=sum_of(of.static[rank]),
        moments=rank_moments(of, rank),
        unreduced=unreduced,
        waiting=waiting_memory(of, rank),
        factor=of.factor,
        outside=of.outside,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """Memory of plans on their distinct ranks (`Stages`). Numbers, or columns of several machines, degrees, batches or lengths.

    total   of each rank   [byte]
    """

    of: MemoryTerms
    pipeline: Pipeline
    kept: list[ActivationBytes]
    ranks: tuple[RankMemoryTerms, ...]
    total: tuple[Any, ...]

    def needs(self, plan: Plan, uncertainty: MemoryUncertainty) -> tuple[RankNeed, ...]:
        """Return the memory needs of the ranks of one plan, which decide whether it fits."""
        return self.needs_by_column(plan, uncertainty, 1)[0]

    def needs_by_column(self, plan: Plan, uncertainty: MemoryUncertainty, number: int) -> list[tuple[RankNeed, ...]]:
        """Return the memory needs of the ranks for each of `number` columns, the same objects for equal numbers."""
        num_ranks = plan.layout.pp if plan.assignment is None else 1  # such a plan defines the placement of layers
        more = imbalance_of(plan.job.model, num_ranks, self.of.stages, uncertainty)
        extra = extra_memory(self.of, uncertainty)
        rows = zip(self.ranks, self.total, more, extra, strict=True)
        by_rank = [entries_of((total, rank.fixed, rank.outside, ratio, kept), number) for rank, total, ratio, kept in rows]
        known: dict[tuple[tuple[float, ...], ...], tuple[RankNeed, ...]] = {}
        needs = []
        for values in zip(*by_rank, strict=True):
            if values not in known:
                of_ranks = [
                    RankNeed(total=total, sure=sure, outside=out, imbalance=ratio, extra=kept) for total, sure, out, ratio, kept in values
                ]
                known[values] = tuple(of_ranks)
            needs.append(known[values])
        return needs


def memory_row(plan: Plan, columns: PlanColumns, activations: ActivationTerms, *, estimator: Estimator) -> MemoryRow:
    """Evaluate the formulas of a search on numbers instead of columns of one entry: the same arithmetic in less time."""
    profile, machine, sizes = estimator.profile, estimator.machine, estimator.programs.sizes
    once, stages = columns.once, columns.stages
    terms = once(columns.terms, ("scalars",), partial(terms_as, columns.terms, scalar))
    num_microbatches = scalar(columns.num_microbatches)
    live = three_live_layers(
        live_table(plan.schedule, columns.stage_layers, plan.layout.pp),
        schedule=plan.schedule,
        num_ranks=plan.layout.pp,
        num_microbatches=num_microbatches,
        num_between=stages.num_ranks - 2,
    )
    num_replicas = scalar(replicas(columns.grid))
    of = MemoryTerms(
        activations=once(activations, ("scalars",), partial(activations_as, activations, scalar)),
        terms=terms,
        stages=stages,
        static=static_memory(terms, stages, sizes, num_replicas=num_replicas),
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        tp=scalar(columns.grid.degree["tp"]),
        is_scattered=columns.is_scattered,
        activation_bytes=columns.program.rows.activation_bytes,
        profile=profile,
        sizes=sizes,
        factor=reserve_factor(profile, machine),
        outside=scalar(once(columns.grid, ("outside",), partial(outside_bytes, profile, machine, columns.grid))),
    )
    pipeline = Pipeline(
        schedule=plan.schedule,
        num_ranks=float(plan.layout.pp),
        num_microbatches=of.num_microbatches,
        virtual_stages=float(plan.virtual_stages),
    )
    kept = kept_memory(of.activations, stages, pipeline, live, profile, activation_bytes=of.activation_bytes)
    ranks = tuple(map(partial(rank_memory_terms, of), range(stages.num_ranks), live))
    return MemoryRow(of=of, pipeline=pipeline, kept=kept, ranks=ranks, total=tuple(map(most_reserved, ranks, kept)))


def imbalance_of(
    model: TransformerConfig | NetworkModel, num_ranks: int, stages: Stages, uncertainty: MemoryUncertainty
) -> tuple[Column, ...]:
    """Return the ratio of the layers that each distinct rank may hold to those in its prediction."""
    if uncertainty.of_unseen and num_ranks > 1 and isinstance(model, TransformerConfig):
        return imbalance(model, num_ranks, stages.blocks)
    return (1.0,) * stages.num_ranks


def extra_memory(of: MemoryTerms, uncertainty: MemoryUncertainty) -> Sequence[Any]:
    """Return the memory that a framework may keep on each distinct rank, although the profile does not include it. [byte]

    In a pipeline, the unsharded tensors of its shards: weights that stay gathered, gradients unreduced until the last micro-batch (torch).
    Gradients as produced, in addition to accumulators of another dtype, until replicas have reduced them (nanotron, bf16 optimizer of
    DeepSpeed).
    """
    program, stages, sizes = of.terms.program, of.stages, of.sizes
    if not uncertainty.of_unseen:
        return (0.0,) * stages.num_ranks
    if program.holds_sharded_gradients and np.any(stages.is_single != 1.0):
        more: Column = (1.0 - stages.is_single) * (sizes.gradient.unsharded + program.holds_sharded_weights * sizes.gathered)
    elif program.holds_sharded_weights or sizes.gradient.copy or sizes.gradient.produced == sizes.gradient.unsharded:
        return (0.0,) * stages.num_ranks
    else:
        more = np.minimum(of.num_replicas - 1.0, 1.0) * sizes.gradient.produced
    return [elements * more for elements in held_elements(of.terms, stages, sharded=False)]


def most_reserved(rank: RankMemoryTerms, kept: ActivationBytes) -> Any:
    """Return the peak memory of a rank. [byte]"""
    totals = []
    for at, (activations, received) in kept.items():
        base = rank.base(at, kept)
        totals.append((activations + received) * rank.factor + (base if rank.unreduced is None else base + rank.unreduced.at(at)))
    return scalar(slowest_stage(totals))


def activations_as(columns: ActivationTerms, convert: Callable[[Any], Any]) -> ActivationTerms:
    """Return the terms with each column converted."""
    leaving, staying = zip(*columns.peaks, strict=True)
    return ActivationTerms(
        kept=tuple(map(convert, columns.kept)),
        peaks=tuple(zip(map(convert, leaving), map(convert, staying), strict=True)),
        forward=tuple(map(convert, columns.forward)),
        boundary=convert(columns.boundary),
        logits=convert(columns.logits),
        run_ahead=convert(columns.run_ahead),
        postponed=tuple(map(convert, columns.postponed)),
    )


def terms_as(columns: ParameterTerms, convert: Callable[[Any], Any]) -> ParameterTerms:
    """Return the terms with each column of elements converted."""
    return replace(
        columns,
        full=tuple(map(convert, columns.full)),
        shard=tuple(map(convert, columns.shard)),
        padded=tuple(map(convert, columns.padded)),
        summed=tuple(map(convert, columns.summed)),
        tied=(convert(columns.tied[0]), convert(columns.tied[1])),
        frozen=None if columns.frozen is None else columns.frozen.map_columns(convert),
        compression=None if columns.compression is None else columns.compression.map_columns(convert),
    )


def adding_up(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Round the parts to the grid of the total's last binary digit; the largest of them absorbs the rest.

    They differ from the given values by rounding only, and add up to the total exactly, in any order: no partial sum rounds.
    """
    grid = math.ulp(total)
    rounded = {name: round(value / grid) * grid for name, value in parts.items()}
    largest = max(rounded, key=rounded.__getitem__)
    rounded[largest] += total - sum(rounded.values())
    return rounded


def scalar(value: Column) -> Any:
    """Return the value of a column of one plan; a column of several machines or lengths is returned unchanged."""
    if isinstance(value, float):
        return float(value)
    column = np.asarray(value)
    return float(column.reshape(-1)[0]) if column.size == 1 else column


def entries_of(values: Iterable[Column], number: int) -> list[tuple[float, ...]]:
    """Return the values of each of `number` columns."""
    rows = list(values)
    table = np.empty((len(rows), number))
    for row, value in enumerate(rows):
        table[row] = value
    return list(map(tuple, table.T.tolist()))


def entry(value: Column, column: int) -> float:
    """Return one value of a column, or the constant."""
    if isinstance(value, (float, int)):
        return float(value)
    return float(value[column] if value.size > 1 else value.reshape(-1)[0])


#: Moment, part that runs, unreduced gradients, freed activations and freed weights.
PeakCase = tuple[Moment, At, Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peak:
    """Moments that may be the peak of a rank, and the largest by column."""

    cases: list[PeakCase]
    largest: Sequence[int]


def peak_of(rank: RankMemoryTerms, kept: ActivationBytes) -> Peak:
    """Return the candidate peaks of a rank, and the largest by column."""
    cases: list[PeakCase] = []
    totals: list[Column] = []
    for moment in rank.moments:
        at = moment.at if moment.at in kept else At.BLOCKS
        activations, received = kept[at]
        for case in ((0.0, 0.0, 0.0),) if rank.unreduced is None else rank.unreduced.cases(at):
            waits, gone, weights = case[0] / rank.factor, case[1] / rank.factor, case[2]
            cases.append((moment, at, waits, gone, weights))
            # fragmentation is of what moves; weights count as fixed memory
            totals.append((activations + received) + moment.total + (waits - gone) - weights / rank.factor)
    columns = max(map(np.size, totals))
    if columns == 1:
        return Peak(cases=cases, largest=[int(np.argmax([*map(scalar, totals)]))])
    table = np.empty((len(totals), columns))
    for number, total in enumerate(totals):
        table[number] = total
    return Peak(cases=cases, largest=table.argmax(axis=0).tolist())


def memory_by_class(rank: RankMemoryTerms, kept: ActivationBytes) -> tuple[str, dict[str, float]]:
    """Return the moment of the peak, and the live bytes by class: allocated bytes, without further reserved bytes."""
    peak = peak_of(rank, kept)
    moment, *_ = case = peak.cases[peak.largest[0]]
    return moment.name, dict(zip(MEMORY, map(scalar, _bytes_by_class(rank, kept, case)), strict=True))


def _bytes_by_class(rank: RankMemoryTerms, kept: ActivationBytes, case: PeakCase) -> tuple[Any, ...]:
    """Return the live bytes of a case by class, in the order of `MEMORY`."""
    moment, at, waits, gone, weights = case
    activations, received = kept[at]
    # activations of reduced chunks may exceed those still saved: the excess is subtracted from the gradients
    left = activations + moment.freed - gone
    stored, gradients, states, copies = rank.static
    return (
        stored,
        gradients + moment.gradients + (waits - np.maximum(-left, 0.0)),
        states,
        np.maximum(left, 0.0),
        copies + moment.gathered - weights,
        moment.temporary,
        received + moment.buffers,
        0.0,
        0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank as its allocator counts them: allocated to tensors at the peak, and reserved."""

    allocated: float
    reserved: float


def fullest_by_class(row: MemoryRow, number: int) -> list[tuple[str, float, tuple[float, ...]]]:
    """Return the moment at the peak of the fullest chip, its total and its live bytes by class, for each of `number` columns. [byte]"""
    totals = entries_of(row.total, number)
    peaks: dict[int, Peak] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for column, of_ranks in enumerate(totals):
        rank = of_ranks.index(max(of_ranks))
        if rank not in peaks:
            peaks[rank] = peak_of(row.ranks[rank], row.kept[rank])
        largest = peaks[rank].largest
        groups.setdefault((rank, largest[column if len(largest) > 1 else 0]), []).append(column)
    held: list[tuple[str, float, tuple[float, ...]]] = [("", 0.0, ())] * number
    for (rank, peak_case), columns in groups.items():
        case = peaks[rank].cases[peak_case]
        by_class = entries_of(_bytes_by_class(row.ranks[rank], row.kept[rank], case), number)
        for column in columns:
            held[column] = case[0].name, totals[column][rank], by_class[column]
    return held


def replicas(grid: LayoutGrid) -> Any:
    """Return the number of ranks that the gradient of a weight is reduced over."""
    return (grid.degree["dp_replicate"] * grid.degree["dp_shard"]) * grid.degree["cp"]
