"""Costs tabulated on the factors that they depend on.

The work of a microbatch depends on tp, cp, where these lie on the network, and the micro-batch; the cost of parameters on the
layout and the ZeRO stage. Both are evaluated once for each distinct combination, by the functions that predict single plans.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.moments import ActivationTerms, activation_terms
from perfmodel.cost.microbatch import microbatch_cost
from perfmodel.cost.parameters import parameter_cost, side_by_side
from perfmodel.cost.program import Program
from perfmodel.cost.stages import sum_of
from perfmodel.cost.step import ParameterTerms, RegionTimes, parameter_terms, region_times, tied_time
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.grid import LayoutGrid, make_grid
from perfmodel.parallel.layout import Recompute
from perfmodel.planner.uniform.space import LayoutRows

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Columns of a table that are evaluated at once: what is made of them on the way (a row for each amount, each term of a moment, each
#: tier of a collective) stays in the caches, and does not set the search's peak memory.
TABLE_COLUMNS = 1 << 11


def layout_grid(estimator: Estimator, rows: LayoutRows, orders: tuple[tuple[str, ...], ...]) -> LayoutGrid:
    count = len(rows)
    return make_grid(
        {"pp": np.full(count, rows.pp), "dp_replicate": rows.dp_replicate, "dp_shard": rows.dp_shard, "cp": rows.cp, "tp": rows.tp},
        orders,
        order_index=rows.order,
        tier_sizes=estimator.machine.tier_sizes,
        num_key_value_heads=estimator.job.transformer.num_key_value_heads,
        folding=list(zip(rows.ep, rows.etp, strict=True)) if estimator.job.transformer.experts is not None else (),
    )


def take_grid(grid: LayoutGrid, rows: Index) -> LayoutGrid:
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
    """First row of each distinct combination of whole-number columns, and each row's combination: keys are built by mixed radix."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, digit = np.unique(column, return_inverse=True)
        key = key * len(values) + digit
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchTable:
    """[keys, micro-batches] for one rule set; by region, [recompute, keys, micro-batches] for what recomputation changes.

    times    forward of each region, then backward, then what is free of each where collectives leave their node
    ends     of each region, where exchanges hide beside another microbatch
    kept     what each keeps; of what is no block the same under every recomputation
    peaks    of each region with weight gradients that leave, and with those that stay
    forward  of blocks, and of what comes before them; else 0
    """

    program: Program
    times: Array
    ends: Array
    kept: Array
    peaks: Array
    run_ahead: Array
    forward: Array
    boundary: Array
    logits: Array

    def passes(self) -> Array:
        """All passes of a microbatch over all layers. [recompute, keys, micro-batches]"""
        regions = self.program.regions
        pairs = zip(self.times[: len(regions)], self.times[len(regions) :], strict=False)
        return np.asarray(sum_of([region.count * (f + b) for region, (f, b) in zip(regions, pairs, strict=False)]))

    def block(self, keys: Index, columns: Index, recomputes: Index) -> tuple[RegionTimes, ActivationTerms]:
        """Arrays [layouts, micro-batches, recompute, 1] for these layouts' keys, micro-batches and kinds of recomputation."""
        index, alike = np.ix_(keys, columns), np.ix_(np.zeros(1, dtype=np.int64), keys, columns)
        each = np.ix_(recomputes, keys, columns)

        def pick(values: Array) -> Array:
            return np.moveaxis(values[alike if len(values) == 1 else each], 0, -1)[..., None]

        regions = self.program.regions
        times = [pick(values) for values in self.times]
        # only blocks are recomputed
        some = [slice(None) if region.is_block else slice(0, 1) for region in regions]
        n = len(regions)
        parts = [tuple(times[i * n : (i + 1) * n]) for i in range(4)]  # the last two empty where no collective leaves its node
        ends = tuple(pick(values) for values in self.ends)
        passes = RegionTimes(forward=parts[0], backward=parts[1], free_forward=parts[2], free_backward=parts[3], ends=ends)
        return passes, ActivationTerms(
            kept=tuple(pick(self.kept[i][some[i]]) for i in range(len(regions))),
            peaks=tuple((pick(self.peaks[2 * i][some[i]]), pick(self.peaks[2 * i + 1][some[i]])) for i in range(len(regions))),
            forward=tuple(pick(self.forward[i][some[i]]) for i in range(len(regions))),
            boundary=self.boundary[index][..., None, None],
            logits=self.logits[index][..., None, None],
            run_ahead=pick(self.run_ahead),
        )


def microbatch_table(
    estimator: Estimator, program: Program, grid: LayoutGrid, sizes: list[int], recomputes: list[Recompute]
) -> MicrobatchTable:
    """Every layout key with every micro-batch."""
    parts = [_microbatch_part(estimator, program, piece, sizes, recomputes) for piece in _pieces(grid, TABLE_COLUMNS // len(sizes))]
    if len(parts) == 1:
        return parts[0]
    columns = {each.name: [getattr(part, each.name) for part in parts] for each in fields(MicrobatchTable) if each.name != "program"}
    most = max(map(len, columns["times"]))  # where no collective of a piece leaves its node, all of the passes is free
    columns["times"] = [times if len(times) == most else np.concatenate([times, times]) for times in columns["times"]]
    return MicrobatchTable(program=program, **{name: np.concatenate(values, axis=-2) for name, values in columns.items()})


def _pieces(grid: LayoutGrid, most: int) -> list[LayoutGrid]:
    """The rows of a grid, so many at a time."""
    step = max(most, 1)
    return [take_grid(grid, np.arange(begin, min(begin + step, grid.num_rows))) for begin in range(0, grid.num_rows, step)]


def _microbatch_part(
    estimator: Estimator, program: Program, grid: LayoutGrid, sizes: list[int], recomputes: list[Recompute]
) -> MicrobatchTable:
    num_keys, num_sizes = grid.num_rows, len(sizes)
    wide = take_grid(grid, np.repeat(np.arange(num_keys), num_sizes))
    micro = microbatch_cost(program, estimator.machine, wide, np.tile(np.array(sizes, dtype=np.float64), num_keys))
    shape = (num_keys, num_sizes)
    stacked, ends, kept, peaks, forward, run_ahead = [], [], [], [], [], []
    for recompute in recomputes:
        times = region_times(micro, estimator.profile, recompute, wide.degree["tp"])
        stacked.append([values.reshape(shape) for values in (*times.forward, *times.backward, *times.free_forward, *times.free_backward)])
        ends.append([np.broadcast_to(values, shape[0] * shape[1]).reshape(shape) for values in times.ends])
        terms = activation_terms(micro, recompute, estimator.profile, wide.degree["tp"])
        kept.append([np.broadcast_to(values, shape[0] * shape[1]).reshape(shape) for values in terms.kept])
        peaks.append([np.asarray(value).reshape(shape) for pair in terms.peaks for value in pair])
        forward.append([values.reshape(shape) for values in terms.forward])
        run_ahead.append(np.asarray(terms.run_ahead).reshape(shape))
    return MicrobatchTable(
        program=program,
        times=np.array(stacked).swapaxes(0, 1),
        ends=np.array(ends).reshape(len(recomputes), -1, *shape).swapaxes(0, 1),
        kept=np.array(kept).swapaxes(0, 1),
        peaks=np.array(peaks).swapaxes(0, 1),
        run_ahead=np.array(run_ahead),
        forward=np.array(forward).swapaxes(0, 1),
        boundary=micro.boundary.reshape(shape),
        logits=micro.logits.reshape(shape),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterTable:
    """Parameter terms of one rule set and ZeRO stage on distinct layouts, and the reduction of tied embeddings."""

    terms: ParameterTerms
    tied: Array

    def block(self, keys: Index) -> tuple[ParameterTerms, Array]:
        """Columns [layouts, 1, 1, 1] of these keys."""

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
            frozen=None if t.frozen is None else t.frozen.as_made(pick),
            casts=None if t.casts is None else t.casts.as_made(pick),
        ), pick(self.tied)


def parameter_table(
    estimator: Estimator, program: Program, rules: RuleSet, zero: int, grid: LayoutGrid, *, pipelined: bool
) -> ParameterTable:
    compiled = estimator.programs.parameter_program(program, rules, zero, pipelined=pipelined)
    costs = [parameter_cost(compiled, estimator.profile, estimator.machine, piece) for piece in _pieces(grid, TABLE_COLUMNS)]
    terms = parameter_terms(compiled, side_by_side(costs))
    tied = tied_time(program, terms, estimator.programs.sizes, estimator.machine, grid)
    return ParameterTable(terms=terms, tied=np.broadcast_to(np.asarray(tied, dtype=np.float64), grid.num_rows))
