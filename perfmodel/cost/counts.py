"""Counts of one rank in one step: FLOPs by operator, collectives by kind and axes, bytes held.

`cost/evaluate.py` and `cost/parameters.py` turn the same rows into seconds. Here they are counted for one rank of a plan, as this
package's executor runs them, so that an audit can compare them with the operations that torch issues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import TypeAlias

import numpy as np

from perfmodel.cost.compression import messages
from perfmodel.cost.estimate import Estimator, memory_on_rank
from perfmodel.cost.evaluate import amount_values
from perfmodel.cost.program import PHASES, Program, compile_program
from perfmodel.cost.programs import Compiled
from perfmodel.cost.schedules import schedule_of
from perfmodel.cost.stages import inner_regions, rank_runs, runs_of_stages
from perfmodel.cost.step import recomputed_phases
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import itemsize
from perfmodel.frameworks.profile import ExecutionProfile, load_profile, profile_events
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.parallel.algebra.derive import ParameterLayout
from perfmodel.parallel.algebra.parameters import ParameterEvent, is_one_end_unit, shard_axes
from perfmodel.parallel.algebra.sharding import COMM, TENSOR_AXES
from perfmodel.parallel.choices import AttentionKernel, Dispatcher, Recompute
from perfmodel.parallel.compression import NO_COMPRESSION, Compression
from perfmodel.parallel.folded_mesh import FoldedMesh, expert_rank, folded_mesh
from perfmodel.parallel.grid import LayoutGrid, make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER, Placement
from perfmodel.parallel.pass_orders import FORWARD, MOST_GATHERED, gathers_of
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Operand, Operator, Region
from perfmodel.workload.job import PrecisionPolicy
from perfmodel.workload.routing import Once, RankRows, RoutingCounts
from perfmodel.workload.work import Data

#: Profile of the executor: fully_shard, DTensor and torch's pipelines, with the memory of one rank on any device.
EXECUTOR_PROFILE = "torch-gloo"
_KIND_OF_CODE = {code: str(kind) for kind, code in COLLECTIVE_CODE.items()}
#: Dims of attention by their names in rule sets, and the dim of the keys that a chunk of the sequence attends to.
_NEXT_TO_NOTHING = 1e-12
_QUERIES, _KEYS, _SEEN = "s_query", "s_key", "keys seen"

Shape: TypeAlias = tuple[int | str, ...]
ATTENTION: tuple[Shape, Shape] = (("attention",), ("attention.grad",))


def product_shape(batch: float, m: float, n: float, k: float) -> Shape:
    """Return one key for a product and for its two gradients, which have its dims in another order."""
    return (round(batch), *sorted((round(m), round(n), round(k)), reverse=True))


def kernel_shape(kind: str, *, is_backward: bool) -> Shape:
    """Return one key for all products of a kernel that computes several."""
    return (f"{kind}.grad" if is_backward else kind,)


@dataclass(slots=True)
class RankCounts:
    """Counts of one rank in one step.

    flops        by shape of the product, so that torch's products match the operators that issue them: (batch, and the other three
                 dims from the largest); fused attention forward and backward under ("attention",) and ("attention.grad",), and
                 other kernels of several products by their kind
    operators    names of the operators of each shape (predicted counts only)
    collectives  (kind, axes joined by +) -> (number, their full-buffer bytes); sends and receives have axis pp
    parameters   weights between steps, as the operators read them or (ZeRO-2 and 3) as the optimizer updates them          [byte]
    gradients    as the optimizer reads them                                                                                [byte]
    optimizer    its state, and the master copy if that is stored in addition to the weights                                [byte]
    saved        saved activations: tensors created since the step began that are live when its first backward begins, with the buffers
                 of gathers in flight                                                                                       [byte]
    peak         largest sum of live storages in a step, without allocator and context                                      [byte]
    peak_moment, peak_by_class   moment of the peak and its composition (predicted counts only)                             [byte]
    """

    flops: dict[Shape, float] = field(default_factory=dict)
    operators: dict[Shape, tuple[str, ...]] = field(default_factory=dict)
    collectives: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    saved: float = 0.0
    peak: float = 0.0
    peak_moment: str = ""
    peak_by_class: dict[str, float] = field(default_factory=dict)

    def add_flops(self, shape: Shape, flops: float, operator: str = "") -> None:
        """Add FLOPs to a shape, and the name of the operator behind it."""
        if not flops:
            return
        self.flops[shape] = self.flops.get(shape, 0.0) + flops
        names = self.operators.get(shape, ())
        if operator and operator not in names:
            self.operators[shape] = (*names, operator)

    def add_collective(self, kind: str, axes: str, count: int, num_bytes: float) -> None:
        """Add collectives. num_bytes: of all `count` together. An empty `axes` is a group of one rank: no collective."""
        if axes and count:
            before = self.collectives.get((kind, axes), (0, 0.0))
            self.collectives[kind, axes] = before[0] + count, before[1] + num_bytes


def executor_profile(policy: PrecisionPolicy, compression: Compression = NO_COMPRESSION) -> ExecutionProfile:
    """Return the executor's profile; gradients are accumulated and reduced in the dtype of the precision policy."""
    profile = load_profile(EXECUTOR_PROFILE)
    dtype = "fp32" if itemsize(policy.gradient_reduce) == 4 else "compute"
    return profile.having(accumulate_dtype=dtype, reduce_dtype=dtype, gradient_compression=str(compression))


def predicted_counts(estimator: Estimator, plan: Plan, coordinates: Mapping[str, int], routing: RoutingCounts | None = None) -> RankCounts:
    """Return the counts of the rank at `coordinates` (its index on each axis). routing: token counts; None: even routing."""
    received: tuple[int, ...] = ()
    if routing is not None:
        rank = expert_rank(plan, coordinates)
        received, rows = routing.received(rank), _routed_rows(plan, routing, rank)
        estimator = replace(estimator, programs=replace(estimator.programs, rank_rows=rows, compiled=Compiled()))
    program = estimator.programs.program_of(plan)
    grid = make_grid(
        {axis: [plan.layout.degree(axis)] for axis in DEFAULT_ORDER},
        [plan.order],
        tier_sizes=estimator.machine.tier_sizes,
        num_key_value_heads=plan.job.transformer.num_key_value_heads,
        folding=[plan.folding],
    )
    counts = RankCounts()
    runs = rank_runs(program.regions, plan.stage_layers, plan.layout.pp, coordinates["pp"], plan.schedule.placement)
    again = recomputed_phases(plan.recompute, estimator.profile)
    times = [  # of each segment of the program on this pipeline rank in a step
        plan.num_microbatches * int(number) * (2 if region.is_block and phase in again else 1)
        for number, region in zip(runs, program.regions, strict=True)
        for phase in PHASES
    ]
    values, _ = amount_values(program.rows.amounts, grid, np.array([float(plan.micro_batch)]), float(plan.job.seq_len))
    amount = values[:, 0]
    _count_flops(counts, program, plan, coordinates, amount, times, [number * plan.etp for number in received])
    mesh = folded_mesh(plan)
    _count_exchanges(counts, program, plan, mesh, coordinates["pp"], amount, times)
    _Parameters(estimator.profile, plan, mesh, mesh.fine_indices(coordinates), program.parameters, program.regions, grid).count(counts)
    for_chunk = _with_keys_seen(estimator, plan, coordinates["cp"])
    saved, counts.peak_moment, counts.peak_by_class = memory_on_rank(for_chunk, plan, coordinates["pp"])
    counts.saved += saved
    counts.peak = sum(counts.peak_by_class.values())
    return counts


def _routed_rows(plan: Plan, routing: RoutingCounts, rank: int) -> RankRows:
    """Return the rows of a rank's experts over the mean, and with FLEX the tokens that it sends and receives, once to each rank."""
    mean, received = sum(map(sum, routing.rows)) / len(routing.rows), sum(routing.received(rank))
    # a rank that receives no tokens must not make dims of size 0 elsewhere
    rows = RankRows(computed=received / mean or _NEXT_TO_NOTHING)
    experts = plan.job.transformer.parts.experts
    if plan.dispatcher is not Dispatcher.FLEX or plan.ep == 1 or experts is None:
        return rows
    travel = routing.tokens_to_ranks(experts.top_k)
    # weights arrive in every forward pass, their gradients in backward; recomputation stops before the last operator that reads them
    forward = 2 if plan.recompute is Recompute.FULL else 1
    arriving = (forward * received / mean + 1.0) / (forward + 1)
    once = Once(sent=float(travel[rank].sum()) / mean, received=float(travel[:, rank].sum()) / mean, weights=arriving)
    return replace(rows, once=once)


def _with_keys_seen(estimator: Estimator, plan: Plan, chunk: int) -> Estimator:
    """Return the estimator for one chunk of a sequence. Attention reads no later keys, so scores have fewer columns.

    Keys and values themselves stay in the gathered tensors, except for copies of a part of them. A batched product copies its inputs of
    several sequences and heads, to join them.
    """
    is_part = chunk + 1 < plan.layout.cp and plan.rules.cuts_queries
    model = plan.job.transformer
    is_unfused, is_grouped = plan.attention is AttentionKernel.UNFUSED, model.num_attention_heads > model.num_key_value_heads
    joins = is_unfused and plan.micro_batch > 1 and model.num_attention_heads > plan.layout.tp
    if not (is_part or joins):
        return estimator
    kept = estimator.programs.program_of(plan).derivation
    size = plan.job.seq_len * (chunk + 1) // plan.layout.cp if is_part else plan.job.seq_len
    copies = _Copies(
        queries=joins,
        # every framework copies all keys if each query head needs its own
        keys=(joins or (is_unfused and is_grouped)) if is_part else (joins and not is_grouped),
        # inputs of a recomputed function are kept as they were passed
        inputs=plan.recompute is Recompute.SELECTIVE,
    )
    operators = tuple(_seeing(op, size, plan.job.seq_len / size, copies) for op in kept.graph.operators)
    tensors = dict(kept.graph.tensors)
    for op in operators:
        if _SEEN in op.output.dims:
            tensor = tensors[op.output.tensor]
            shape = (op.dims[_SEEN] if dim == _SEEN else size for size, dim in zip(tensor.shape, op.output.dims, strict=True))
            tensors[op.output.tensor] = replace(tensor, shape=tuple(shape))
    program = compile_program(
        replace(kept, graph=replace(kept.graph, operators=operators, tensors=tensors)),
        estimator.profile,
        recompute_operators=plan.recompute_operators,
        attention_kernel=str(plan.attention),
        splits_backward=plan.schedule.splits_backward,
    )
    return replace(estimator, programs=estimator.programs.having(plan, program))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Copies that attention makes and saves of queries, keys and values. inputs: its inputs are saved too."""

    queries: bool
    keys: bool
    inputs: bool


def _seeing(op: Operator, keys: int, share: float, copies: _Copies) -> Operator:
    """Return the operator with `keys` keys. share: keys of its inputs over `keys`."""
    queries, key_dims = ({dim for dim in op.dims if op.logical_name(dim) == name} for name in (_QUERIES, _KEYS))
    if not key_dims:
        return op

    def is_part(dims: Iterable[str]) -> bool:
        return not key_dims.isdisjoint(dims) and queries.isdisjoint(dims)

    def seen(operand: Operand) -> Operand:
        return replace(operand, dims=tuple(_SEEN if dim in key_dims else dim for dim in operand.dims))

    def held(data: Data) -> tuple[Data, ...]:
        seen = replace(data, extent=tuple((keys, _SEEN) if dim in key_dims else (size, dim) for size, dim in data.extent))
        if data.of is None or data.of == len(op.inputs):
            return (seen,)
        dims = op.operands[data.of].dims
        if not (copies.keys if is_part(dims) else copies.queries and key_dims.isdisjoint(dims)):
            return (seen,)
        return (seen,) * copies.inputs + (replace(seen, of=None),)

    return replace(
        op,
        dims={**op.dims, _SEEN: keys},
        inputs=tuple(seen(operand) for operand in op.inputs),
        output=seen(op.output),
        saved=tuple(data for entry in op.saved for data in held(entry)),
        scratch=tuple(data for entry in op.scratch for data in held(entry)),
        parts={operand.tensor: share for operand in op.inputs if is_part(operand.dims)} if share > 1.0 else {},
    )


def _count_flops(
    counts: RankCounts,
    program: Program,
    plan: Plan,
    coordinates: Mapping[str, int],
    amount: np.ndarray,
    times: Sequence[int],
    received: Sequence[int],
) -> None:
    """Count matrix products. Attention counts the square of its queries and the given keys.

    received   rows of each of the rank's experts, which run one by one; none: equal rows, run together
    """
    seen = (coordinates["cp"] + 1) / plan.layout.cp if plan.rules.cuts_queries else 1.0  # contiguous chunks: later keys are never read
    # products of unfused attention: their work depends on the position of the rank's queries in the sequence
    products = {op.name: op for op in program.derivation.graph.operators if op.is_product}
    both = (program.rows.matmul, program.rows.grouped)
    for rows, row in ((kind, row) for kind in both for row in range(len(kind.names))):
        columns, name = rows.columns, rows.names[row]
        repeats = times[rows.segments[row]]
        batch, m, n, k = (float(amount[columns[dim][row]]) for dim in ("batch", "m", "n", "k"))
        is_backward = PHASES[rows.segments[row] % len(PHASES)] == "backward"
        producer = products[name.rpartition(".grad")[0] if is_backward else name]
        operator = producer.name_in_layer
        if len(producer.forward) > 1:  # a kernel of several products
            counts.add_flops(kernel_shape(producer.kind, is_backward=is_backward), 2.0 * batch * m * n * k * repeats, operator)
            continue
        dims = [m, n, k]
        if received and rows is program.rows.grouped:
            mean = max(sum(received), _NEXT_TO_NOTHING) / len(received)
            i = min(range(3), key=lambda i: abs(dims[i] / mean - 1.0))  # the dim with the experts' mean rows
            for number in received:
                dims[i] = float(number)
                counts.add_flops(product_shape(1, *dims), 2.0 * prod(dims) * repeats, operator)
            continue
        if seen < 1.0 and _KEYS in producer.roles.logical.values():
            dims[dims.index(float(plan.job.seq_len))] *= seen
            m, n, k = dims
        counts.add_flops(product_shape(batch, m, n, k), 2.0 * batch * m * n * k * repeats, operator)
    attention = program.rows.attention
    columns = attention.columns
    for row, segment in enumerate(attention.segments):
        square = np.prod([amount[columns[name][row]] for name in ("batch", "heads", "queries", "keys")])
        width, value = columns["head_dim"][row], columns["value_head_dim"][row]
        # forward scores and context; backward scores again, gradients of queries and keys, of weights and values
        products = 6.0 * width + 4.0 * value if columns["backward"][row] else 2.0 * (width + value)
        repeats = times[segment]
        counts.add_flops(ATTENTION[int(columns["backward"][row])], float(products * square * seen * repeats), attention.names[row])


def _count_exchanges(
    counts: RankCounts, program: Program, plan: Plan, mesh: FoldedMesh, rank: int, amount: np.ndarray, times: Sequence[int]
) -> None:
    """Count the collectives of activations, and the sends of micro-batches of a pipeline rank.

    At every boundary of a virtual stage there is one send forward and one, of the gradient, backward.
    """
    columns = program.rows.traffic.columns
    for row, cell in enumerate(program.rows.traffic.segments):
        repeats = times[cell // len(COMM)]
        kind = _KIND_OF_CODE[int(columns["kind"][row])]
        axes = mesh.name(program.rows.amounts.masks[columns["group"][row]], kind)
        # shares of rows may be no binary fractions
        counts.add_collective(kind, axes, repeats, float(np.rint(repeats * amount[columns["amount"][row]])))
    if plan.layout.pp == 1:
        return
    held, last = plan.stages_of_rank(rank), plan.layout.pp * plan.virtual_stages - 1
    boundaries = sum(0 <= k <= last and k not in held for stage in held for k in (stage - 1, stage + 1)) * plan.num_microbatches
    for kind in ("send", "recv"):
        counts.add_collective(kind, "pp", boundaries, boundaries * float(amount[program.boundary[0]]))


# ------------------------------------------------------------------------------------------------------------ parameters


@dataclass(frozen=True, slots=True)
class _Unit:
    """Parameters that one collective gathers, and the number of such units on the rank.

    gathers       of all of them together in a step, and those in flight at the first backward pass, where weights stay gathered
    ways, index   number of ZeRO shards, and the index of this rank's shard
    """

    members: tuple[ParameterLayout, ...]
    number: int
    gathers: tuple[int, int]
    ways: int
    index: int
    is_tied: bool = False


@dataclass(slots=True)
class _Parameters:
    """Collectives and bytes of the parameters on one rank.

    ZeRO stages 0 and 1 lay a unit out flat, padded as one piece. Stages 2 and 3 pad the rows of each tensor (torch's fully_shard).
    """

    profile: ExecutionProfile
    plan: Plan
    mesh: FoldedMesh
    coordinates: Mapping[str, int]
    parameters: tuple[ParameterLayout, ...]
    regions: tuple[Region, ...]
    grid: LayoutGrid

    def _size(self, axes: frozenset[str]) -> int:
        return int(self.grid.size(axes)[0])

    def _unit(self, members: Sequence[ParameterLayout], number: int, gathers: tuple[int, int], *, is_tied: bool = False) -> list[_Unit]:
        """Return units of parameters that are gathered together, one for each ZeRO sharding: experts are on fewer ranks."""
        together: dict[frozenset[str], list[ParameterLayout]] = {}
        for parameter in members:
            axes = frozenset(axis for axis in parameter.gradient_axes - TENSOR_AXES if self.mesh.sizes[axis] > 1)
            together.setdefault(axes, []).append(parameter)
        units = []
        for group in together.values():
            cut = shard_axes(group[0].gradient_axes) if self.plan.zero else frozenset()
            ways, index = 1, 0
            for mesh_axis in sorted(("dp_shard", "cp"), key=self.plan.order.index):  # shards in the order of the ranks
                for axis in reversed(self.mesh.parts[mesh_axis]):
                    if axis in cut:
                        index += self.coordinates[axis] * ways
                        ways *= self.mesh.sizes[axis]
            units.append(_Unit(tuple(group), number, gathers, ways, index, is_tied))
        return units

    def _local(self, parameter: ParameterLayout) -> tuple[int, int]:
        """Return rows and columns after tensor parallelism."""
        return ceil(parameter.num_rows / self._size(parameter.row_axes)), parameter.num_columns // self._size(parameter.column_axes)

    def _elements(self, parameter: ParameterLayout) -> int:
        rows, columns = self._local(parameter)
        return rows * columns

    def _own_shard(self, parameter: ParameterLayout, unit: _Unit) -> int:
        """Return the elements of this rank's shard: the last shards may be short or empty."""
        rows, columns = self._local(parameter)
        rows_of_shard = ceil(rows / unit.ways)
        return max(0, min(rows_of_shard, rows - unit.index * rows_of_shard)) * columns

    def _is_partial(self, parameter: ParameterLayout) -> bool:
        """Return whether the gradient is partial over tp after a micro-batch."""
        return self._size(parameter.gradient_axes & TENSOR_AXES) > 1

    def _units(self) -> list[_Unit]:
        p, rank, flat = self.plan.layout.pp, self.coordinates["pp"], self.plan.zero < 2
        stages = self.plan.stages_of_rank(rank)
        runs = runs_of_stages(self.regions, self.plan.stage_layers)[list(stages)]
        times = [(1, 0)] * len(stages)  # that each virtual stage is gathered, and gathers in flight
        if len(stages) > MOST_GATHERED:
            order = schedule_of(self.plan.schedule).order(rank, p, self.plan.num_microbatches, len(stages))
            gathers = gathers_of(order)
            all_gathers = Counter(gather.chunk for gather in gathers)
            in_flight = {gather.chunk for gather in gathers if gather.issued.keys() <= {FORWARD} < gather.needed.keys()}
            times = [(all_gathers[chunk], int(chunk in in_flight)) for chunk in range(len(stages))]
        inner = inner_regions(self.regions)
        units: list[_Unit] = []
        groups = []
        for i, region in enumerate(self.regions):
            members = [q for q in self.parameters if region.name in q.regions]
            number, (gathered, waiting) = int(runs[:, i].sum()), (runs[:, i] @ times).tolist()
            if i in inner:
                units += self._unit(members, number, (gathered, waiting))
            elif number:
                groups.append((members, (gathered, waiting)))
        taken: set[str] = set()
        if self._joins_ends:
            groups = [([q for group, _ in groups for q in group], (1, 0))]
        for group, sums in groups:
            members = [q for q in group if q.name not in taken]
            taken.update(q.name for q in members)
            # in a V both ends are on one rank
            across = [q for q in members if len(q.regions) > 1] if p > 1 and self.plan.schedule.placement is not Placement.V else []
            if across and flat:
                units += [unit for q in across for unit in self._unit([q], 1, sums, is_tied=True)]
                members = [q for q in members if q not in across]
            if members:
                is_tied = bool(across) and not flat
                units += self._unit(list(dict.fromkeys(members)), 1, sums, is_tied=is_tied)
        return units

    @property
    def _joins_ends(self) -> bool:
        return is_one_end_unit(self.parameters, zero=int(self.plan.zero), pipelined=self.plan.layout.pp > 1)

    def _name(self, event: ParameterEvent, *, without: frozenset[str] = frozenset()) -> str:
        return "pp" if event.what == "tied" else self.mesh.name(event.axes - without, str(event.kind))

    def count(self, counts: RankCounts) -> None:
        policy, optimizer = self.plan.job.policy, self.plan.job.optimizer
        weight, reduced = itemsize(policy.parameter), itemsize(policy.gradient_reduce)
        master = itemsize(policy.master)
        state = policy.state_bytes_per_parameter(optimizer)
        units = self._units()
        for unit in units:
            if self.plan.zero >= 2:
                shard = sum(self._own_shard(q, unit) for q in unit.members) * unit.number
                counts.parameters += shard * master
                counts.gradients += shard * master
                counts.optimizer += shard * (state - (master if policy.has_master_copy else 0.0))
            else:
                flat = self._flat(unit)
                counts.parameters += flat * unit.number * weight
                counts.gradients += flat * unit.number * reduced
                counts.optimizer += flat // unit.ways * unit.number * state
            self._count_unit(counts, unit, weight, reduced)
            for parameter in unit.members if unit.is_tied else ():
                if len(parameter.regions) > 1:
                    size = self._own_shard(parameter, unit) * master if self.plan.zero >= 2 else self._flat(unit) // unit.ways * reduced
                    counts.add_collective("all_reduce", "pp", 1, size)
        if self.plan.zero < 2 and self.plan.layout.tp > 1:
            self._count_partial(counts, units, reduced)

    def _flat(self, unit: _Unit) -> int:
        return ceil(sum(self._elements(q) for q in unit.members) / unit.ways) * unit.ways

    def _count_unit(self, counts: RankCounts, unit: _Unit, weight: float, reduced: float) -> None:
        """Count one collective over the data axes for each event that members of the unit share. Sums over tp are one for each member."""
        calls: dict[tuple[str, str, str], float] = {}
        number: dict[tuple[str, str, str], int] = {}
        for parameter in unit.members:
            events = profile_events(
                parameter, self.profile, zero=int(self.plan.zero), pipelined=self.plan.layout.pp > 1, joins_ends=self._joins_ends
            )
            scattered = any(event.kind is CollectiveKind.REDUCE_SCATTER for event in events)
            for event in events:
                if event.times == "microbatch":
                    times = unit.number * self.plan.num_microbatches
                else:
                    times = unit.gathers[0] if event.what.startswith("gather") else unit.number
                itemsize_ = weight if event.dtype == "parameter" else reduced
                if event.what == "sum":
                    if not self._is_partial(parameter):
                        continue
                    num_bytes = times * self._elements(parameter) * itemsize_
                    counts.add_collective(str(event.kind), self._name(event), times, num_bytes)
                    continue
                axes = self._name(event, without=TENSOR_AXES)
                key = (str(event.kind), axes, str(event.what))
                number[key] = times
                if self.plan.zero < 2:
                    elements = self._flat(unit) // (unit.ways if scattered and event.kind is CollectiveKind.ALL_REDUCE else 1)
                    calls[key] = elements * itemsize_
                    continue
                rows, columns = self._local(parameter)
                elements = ceil(rows / unit.ways) * columns * (1 if event.kind is CollectiveKind.ALL_REDUCE else unit.ways)
                calls[key] = calls.get(key, 0.0) + elements * itemsize_
        for key, num_bytes in calls.items():
            sent = [num_bytes]
            if key[1] and self.plan.compression != NO_COMPRESSION:
                sent = self._compressed(counts, unit, number[key], reduced)
            counts.add_collective(key[0], key[1], number[key] * len(sent), number[key] * sum(sent))
            if key[2].startswith("gather"):
                counts.saved += unit.gathers[1] * num_bytes

    def _compressed(self, counts: RankCounts, unit: _Unit, times: int, itemsize: float) -> list[float]:
        """Return the bytes of each message of a unit's compressed gradients, and count the products of its factors."""
        of = self.plan.compression
        shapes = [(self._elements(q), 1) if self._is_partial(q) else self._local(q) for q in unit.members]
        rows, columns = np.array(shapes, dtype=np.float64).T
        for a, c, rank in zip(rows, columns, of.factor_rank(rows, columns), strict=True):
            counts.add_flops(product_shape(1, a, c, rank), 6.0 * a * c * rank * times, "powersgd")
        return [float(message.sum()) for message in messages(of, rows * columns * itemsize, rows, columns, np.array(itemsize))]

    def _count_partial(self, counts: RankCounts, units: list[_Unit], reduced: float) -> None:
        """Count gradients in flat buffers that are partial over tp (norms under sequence parallelism): reduced together, once a step.

        Only the part in the rank's shard counts: partial gradients are last in their unit.
        """
        together = 0
        for unit in units:
            end = sum(self._elements(q) for q in unit.members)
            start = end - sum(self._elements(q) for q in unit.members if self._is_partial(q))
            piece = self._flat(unit) // unit.ways
            first, last = max(start, unit.index * piece), min(end, (unit.index + 1) * piece)
            together += max(0, last - first) * unit.number
        counts.add_collective("all_reduce", "tp", int(together > 0), together * reduced)
