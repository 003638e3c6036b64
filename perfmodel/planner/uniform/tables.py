"""Tables of costs by their distinct inputs.

The cost of a microbatch depends on tp, cp, their placement on the network, and the micro-batch. The cost of parameters depends on the
layout and the ZeRO stage. Both are evaluated once per distinct combination, by the functions that predict single plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.evaluate import microbatch_cost, microbatch_depends_on
from perfmodel.cost.memory.moments import ActivationTerms, activation_terms
from perfmodel.cost.parameters import parameter_cost, parameters_depend_on, side_by_side
from perfmodel.cost.program import Program
from perfmodel.cost.stages import sum_of
from perfmodel.cost.step import RegionTimes, region_times
from perfmodel.cost.update import ParameterTerms, parameter_terms, tied_time
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.choices import ZERO_STAGES, AttentionKernel, Recompute
from perfmodel.parallel.compression import NO_COMPRESSION
from perfmodel.parallel.grid import LayoutGrid, make_grid
from perfmodel.planner.uniform.kept import KeptSpaces
from perfmodel.planner.uniform.space import LayoutRows, Space, micro_batches

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Columns of a table that are evaluated at once. Their intermediate arrays (a row per amount, per term of a moment, per tier of a
#: collective) stay in the caches and do not determine the search's peak memory.
TABLE_COLUMNS = 1 << 11


def layout_grid(estimator: Estimator, rows: LayoutRows, orders: tuple[tuple[str, ...], ...]) -> LayoutGrid:
    count = len(rows)
    return make_grid(
        {"pp": np.full(count, rows.pp), "dp_replicate": rows.dp_replicate, "dp_shard": rows.dp_shard, "cp": rows.cp, "tp": rows.tp},
        orders,
        order_index=rows.order,
        tier_sizes=estimator.machine.tier_sizes,
        num_key_value_heads=estimator.job.transformer.num_key_value_heads,
        folding=list(zip(rows.ep, rows.etp, strict=True)) if estimator.job.transformer.parts.experts is not None else (),
    )


def take_grid(grid: LayoutGrid, rows: Index | slice) -> LayoutGrid:
    return LayoutGrid(
        degree={axis: column[rows] for axis, column in grid.degree.items()},
        fine={axis: column[rows] for axis, column in grid.fine.items()},
        inside=tuple({axis: column[rows] for axis, column in tier.items()} for tier in grid.inside),
        hop=tuple(column[rows] for column in grid.hop),
    )


def join_grids(grids: list[LayoutGrid]) -> LayoutGrid:
    first = grids[0]
    return LayoutGrid(
        degree={axis: np.concatenate([g.degree[axis] for g in grids]) for axis in first.degree},
        fine={axis: np.concatenate([g.fine[axis] for g in grids]) for axis in first.fine},
        inside=tuple({axis: np.concatenate([g.inside[i][axis] for g in grids]) for axis in first.fine} for i in range(len(first.inside))),
        hop=tuple(np.concatenate([g.hop[i] for g in grids]) for i in range(len(first.hop))),
    )


def distinct(columns: list[Array]) -> tuple[Index, Index]:
    """Return the first row of each distinct combination of integer columns, and each row's combination: keys are built by mixed radix."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, digit = np.unique(column, return_inverse=True)
        key = key * len(values) + digit
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchTable:
    """Costs [keys, micro-batches] for one rule set; those that recomputation changes are [region, recompute, keys, micro-batches].

    times    forward times of the regions, then backward times; then the parts of both without inter-node collectives, if there are any
    ends     `RegionTimes.ends` of each region, if exchanges overlap with another microbatch
    weights, postponed   `RegionTimes.weights` and `ActivationTerms.postponed` of each region, if a schedule splits the backward pass
    kept     activation memory kept for backward; only that of blocks depends on the recomputation
    peaks    working set of backward of each region, with weight gradients that leave at once and with those that stay
    forward  working set of forward, of blocks and of what comes before them; else 0
    """

    program: Program
    times: Array
    ends: Array
    weights: Array
    postponed: Array
    kept: Array
    peaks: Array
    run_ahead: Array
    forward: Array
    boundary: Array
    logits: Array

    def passes(self) -> Array:
        """Return the time of all passes of a microbatch over all layers. [recompute, keys, micro-batches]"""
        regions = self.program.regions
        pairs = zip(self.times[: len(regions)], self.times[len(regions) :], strict=False)
        return np.asarray(sum_of([region.count * (f + b) for region, (f, b) in zip(regions, pairs, strict=False)]))

    def take(self, keys: Index) -> MicrobatchTable:
        """Return the table of some of the keys."""
        columns: dict[str, Any] = {name: getattr(self, name)[..., keys, :] for name in _BY_KEY}
        return replace(self, **columns)

    def block(self, keys: Index, columns: Index, recomputes: Index) -> tuple[RegionTimes, ActivationTerms]:
        """Return the costs at these keys, micro-batches and kinds of recomputation: indices that broadcast; a dim of 1 is added."""

        def pick(values: Array) -> Array:
            return np.asarray(values[0, keys, columns] if len(values) == 1 else values[recomputes, keys, columns])[..., None]

        regions = self.program.regions
        times = [pick(values) for values in self.times]
        # only blocks are recomputed
        some = [slice(None) if region.is_block else slice(0, 1) for region in regions]
        n = len(regions)
        parts = [tuple(times[i * n : (i + 1) * n]) for i in range(4)]  # the last two are empty without inter-node collectives
        ends, weights = (tuple(map(pick, values)) for values in (self.ends, self.weights))
        passes = RegionTimes(forward=parts[0], backward=parts[1], free_forward=parts[2], free_backward=parts[3], ends=ends, weights=weights)
        return passes, ActivationTerms(
            kept=tuple(pick(self.kept[i][some[i]]) for i in range(len(regions))),
            peaks=tuple((pick(self.peaks[2 * i][some[i]]), pick(self.peaks[2 * i + 1][some[i]])) for i in range(len(regions))),
            forward=tuple(pick(self.forward[i][some[i]]) for i in range(len(regions))),
            boundary=pick(self.boundary[None]),
            logits=pick(self.logits[None]),
            run_ahead=pick(self.run_ahead),
            postponed=tuple(map(pick, self.postponed)),
        )


_BY_KEY = tuple(column.name for column in fields(MicrobatchTable) if column.name != "program")


def microbatch_table(
    estimator: Estimator, program: Program, grid: LayoutGrid, sizes: list[int], recomputes: Sequence[Recompute]
) -> MicrobatchTable:
    """Evaluate every layout key with every micro-batch."""
    parts = []
    for piece in _pieces(grid, TABLE_COLUMNS // len(sizes)):
        shape = num_keys, num_sizes = piece.num_rows, len(sizes)
        wide = take_grid(piece, np.repeat(np.arange(num_keys), num_sizes))
        microbatch = np.tile(np.array(sizes, dtype=np.float64), num_keys)
        micro = microbatch_cost(program, estimator.machine, wide, microbatch, float(estimator.job.seq_len))
        stacked, peaks, forward, run_ahead = [], [], [], []
        by_region: dict[str, list[list[Array]]] = {"ends": [], "weights": [], "postponed": [], "kept": []}
        for recompute in recomputes:
            times = region_times(micro, estimator.profile, recompute, wide.degree["tp"])
            every = (*times.forward, *times.backward, *times.free_forward, *times.free_backward)
            stacked.append([values.reshape(shape) for values in every])
            terms = activation_terms(micro, recompute, estimator.profile, wide.degree["tp"])
            for rows, values in zip(by_region.values(), (times.ends, times.weights, terms.postponed, terms.kept), strict=True):
                rows.append([np.broadcast_to(value, num_keys * num_sizes).reshape(shape) for value in values])
            peaks.append([np.asarray(value).reshape(shape) for pair in terms.peaks for value in pair])
            forward.append([values.reshape(shape) for values in terms.forward])
            run_ahead.append(np.asarray(terms.run_ahead).reshape(shape))
        parts.append(
            MicrobatchTable(
                program=program,
                times=np.array(stacked).swapaxes(0, 1),
                **{name: np.array(rows).reshape(len(recomputes), -1, *shape).swapaxes(0, 1) for name, rows in by_region.items()},
                peaks=np.array(peaks).swapaxes(0, 1),
                run_ahead=np.array(run_ahead),
                forward=np.array(forward).swapaxes(0, 1),
                boundary=micro.boundary.reshape(shape),
                logits=micro.logits.reshape(shape),
            )
        )
    return join_tables(parts)


def join_tables(parts: list[MicrobatchTable]) -> MicrobatchTable:
    """Join tables of the same rule set, micro-batches and kinds of recomputation along their keys."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in _BY_KEY}
    most = max(map(len, columns["times"]))  # pieces without inter-node collectives: the full passes are free
    columns["times"] = [times if len(times) == most else np.concatenate([times, times]) for times in columns["times"]]
    columns = {name: np.concatenate(values, axis=-2) for name, values in columns.items()}
    return replace(parts[0], **columns)


def _pieces(grid: LayoutGrid, most: int) -> list[LayoutGrid]:
    """Split the rows of a grid into parts of at most `most` rows."""
    step = max(most, 1)
    return [take_grid(grid, np.arange(begin, min(begin + step, grid.num_rows))) for begin in range(0, grid.num_rows, step)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterTable:
    """Parameter terms of one rule set and ZeRO stage on distinct layouts, and the reduction of tied embeddings."""

    terms: ParameterTerms
    tied: Array

    def block(self, keys: Index) -> tuple[ParameterTerms, Array]:
        """Return columns [layouts, 1, 1, 1] of these keys."""

        def pick(value: Array) -> Array:
            return value[keys][:, None, None, None]

        t = self.terms
        return ParameterTerms(
            gather_forward={times: tuple(pick(v) for v in values) for times, values in t.gather_forward.items()},
            gather_backward={times: tuple(pick(v) for v in values) for times, values in t.gather_backward.items()},
            tp_sum={times: tuple(pick(v) for v in values) for times, values in t.tp_sum.items()},
            reduce={times: tuple(pick(v) for v in values) for times, values in t.reduce.items()},
            publish=tuple(pick(v) for v in t.publish),
            full=tuple(pick(v) for v in t.full),
            shard=tuple(pick(v) for v in t.shard),
            padded=tuple(pick(v) for v in t.padded),
            summed=tuple(pick(v) for v in t.summed),
            is_reduced=pick(np.asarray(t.is_reduced)),
            tied=(pick(t.tied[0]), pick(t.tied[1])),
            zero=t.zero,
            program=t.program,
            frozen=None if t.frozen is None else t.frozen.map_columns(pick),
            casts=None if t.casts is None else t.casts.map_columns(pick),
            compression=None if t.compression is None else t.compression.map_columns(pick),
        ), pick(self.tied)


@dataclass(slots=True, kw_only=True, eq=False)
class KeptTables:
    """Cache of tables for further passes.

    parameters           made at their first use; also valid for other batches of a space
    microbatches         by program, micro-batches and kinds of recomputation; each with the row of every combination of its inputs
    keeps_microbatches   whether microbatch tables are cached, for other spaces of the same job
    spaces               layouts and memory of spaces, shared with searches on machines with other rates; None: they are not kept
    """

    parameters: dict[tuple[object, ...], Callable[[], ParameterTable]] = field(default_factory=dict)
    microbatches: dict[tuple[object, ...], tuple[MicrobatchTable, dict[bytes, int]]] = field(default_factory=dict)
    keeps_microbatches: bool = False
    spaces: KeptSpaces | None = None


def parameter_table(
    estimator: Estimator, program: Program, rules: RuleSet, zero: int, grid: LayoutGrid, *, pipelined: bool
) -> ParameterTable:
    compiled = estimator.programs.parameter_program(program, rules, zero, pipelined=pipelined)
    costs = [parameter_cost(compiled, estimator.profile, estimator.machine, piece) for piece in _pieces(grid, TABLE_COLUMNS)]
    terms = parameter_terms(compiled, side_by_side(costs))
    tied = tied_time(terms, estimator.programs.sizes, estimator.machine, grid) if compiled.is_tied else 0.0
    return ParameterTable(terms=terms, tied=np.broadcast_to(np.asarray(tied, dtype=np.float64), grid.num_rows))


class Tables:
    """Tables over all blocks: keys of every layout, microbatch tables by rule set, parameter tables by ZeRO stage.

    rows             range of the layouts of each block
    ways             bits of the rule sets that each layout may have
    parameter_keys   row of each layout in the parameter tables of layouts with, or without, a pipeline
    micro_keys       row of each layout in the microbatch table of a rule set
    """

    def __init__(
        self,
        estimator: Estimator,
        space: Space,
        blocks: Sequence[LayoutRows],
        kept: KeptTables,
        *,
        attention: AttentionKernel,
        recomputes: Sequence[Recompute],
        recompute_operators: tuple[str, ...],
    ) -> None:
        self.recomputes = recomputes
        self.cuts = space.cuts(estimator.job)
        self.grid = join_grids([layout_grid(estimator, rows, space.orders) for rows in blocks])
        bounds = np.cumsum([0, *(len(rows) for rows in blocks)])
        self.rows = [slice(begin, end) for begin, end in itertools.pairwise(bounds.tolist())]
        self.ways = np.concatenate([rows.rules for rows in blocks])
        self.sizes = sorted({size for rows in blocks for size in micro_batches(estimator.job, rows.data_parallel, space)})
        self.first, self.keys = distinct(depends_on := microbatch_depends_on(self.grid, estimator.profile))
        self.depends_on = np.array(depends_on)[:, self.first].T
        used = int(np.bitwise_or.reduce(self.ways))
        self.programs = {
            index: estimator.programs.program(rules, attention, recompute_operators, dispatcher, splits_backward=space.splits_backward)
            for index, (rules, dispatcher) in enumerate(self.cuts)
            if used >> index & 1
        }
        self.parameter_keys = np.empty(len(self.keys), dtype=np.int64)
        self.parameter_layouts: dict[bool, tuple[LayoutGrid, tuple[bytes, ...]]] = {}
        self.zeros: dict[bool, list[int]] = {}
        for in_pipeline in (False, True):
            rows = np.flatnonzero((self.grid.degree["pp"] > 1) == in_pipeline)
            if not len(rows):
                continue
            some = take_grid(self.grid, rows)
            first, self.parameter_keys[rows] = distinct(parameters_depend_on(some))
            layouts = take_grid(some, first)
            columns = [column for by_axis in (layouts.degree, *layouts.inside) for column in by_axis.values()]
            self.parameter_layouts[in_pipeline] = layouts, tuple(column.tobytes() for column in (*columns, *layouts.hop))
            admitted = partial(space.runs.sharding.admits, pipelined=in_pipeline, replicated=False)
            # compressed gradients are replicated (`check_compression`)
            stages = ZERO_STAGES if estimator.profile.communication.gradient_compression == str(NO_COMPRESSION) else ZERO_STAGES[:1]
            self.zeros[in_pipeline] = [zero for zero in stages if space.admits("zero", zero) and admitted(zero)]
        self._start(estimator, kept)

    def _start(self, estimator: Estimator, kept: KeptTables) -> None:
        self.estimator, self.kept = estimator, kept
        self.micro: dict[int, MicrobatchTable] = {}
        self.micro_keys: dict[int, Index] = {}
        self.passes: dict[int, Array] = {}
        self.parameters: dict[tuple[int, int, bool], Callable[[], ParameterTable]] = {}
        for in_pipeline, (layouts, columns) in self.parameter_layouts.items():
            for index, program in self.programs.items():
                for zero in self.zeros[in_pipeline]:
                    key = (program.parameters, program.regions, zero, in_pipeline, *columns)  # the same for every dispatcher
                    make = partial(parameter_table, estimator, program, self.cuts[index][0], zero, layouts, pipelined=in_pipeline)
                    self.parameters[index, zero, in_pipeline] = kept.parameters.setdefault(key, cache(make))

    def on(self, estimator: Estimator, kept: KeptTables) -> Tables:
        """Return empty tables of the same layouts for a machine that differs only in rates."""
        other = copy(self)
        other._start(estimator, kept)
        return other

    def add_microbatches(self, rule: int, rows: Index) -> None:
        """Evaluate the microbatches of these layouts under a rule set, except those in the cache."""
        keys = np.unique(self.keys[rows])
        row_of_key = np.zeros(len(self.first), dtype=np.int64)
        row_of_key[keys] = np.arange(len(keys))
        program, key = self.programs[rule], (self.programs[rule], tuple(self.sizes), tuple(self.recomputes))
        known, row_by_name = self.kept.microbatches.get(key, (None, {}))
        names = [row.tobytes() for row in self.depends_on[keys]]
        old = np.array([name in row_by_name for name in names], dtype=bool)
        parts: list[MicrobatchTable] = [] if known is None or not old.any() else [known]
        row_of_key[keys[old]] = [row_by_name[name] for name in names if name in row_by_name]
        if not old.all():
            new = keys[~old]
            if parts:
                parts[0] = parts[0].take(row_of_key[keys[old]])
                row_of_key[keys[old]] = np.arange(int(old.sum()))
            parts.append(microbatch_table(self.estimator, program, take_grid(self.grid, self.first[new]), self.sizes, self.recomputes))
            row_of_key[new] = int(old.sum()) + np.arange(len(new))
        self.micro[rule] = table = join_tables(parts)
        self.passes[rule] = table.passes()
        self.micro_keys[rule] = row_of_key[self.keys]
        if self.kept.keeps_microbatches and known is None:
            self.kept.microbatches[key] = table, dict(zip(names, row_of_key[keys].tolist(), strict=True))
