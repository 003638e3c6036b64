"""A mesh on which every operator may be cut in its own way: axes with a size and a place, and what collectives on them cost.

The names are those of the fine axes, the sizes are free: a tensor group of 8 may be 8, 4 x 2 or, with cp, 2 x 2 x 2. The order says
where on the network each axis lies, so that a cut inside a node and one across nodes cost what they cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, prod

import numpy as np

from perfmodel.collectives import CollectiveKind
from perfmodel.cost.collectives import collective_time
from perfmodel.cost.machine import Machine
from perfmodel.cost.microbatch import redistribution_time
from perfmodel.cost.program import DATA_AXES
from perfmodel.cost.step import exposed_communication
from perfmodel.errors import bad_field
from perfmodel.parallel.derive import Amount
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.parallel.sharding import FINE_AXES, Collective

#: Axes that may cut any dim; the data axes cut the batch, always.
MODEL_AXES = ("cp", "tp_kv", "tp_q")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMesh:
    """sizes: ranks along each fine axis (1 if left out); order: fine axes, innermost first."""

    sizes: Mapping[str, int]
    order: tuple[str, ...] = ("tp_q", "tp_kv", "cp", "dp_shard", "dp_replicate")

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if axis not in FINE_AXES:
                raise bad_field("axis", axis, "is not a fine axis", f"use one of {', '.join(FINE_AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise bad_field(axis, size, "must be a whole number of at least 1", "use 1 to leave the axis out")
        if sorted(self.order) != sorted(FINE_AXES):
            raise bad_field("order", "-".join(self.order), "must name each fine axis once", f"order {', '.join(FINE_AXES)}")

    def size(self, axes: Iterable[str]) -> int:
        return prod(self.sizes.get(axis, 1) for axis in axes)

    @property
    def num_chips(self) -> int:
        return self.size(FINE_AXES)

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Axes of more than one rank that may cut any dim."""
        return tuple(axis for axis in MODEL_AXES if self.sizes.get(axis, 1) > 1)

    def grid(self, tier_sizes: Iterable[int]) -> LayoutGrid:
        """The mesh as a grid of one row."""
        stride, running = {}, 1
        for axis in self.order:
            stride[axis] = running
            running *= self.size((axis,))

        def column(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.array([float(value)])

        inside = tuple({axis: column(min(self.size((axis,)), max(1, tier // stride[axis]))) for axis in FINE_AXES} for tier in tier_sizes)
        degree = dict.fromkeys(DEFAULT_ORDER, column(1.0)) | {
            "tp": column(self.size(("tp_kv", "tp_q"))),
            "cp": column(self.size(("cp",))),
            "dp_shard": column(self.size(("dp_shard",))),
            "dp_replicate": column(self.size(("dp_replicate",))),
        }
        fine = {axis: column(self.size((axis,))) for axis in FINE_AXES}
        return LayoutGrid(degree=degree, fine=fine, inside=inside, hop=tuple(column(2.0) for _ in inside))


@dataclass(slots=True, kw_only=True, eq=False)
class Prices:
    """Amounts and collectives of one mesh and microbatch as numbers, each collective priced once."""

    mesh: OperatorMesh
    machine: Machine
    profile: ExecutionProfile
    micro_batch: int
    _grid: LayoutGrid = field(init=False)
    _known: dict[tuple[str, frozenset[str], float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grid = self.mesh.grid(self.machine.tier_sizes)

    def value(self, amount: Amount) -> float:
        """base * microbatch^e * ceil(padded / |padded axes|) / |axes|; the microbatch is counted per data rank, so its axes cancel."""
        axes = amount.axes - DATA_AXES if amount.per_sample else amount.axes
        samples = self.micro_batch if amount.per_sample else 1.0
        return amount.base * samples * ceil(amount.padded_size / self.mesh.size(amount.padded_axes)) / self.mesh.size(axes)

    def collective(self, kind: Collective, axes: frozenset[str], num_bytes: float) -> float:
        """One collective over these axes, alone. [s]"""
        axes = frozenset(axis for axis in axes if self.mesh.size((axis,)) > 1)
        if not axes:
            return 0.0
        key = (str(kind), axes, num_bytes)
        if key not in self._known:
            time = collective_time(
                CollectiveKind(str(kind)),
                np.array([num_bytes]),
                group_size=self._grid.size(axes),
                inside=self._grid.group_inside(axes),
                machine=self.machine,
            )
            self._known[key] = float(np.asarray(time).reshape(-1)[0])
        return self._known[key]

    def redistribution(self, kind: Collective, axes: frozenset[str], amount: Amount, name: str) -> float:
        """One collective of activations of the class `name`: what does not hide under compute. [s]"""
        num_bytes = self.value(amount)
        host = redistribution_time(np.array([num_bytes]), np.array([float(self.mesh.size(axes))]), self.machine)
        time = self.collective(kind, axes, num_bytes) + float(np.asarray(host).reshape(-1)[0])
        return time * exposed_communication(self.profile, name)
