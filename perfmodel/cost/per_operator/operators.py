"""Cost of an operator of a network under many configurations at once.

Operators compile to rows (`cost/rows.py`) on columns, as a plan does. Here each dim is sharded by an axis of its own name, and the columns
are the parts of the dims in each configuration. Sets of mesh axes are also bit masks (bit i is axis i of the mesh, outermost first).

    time of a step = work + own collectives + redistributions of activations + exposed parameter collectives + optimizer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.evaluate import amount_values, members_inside, redistribution_time, row_times, summed
from perfmodel.cost.machine import Machine
from perfmodel.cost.rows import RowCompiler, Rows, TimedRows, plain_rows
from perfmodel.cost.update import Bytes, element_bytes
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.errors import bad_field, shown
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import extent_amount
from perfmodel.parallel.algebra.sharding import Sharding
from perfmodel.parallel.choices import ZERO_STAGES
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.per_operator.mesh import MeshAxis, axes_mask
from perfmodel.workload.config import MAX_SIZE
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.job import Optimizer, PrecisionPolicy
from perfmodel.workload.work import Data

Array = NDArray[np.float64]
Masks = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """Training setting of a network, independent of the plan.

    zero               ZeRO stage: tensors that are sharded over the axes on which a parameter's gradient is partial (1 optimizer state,
                       2 gradients too, 3 weights too)
    num_microbatches   of a step; the network's batch is that of one
    attention          the calibrated kernel of fused attention
    """

    policy: PrecisionPolicy
    optimizer: Optimizer
    profile: ExecutionProfile
    zero: int = 0
    num_microbatches: int = 1
    attention: str = "flash"

    def __post_init__(self) -> None:
        if self.zero not in ZERO_STAGES:
            raise bad_field("zero", self.zero, "is no stage of ZeRO", "use 0, 1, 2 or 3")
        count = self.num_microbatches
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_SIZE:
            raise bad_field("num_microbatches", shown(count), f"must be a whole number from 1 to {MAX_SIZE}", "use 1")

    @property
    def activation_bytes(self) -> float:
        return float(itemsize(self.policy.compute))

    @cached_property
    def sizes(self) -> Bytes:
        """Bytes of an element of each copy of weights and gradients."""
        return element_bytes(self.policy, self.optimizer, self.profile)

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded and gathered each micro-batch."""
        return self.zero == 3 or (self.zero == 2 and self.profile.state.zero2_stores_shards)

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients are reduced each micro-batch instead of once a step."""
        return self.zero >= 2 and self.profile.communication.reduces_each_microbatch


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshPrices:
    """Times of collectives on a mesh: every set of its axes is a group on the machine."""

    axes: tuple[MeshAxis, ...]
    machine: Machine

    @cached_property
    def size(self) -> Array:
        """Ranks of each set of axes, by its mask."""
        return self._products(range(len(self.axes)))

    @cached_property
    def inside(self) -> list[Array]:
        """Ranks of each set inside one domain of each tier, innermost first."""
        return [
            self._products([i for i, axis in enumerate(self.axes) if axis.tier <= tier]) for tier in range(len(self.machine.tier_sizes))
        ]

    def _products(self, members: Sequence[int] | range) -> Array:
        sizes = np.ones(1 << len(self.axes))
        masks = np.arange(len(sizes))
        for i in members:
            sizes = sizes * np.where(masks >> i & 1, float(self.axes[i].size), 1.0)
        return sizes

    def mask(self, names: frozenset[str] | tuple[str, ...]) -> int:
        return axes_mask(self.axes, names)

    def time(self, kind: CollectiveKind, groups: Masks, num_bytes: Array) -> Array:
        """Return the time of one collective of each group alone, with the host's overhead. [s]"""
        size = self.size[groups]
        time = collective_time(
            kind, num_bytes, group_size=size, inside=[inside[groups] for inside in self.inside], machine=self.machine
        ) + redistribution_time(num_bytes, size, self.machine)
        return np.asarray(np.where(size > 1, time, 0.0))

    def table(self, kind: CollectiveKind, total_bytes: float) -> Array:
        """Return [groups, remaining]: time if the axes `remaining` shard a tensor of `total_bytes` bytes. [s]"""
        key = (kind, total_bytes)
        if key not in self._tables:
            count = len(self.size)
            groups = np.repeat(np.arange(count), count)
            num_bytes = np.tile(total_bytes / self.size, count)
            self._tables[key] = self.time(kind, groups, num_bytes).reshape(count, count)
        return self._tables[key]

    _tables: dict[tuple[CollectiveKind, float], Array] = field(default_factory=dict)


#: Segments of an operator's rows.
_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorRows:
    """Rows of operators. timed: segments forward and backward, own traffic in one segment; saved: amounts saved for backward."""

    timed: TimedRows
    saved: Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorCost:
    """Columns: work of each pass and own collectives [s], bytes saved for backward."""

    forward: Array
    backward: Array
    collectives: Array
    saved_bytes: Array


def compile_operators(network: Graph, operators: Iterable[tuple[Operator, Sharding, Iterable[Data]]], setting: StepSetting) -> OperatorRows:
    """Return the rows of operators under their shardings, each with the data that counts as saved."""
    compiler = RowCompiler(network, setting.profile, setting.activation_bytes)
    kept: list[tuple[int, str, dict[str, int]]] = []
    for operator, sharding, saved in operators:
        for segment, works in ((_FORWARD, operator.forward), (_BACKWARD, operator.backward)):
            for work in works:
                compiler.work(operator, sharding, work, segment=segment, name=operator.name, is_backward=segment == _BACKWARD)
        for position in adding_places(network, operator):
            compiler.added_gradient(operator, sharding, position, segment=_BACKWARD)
        for traffic in operator.traffic:
            axes = frozenset(axis for dim in traffic.over for axis in sharding.get(dim, ()))
            if axes:
                amount = extent_amount(operator, sharding, traffic.extent, scale=traffic.itemsize or setting.activation_bytes)
                compiler.collective(traffic.kind, axes, amount, segment=0, name=operator.name, repeats=traffic.repeats)
        amounts = [compiler.amount(compiler.data_amount(operator, sharding, data)) for data in saved]
        kept += [(0, operator.name, {"amount": amount}) for amount in amounts]
    timed = compiler.rows(attention_kernel=setting.attention, num_segments=2, num_traffic_segments=1)
    return OperatorRows(timed=timed, saved=plain_rows(kept, ("amount",)))


def adding_places(network: Graph, operator: Operator) -> list[int]:
    """Return the inputs that earlier operators read too: their gradients are added."""
    positions = []
    for position, operand in enumerate(operator.inputs):
        index, first = network.readers()[operand.tensor][0]
        if operand.tensor in network.producers() and (network.operators[index].name, first) != (operator.name, position):
            positions.append(position)
    return positions


def operator_cost(rows: OperatorRows, grid: LayoutGrid, machine: Machine) -> OperatorCost:
    """Return the cost of all operators together, on each column."""
    amount, sizes = amount_values(rows.timed.amounts, grid)
    times = row_times(rows.timed, machine, members_inside(rows.timed, grid), amount, sizes)
    work = times.matmul + times.attention + times.streaming
    return OperatorCost(
        forward=work[_FORWARD],
        backward=work[_BACKWARD],
        collectives=times.communication[0],
        saved_bytes=summed(amount[rows.saved.columns["amount"]], rows.saved, 1)[0],
    )


def parameter_share(num_elements: int, num_parameters: int, num_chips: int) -> float:
    """Return the elements of the largest possible unit of a parameter over its own: all parameters of the network, unsharded. [-]

    A collective's time per byte falls with its size. The parameter's part of this unit is therefore a lower bound in any unit.
    """
    return num_chips * max(1.0, float(num_parameters)) / float(num_elements)


def saved_inputs(operator: Operator) -> tuple[int, ...]:
    """Return the inputs that an operator keeps for backward."""
    return tuple(sorted(data.of for data in operator.saved if data.of is not None and data.of < len(operator.inputs)))


def saves_output(operator: Operator) -> bool:
    """Return whether an operator keeps its output for backward."""
    return any(data.of == len(operator.inputs) for data in operator.saved)
