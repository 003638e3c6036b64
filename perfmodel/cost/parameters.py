"""Cost of parameters: all-gathers, reductions, publishing, weight casts, and the elements that a chip holds.

A ZeRO stage is three layouts and two lifetimes of a parameter (R14 of docs/explanation/algebra.md, `parallel/algebra/parameters.py`).
This module evaluates its events on columns. A block counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import permutations
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compression import CompressionCost, copied_bytes, kept_bytes, messages, passes_time
from perfmodel.cost.machine import MEBIBYTE, Machine
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile, profile_events
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.parallel.algebra.derive import ParameterLayout
from perfmodel.parallel.algebra.parameters import is_one_end_unit, shard_axes, stored_rows
from perfmodel.parallel.algebra.sharding import MESH_AXES, TENSOR_AXES
from perfmodel.parallel.compression import NO_COMPRESSION, Compression, Compressor, compression_of
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.workload.graph import NO_CASTS, Region

Array = NDArray[np.float64]

_FLOAT32 = 4.0

#: Events of a region's parameters, and how often they happen.
WHAT = ("gather_forward", "gather_backward", "sum", "reduce", "publish")
TIMES = ("microbatch", "step")
#: Events for which every micro-batch may have to wait.
_WAITS = {("gather_forward", "microbatch"), ("gather_backward", "microbatch"), ("reduce", "microbatch")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventColumns:
    """Columns of events: [events] the parameter, and [events, 1] bytes of an element and which buffer is sent.

    on_shard, is_whole   the shard; the unsharded matrix; neither: as gathered
    """

    parameter: NDArray[np.int64]
    itemsize: NDArray[np.float64]
    on_shard: NDArray[np.bool_]
    is_whole: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitColumns:
    """Columns of units [units]: events that run as one collective.

    starts   first event of each unit
    kind, mask   the collective, and the axes of its group
    cell         row of `ParameterCost.time` to which its time is added
    tensors      number of its tensors
    merges       (into, from) of units that become one collective where their groups are equal
    shares       [units, 1] size of the unit that a parameter is gathered in, over the part that is here; None: units are complete
    """

    starts: NDArray[np.intp]
    kind: NDArray[np.int64]
    mask: NDArray[np.int64]
    cell: NDArray[np.int64]
    is_bucketed: NDArray[np.bool_]
    tensors: NDArray[np.float64]
    merges: tuple[tuple[int, int], ...]
    shares: NDArray[np.float64] | None

    @classmethod
    def of(
        cls, events: Sequence[tuple[Any, ...]], masks: Sequence[frozenset[str]], num_regions: int, shares: Sequence[float]
    ) -> UnitColumns:
        """Return the units of sorted events (unit, parameter, ...). A unit is (what, times, region, kind, mask, parameter or -1).

        Two units merge if they agree but for the mask, and the axes of one are among those of the other.
        """
        starts = [i for i, event in enumerate(events) if i == 0 or event[0] != events[i - 1][0]]
        units = [events[i][0] for i in starts]
        pairs = []
        for (a, first), (b, second) in permutations(enumerate(units), 2):
            into, of = masks[first[4]], masks[second[4]]
            if first[:4] == second[:4] and first[5] == second[5] and into < of:
                pairs.append((-len(of), len(into), a, b))
        return cls(
            starts=np.array(starts, dtype=np.intp),
            kind=np.array([COLLECTIVE_CODE[unit[3]] for unit in units], dtype=np.int64),
            mask=np.array([unit[4] for unit in units], dtype=np.int64),
            cell=np.array([cell(unit[0], unit[1], unit[2], num_regions) for unit in units], dtype=np.int64),
            merges=() if shares else tuple(map(itemgetter(2, 3), sorted(pairs))),
            shares=np.array([[1.0 if events[i][0][0] == "sum" else shares[events[i][1]]] for i in starts]) if shares else None,
            is_bucketed=np.array([unit[0] == "reduce" for unit in units], dtype=bool),
            tensors=np.diff([*starts, len(events)]).astype(np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatrixColumns:
    """Columns of stored matrices: [parameters, 1] sizes, and [parameters] masks of the axes that shard rows and columns, and of ZeRO's."""

    num_rows: NDArray[np.float64]
    num_columns: NDArray[np.float64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    zero: NDArray[np.int64]

    @classmethod
    def of(cls, parameters: Sequence[ParameterLayout], masks: dict[frozenset[str], int]) -> MatrixColumns:
        """Return the columns of parameters. New groups of axes are added to `masks`."""
        sizes, groups = [], []
        for parameter in parameters:
            sizes.append((float(parameter.num_rows), float(parameter.num_columns)))
            for axes in (parameter.row_axes, parameter.column_axes, shard_axes(parameter.gradient_axes)):
                groups.append(masks.setdefault(axes, len(masks)))
        num_rows, num_columns = np.array(sizes).reshape(-1, 2).T[..., None]
        row, column, zero = np.array(groups, dtype=np.int64).reshape(-1, 3).T
        return cls(num_rows=num_rows, num_columns=num_columns, row=row, column=column, zero=zero)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterProgram:
    """Events of all parameters for one ZeRO stage, as rows; units merge rows of one collective.

    masks: the axes of each mask.
    members [regions]: the parameters that each region reads.
    sums: (region, parameter, mask of the axes) of each gradient that is summed separately before it is scattered.
    bucket_scale: bytes of a gradient as reduced over those as produced, in the parameter's dtype: bucket sizes count the latter.
    happens: (what, times) that have an event.
    waits: whether every micro-batch gathers parameters or reduces gradients.
    keeps_gathered: whether sharded weights stay gathered, and gradients unreduced, for all micro-batches (torch's pipelines).
    is_tied: whether several regions read a trained parameter.
    has_copies: whether a parameter is frozen or has a low-precision copy.
    has_casts: whether a framework casts a parameter in a pass outside of its readers.
    data_axes: axes other than tensor axes that reduce gradients.
    compression: of the gradients that replicas all-reduce.
    """

    zero: int
    parameters: tuple[ParameterLayout, ...]
    events: EventColumns
    units: UnitColumns
    bucket_scale: float
    masks: tuple[frozenset[str], ...]
    matrices: MatrixColumns
    members: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[int, int, int], ...]
    holds_sharded_gradients: bool
    holds_sharded_weights: bool
    frees_gathered: bool
    happens: frozenset[tuple[str, str]]
    waits: bool
    keeps_gathered: bool
    is_tied: bool
    has_copies: bool
    has_casts: bool
    data_axes: frozenset[str]
    compression: Compression = NO_COMPRESSION


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenBytes:
    """Bytes of frozen weights, as they are stored and gathered: `full`, `shard`, `padded` and `tied` of `ParameterCost`. [byte]"""

    full: tuple[Any, ...]
    shard: tuple[Any, ...]
    padded: tuple[Any, ...]
    tied: tuple[Any, Any]

    def map_columns(self, function: Callable[[Any], Any]) -> FrozenBytes:
        """Return a copy with `function` applied to each column."""
        columns: dict[str, Any] = {column.name: tuple(map(function, getattr(self, column.name))) for column in fields(self)}
        return FrozenBytes(**columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CastTimes:
    """Time of the passes that cast weights to fewer bits, by region; a block counts once. [s]

    first              unsharded weights: once a step, at the first micro-batch's forward pass
    forward, backward  weights that every micro-batch gathers: after each all-gather
    update             after the optimizer step, over the updated weights
    """

    first: tuple[Any, ...]
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    update: tuple[Any, ...]

    def map_columns(self, function: Callable[[Any], Any]) -> CastTimes:
        """Return a copy with `function` applied to each column."""
        return CastTimes(**{column.name: tuple(map(function, getattr(self, column.name))) for column in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterCost:
    """Columns of parameters. Elements are of trained parameters.

    time         [WHAT * TIMES * regions, rows] seconds of one occurrence
    full, shard  [regions, rows] elements on a chip, unsharded and sharded by ZeRO; a tied matrix counts in all its regions
    padded       [regions, rows] elements as they are gathered and scattered: all shards, of which the last may be partly empty
    elements     [parameters, rows] on a chip, unsharded
    summed       [regions, rows] elements of the largest gradient that is summed separately, into a copy; None: there is none
    is_reduced   [rows] 1 if data axes reduce gradients, else 0; always 1 on a mesh with a sharding for each operator, whose axes are
                 of both kinds
    tied         [2, rows] elements that count more than once, unsharded and sharded: they are stored once if one stage holds all regions
    frozen       frozen parameters; None: all are trained
    casts        parameters that are multiplied in fewer bits; None: there are none, or their readers do all casts
    compression  of gradients; None: they are not compressed
    """

    time: Array
    full: Array
    shard: Array
    padded: Array
    elements: Array
    summed: Array | None
    is_reduced: Array
    tied: Array
    frozen: FrozenBytes | None = None
    casts: CastTimes | None = None
    compression: CompressionCost | None = None

    def of(self, what: str, times: str) -> Array:
        """Return [regions, rows] seconds of one event."""
        begin = cell(what, times, 0, len(self.full))
        return self.time[begin : begin + len(self.full)]


def side_by_side(costs: Sequence[ParameterCost]) -> ParameterCost:
    """Return the rows of several costs of one program, one after another."""
    first = costs[0]
    if len(costs) == 1:
        return first

    def joined(name: str) -> Array:
        return np.concatenate([getattr(cost, name) for cost in costs], axis=-1)

    def joined_fields(parts: Sequence[Any]) -> dict[str, Any]:
        by_name = {column.name: zip(*(getattr(part, column.name) for part in parts), strict=True) for column in fields(parts[0])}
        return {name: tuple(map(np.concatenate, columns)) for name, columns in by_name.items()}

    return ParameterCost(
        time=joined("time"),
        full=joined("full"),
        shard=joined("shard"),
        padded=joined("padded"),
        elements=joined("elements"),
        summed=None if first.summed is None else joined("summed"),
        is_reduced=joined("is_reduced"),
        tied=joined("tied"),
        frozen=None if first.frozen is None else FrozenBytes(**joined_fields([cost.frozen for cost in costs])),
        casts=None if first.casts is None else CastTimes(**joined_fields([cost.casts for cost in costs])),
        compression=None if first.compression is None else CompressionCost(**joined_fields([cost.compression for cost in costs])),
    )


def cell(what: str, times: str, region: int, num_regions: int) -> int:
    return (WHAT.index(what) * len(TIMES) + TIMES.index(times)) * num_regions + region


def compile_parameters(
    parameters: tuple[ParameterLayout, ...],
    regions: tuple[Region, ...],
    profile: ExecutionProfile,
    *,
    zero: int,
    pipelined: bool,
    parameter_bytes: float,
    gradient_bytes: float,
    shares: Sequence[float] = (),
) -> ParameterProgram:
    """Compile the events of a ZeRO stage, in a pipeline or not. Tied ends belong to the pipeline (`cost/step.py`).

    shares   size of each parameter's unit over the parameter; none: the parameters form the units
    """
    region_names = [region.name for region in regions]
    keeps = pipelined and profile.stages.pipeline_keeps_parameters
    masks: dict[frozenset[str], int] = {frozenset(): 0}
    joins_ends = is_one_end_unit(parameters, zero=zero, pipelined=pipelined)
    members: list[list[int]] = [[] for _ in regions]
    events = []
    for i, parameter in enumerate(parameters):
        for name in parameter.regions:
            members[region_names.index(name)].append(i)
        region = 0 if joins_ends and parameter.is_end else region_names.index(parameter.regions[0])
        parameter_events = profile_events(parameter, profile, zero=zero, pipelined=pipelined, joins_ends=joins_ends)
        scattered = CollectiveKind.REDUCE_SCATTER in [event.kind for event in parameter_events]
        for event in parameter_events:
            what = "reduce" if event.what == "finish" else str(event.what)
            itemsize = parameter_bytes if str(event.dtype) == "parameter" else gradient_bytes
            if parameter.is_frozen:
                itemsize = parameter.itemsize
            elif event.kind is CollectiveKind.ALL_GATHER:
                itemsize = parameter.gathered_bytes or itemsize
            # after the reduce-scatter only the shard remains to be reduced over the other axes
            on_shard = scattered and event.kind is CollectiveKind.ALL_REDUCE and what != "sum"
            key = (what, str(event.times), region, event.kind, masks.setdefault(event.axes, len(masks)))
            unit = (*key, i if shares or what == "sum" or (profile.communication.parameter_unit == "tensor" and what != "reduce") else -1)
            events.append((unit, i, event, itemsize, on_shard))
    events.sort(key=itemgetter(0))
    matrices, data_axes = MatrixColumns.of(parameters, masks), frozenset[str]()
    is_tied = has_copies = has_casts = False
    for parameter in parameters:
        if not parameter.is_frozen:
            data_axes |= parameter.gradient_axes - TENSOR_AXES
            is_tied |= len(parameter.regions) > 1
        has_copies |= parameter.is_frozen or parameter.copy_bytes != 0.0  # negative: one copy replaces the 16-bit weight
        has_casts |= parameter.casts != NO_CASTS
    happens = frozenset([event[0][:2] for event in events])
    holds_sharded_gradients = zero >= 2 and not keeps
    holds_sharded_weights = zero == 3 or (zero == 2 and profile.state.zero2_stores_shards)
    return ParameterProgram(
        zero=zero,
        parameters=parameters,
        events=EventColumns(
            parameter=np.array([e[1] for e in events], dtype=np.int64),
            itemsize=np.array([[e[3]] for e in events]).reshape(-1, 1),
            on_shard=np.array([[e[4]] for e in events], dtype=bool).reshape(-1, 1),
            is_whole=np.array([[zero == 0 or e[2].what == "sum"] for e in events], dtype=bool).reshape(-1, 1),
        ),
        units=UnitColumns.of(events, tuple(masks), len(regions), shares),
        bucket_scale=gradient_bytes / parameter_bytes,
        matrices=matrices,
        masks=tuple(masks),
        members=tuple(map(tuple, members)),
        sums=tuple([(unit[2], i, unit[4]) for unit, i, *_ in events if unit[0] == "sum"]),
        holds_sharded_gradients=holds_sharded_gradients,
        holds_sharded_weights=holds_sharded_weights,
        frees_gathered=zero == 3 and not keeps,
        happens=happens,
        waits=not happens.isdisjoint(_WAITS),
        keeps_gathered=holds_sharded_weights and not holds_sharded_gradients,
        is_tied=is_tied,
        has_copies=has_copies,
        has_casts=has_casts,
        data_axes=data_axes,
        compression=NO_COMPRESSION
        if zero or (word := profile.communication.gradient_compression) == Compressor.NONE
        else compression_of(word),
    )


def parameters_depend_on(grid: LayoutGrid) -> list[Array]:
    """Return the grid columns that determine the cost of parameters, tied ones too: rows that agree in all of them cost the same."""
    columns = [*map(grid.degree.__getitem__, DEFAULT_ORDER[:-1])]
    for tier in grid.inside:
        columns += list(tier.values())
    columns += list(grid.hop)  # placement of the first and last stage, for tied embeddings
    columns.append(np.minimum(grid.degree["pp"], 2.0))
    return columns


def parameter_cost(program: ParameterProgram, profile: ExecutionProfile, machine: Machine, grid: LayoutGrid) -> ParameterCost:
    """Return times and elements on every row of the grid."""
    sizes = np.array([*map(grid.size, program.masks)])
    matrix = program.matrices
    local_rows = np.ceil(matrix.num_rows / sizes[matrix.row])
    local_columns = matrix.num_columns / sizes[matrix.column]
    ways = sizes[matrix.zero]
    shard_elements = stored_rows(local_rows, ways) * local_columns
    gathered = shard_elements * ways
    local = local_rows * local_columns
    time = np.zeros((len(WHAT) * len(TIMES) * len(program.members), sizes.shape[1]))
    compression = None
    matrices = local_rows, local_columns
    if program.compression != NO_COMPRESSION:
        # gradients that are partial over tp too (of norms) are left to the sum over tp
        is_whole = np.array([grid.size(p.gradient_axes & TENSOR_AXES) for p in program.parameters]) == 1.0
        matrices = np.where(is_whole, local_rows, 0.0), local_columns
    if len(program.events.parameter):
        values, buckets = _collective_times(program, profile, machine, grid, sizes, (local, shard_elements, gathered), matrices)
        time = np.zeros((len(time), values.shape[1]))  # there are more columns of machines than of plans
        for row, target in enumerate(program.units.cell):
            time[target] = time[target] + values[row]
        if program.compression != NO_COMPRESSION:
            compression = _compression_cost(program, machine, sizes, matrices, buckets)
    full, shard, padded, tied = _added_up(program, (local, shard_elements, gathered), sizes.shape[1], is_frozen=False)
    summed = np.zeros_like(full) if program.sums else None
    if summed is not None:
        for region, i, of in program.sums:
            summed[region] = np.maximum(summed[region], np.where(sizes[of] > 1.0, local[i], 0.0))
    frozen = None
    if program.has_copies:
        # unsharded weights have low-precision copies in addition; sharded weights are cast layer by layer after the gather
        copies = 0.0 if program.holds_sharded_weights else 1.0
        itemsize = np.array([[p.itemsize if p.is_frozen else copies * p.copy_bytes] for p in program.parameters])
        if profile.state.quantized_rest_float32 and any(p.is_frozen and p.itemsize < 2.0 for p in program.parameters):
            itemsize = np.where(itemsize >= 2.0, np.maximum(itemsize, _FLOAT32), itemsize)
        # these are stored in float32 and gathered as a cast; quantized formats are stored as they are
        wide = (
            profile.state.stores_frozen_float32
            & (itemsize >= 2.0)
            & (itemsize < _FLOAT32)
            & np.array([[p.is_frozen] for p in program.parameters])
        )
        stored = np.where(wide, itemsize * (_FLOAT32 / 2.0), itemsize)
        held = _added_up(program, (local * itemsize, shard_elements * stored, gathered * itemsize), sizes.shape[1])
        frozen = FrozenBytes(full=tuple(held[0]), shard=tuple(held[1]), padded=tuple(held[2]), tied=(held[3][0], held[3][1]))
    is_reduced = np.ones(sizes.shape[1])
    if program.data_axes <= frozenset(MESH_AXES):
        is_reduced = np.broadcast_to(np.minimum(grid.size(program.data_axes) - 1.0, 1.0), is_reduced.shape)
    return ParameterCost(
        time=time,
        full=full,
        shard=shard,
        padded=padded,
        elements=local,
        summed=summed,
        is_reduced=is_reduced,
        tied=tied,
        frozen=frozen,
        casts=_cast_times(program, local, shard_elements, machine) if program.has_casts else None,
        compression=compression,
    )


def _collective_times(
    program: ParameterProgram,
    profile: ExecutionProfile,
    machine: Machine,
    grid: LayoutGrid,
    sizes: Array,
    elements: tuple[Array, Array, Array],
    matrices: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Return [units, rows] times of the collectives of units, with the handling of their buffers [s], and their numbers of buckets.

    sizes      of the groups of axes, by mask
    elements   of each parameter: unsharded, sharded and as gathered
    matrices   rows and columns of each unsharded gradient; no rows: it is not compressed
    """
    events, units = program.events, program.units
    local, shard, gathered = np.stack(elements)[:, events.parameter]
    buffer = np.where(events.on_shard, shard, np.where(events.is_whole, local, gathered))
    plain = buffer * events.itemsize
    totals = [np.add.reduceat(plain, units.starts, axis=0)]
    if program.compression != NO_COMPRESSION:
        rows, columns = (column[events.parameter] for column in matrices)
        compressed = messages(program.compression, plain, rows, columns, events.itemsize)
        totals += [np.add.reduceat(message, units.starts, axis=0) for message in compressed]
    num_tensors = np.repeat(units.tensors[:, None], sizes.shape[1], axis=1)
    for into, of in units.merges:
        same = sizes[units.mask[into]] == sizes[units.mask[of]]
        for total in totals:
            total[into] = total[into] + np.where(same, total[of], 0.0)
            total[of] = np.where(same, 0.0, total[of])
        num_tensors[into] = num_tensors[into] + np.where(same, num_tensors[of], 0.0)
    if units.shares is not None:
        totals, num_tensors = [total * units.shares for total in totals], np.ceil(units.shares)
    num_bytes, sent = totals[0], totals[1:] or totals
    num_calls, num_units = np.ones_like(num_bytes), np.ones_like(num_bytes)
    if profile.communication.bucket_bytes > 0:
        bucketed = units.is_bucketed[:, None]
        bucket = profile.communication.bucket_bytes * program.bucket_scale
        # a tensor is never split: no more buckets than tensors
        num_calls = np.where(bucketed, np.clip(np.ceil(num_bytes / bucket), 1.0, num_tensors), 1.0)
        num_units = np.where(bucketed, np.maximum(np.floor(bucket / np.maximum(num_bytes, 1.0)), 1.0), 1.0)
    size = sizes[units.mask]
    inside = [*np.array([*map(grid.group_inside, program.masks)])[units.mask].swapaxes(0, 1)]
    times = np.zeros_like(num_bytes)
    for message in sent:
        one = collective_time(units.kind[:, None], message * num_units / num_calls, group_size=size, inside=inside, machine=machine)
        times = times + np.where(message > 0.0, one * num_calls / num_units, 0.0)
    if program.holds_sharded_weights:  # the gradients of unsharded weights are reduced in place
        times = times + np.where(num_bytes > 0.0, _handling_time(program, num_bytes, size, machine), 0.0)
    return times if units.shares is None else times / units.shares, num_calls


def _compression_cost(
    program: ParameterProgram, machine: Machine, sizes: Array, matrices: tuple[Array, Array], num_buckets: Array
) -> CompressionCost:
    """Return the cost of the compression of gradients that more than one rank reduces."""
    events, units, num_regions = program.events, program.units, len(program.members)
    rows, columns = (column[events.parameter] for column in matrices)
    of, itemsize = program.compression, events.itemsize
    values = (
        passes_time(of, rows, columns, itemsize, machine),
        *(count(of, rows, columns, itemsize) for count in (kept_bytes, copied_bytes)),
    )
    time, kept, copy, most = np.zeros((4, num_regions, sizes.shape[1]))
    is_reduced = np.minimum(sizes[units.mask] - 1.0, 1.0)
    of_units = [np.add.reduceat(value, units.starts, axis=0) * is_reduced for value in values]
    for unit, target in enumerate(units.cell):
        region = target % num_regions
        time[region] = time[region] + of_units[0][unit]
        kept[region] = kept[region] + of_units[1][unit]
        copy[region] = copy[region] + of_units[2][unit]
        most[region] = np.maximum(most[region], num_buckets[unit])
    return CompressionCost(time=tuple(time), kept=tuple(kept), copy=tuple(copy / np.maximum(most, 1.0)))


def _cast_times(program: ParameterProgram, local: Array, shard: Array, machine: Machine) -> CastTimes:
    """Return the time of passes over memory that cast weights. Copies live as long as the weight that they are made of.

    t = V (c / B),   c of `WeightCasts`

    V   elements of the weight on this chip, unsharded; for `update` those that this chip updates     [-]
    c   all_copies: once a step for an unsharded weight, and after the last gather of each micro-batch for a sharded one, as its copy in the
        other order may be freed; one_copy: after a gather that is followed by another before backward
    B   memory bandwidth                                                                              [byte/s]

    Source: TransformerEngine, `pytorch/module/linear.py`: a cast weight is kept for the micro-batches after the first
    (`is_first_microbatch`). Under FSDP2 it is not (`cache_name`, `columnwise_usage`), but cast in both orders in backward.
    """
    gathers, again = (("gather_" + when, "microbatch") in program.happens for when in ("forward", "backward"))
    casts = [parameter.casts for parameter in program.parameters]
    updated = shard if program.zero else local
    bytes_of = {
        "first": [0.0 if gathers else cast.all_copies for cast in casts],
        "forward": [cast.one_copy if again else cast.all_copies if gathers else 0.0 for cast in casts],
        "backward": [cast.all_copies if again else 0.0 for cast in casts],
        "update": [cast.update for cast in casts],
    }
    times: dict[str, tuple[Array, ...]] = {}
    for name, num_bytes in bytes_of.items():
        elements = updated if name == "update" else local
        regions = [np.zeros(local.shape[1]) for _ in program.members]
        for region, members in enumerate(program.members):
            for i in members:
                regions[region] = regions[region] + elements[i] * (num_bytes[i] / machine.memory.bandwidth)
        times[name] = tuple(regions)
    return CastTimes(**times)


def _added_up(
    program: ParameterProgram, values: tuple[Array, Array, Array], num_rows: int, *, is_frozen: bool | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return sums by region: unsharded, sharded, padded; and the elements that count more than once.

    is_frozen   False: trained parameters; True: frozen ones; None: all
    """
    local, cut, gathered = values
    full, shard, padded = np.zeros((3, len(program.members), num_rows))
    for region, members in enumerate(program.members):
        for i in members:
            if is_frozen in (None, program.parameters[i].is_frozen):
                full[region] = full[region] + local[i]
                shard[region] = shard[region] + cut[i]
                padded[region] = padded[region] + gathered[i]
    tied = np.zeros((2, num_rows))
    for i, parameter in enumerate(program.parameters):
        more = len(parameter.regions) - 1
        if more and is_frozen in (None, parameter.is_frozen):
            tied[0] = tied[0] + more * local[i]
            tied[1] = tied[1] + more * cut[i]
    return full, shard, padded, tied


def _handling_time(program: ParameterProgram, num_bytes: Array, group_size: Array, machine: Machine) -> Any:
    """Return the overhead of a unit's collective: host time of its bookkeeping, and packing and unpacking of its buffer. [s]"""
    host = machine.host.times
    is_gather = (program.units.kind == COLLECTIVE_CODE[CollectiveKind.ALL_GATHER])[:, None]
    once = np.where(is_gather, host.get("gather_unit", 0.0), host.get("reduce_unit", 0.0))
    per_byte = np.where(is_gather, host.get("gather_mebibyte", 0.0), host.get("reduce_mebibyte", 0.0)) / MEBIBYTE
    return np.minimum(group_size - 1.0, 1.0) * (once + num_bytes * per_byte)
