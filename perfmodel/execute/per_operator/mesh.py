"""Device mesh of a network plan: rank coordinates, process groups over any set of axes, and a record of issued collectives.

Ranks are numbered with the axes outermost first. The members of a group in ascending order are therefore in mesh order. Each pipeline
stage has a mesh of its own, one after another; ranks here are counted within a stage, from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import IssuedTraffic
from perfmodel.execute.local import gathered, scattered
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.per_operator.mesh import STAGES, MeshAxis
from perfmodel.parallel.per_operator.traffic import NetworkTraffic
from perfmodel.workload.work import Pass

#: Number of collectives of a step, by description. `repeats` of a key is 1.
Record = Counter[NetworkTraffic]
#: Elements issued in addition to the recorded ones, by kind, axes and description.
Padding = Counter[tuple[str, frozenset[str], str]]


@dataclass(frozen=True, slots=True)
class Purpose:
    """Reason for a collective: its description in `NetworkTraffic`."""

    phase: Pass
    tensor: str
    operator: str
    what: str


class NetworkMesh:
    """One rank's coordinates and process groups. A mesh without axes is a single process: collectives do nothing.

    num_stages     pipeline stages; `stage` is this rank's
    record         issued collectives if recording is on; else None
    padding        elements issued in addition to the record: uneven sharding on the way to a layout enlarges the
                   shards of a gather or scatter, and makes those of an all-to-all unequal; halos along a second dim have corners
    shared         tensors shared by operators of many layers, computed once
    indices, moves cached index sets of shards, and cached redistributions
    """

    def __init__(self, worker: Worker, axes: tuple[MeshAxis, ...], *, num_stages: int = 1) -> None:
        self.worker, self.num_stages = worker, num_stages
        self.axes = tuple(axis for axis in axes if axis.size > 1)
        self.sizes = {axis.name: axis.size for axis in axes}
        self.num_ranks = prod(self.sizes.values())
        # a single process has a mesh without axes, whatever its rank
        self.stage, self.rank = divmod(worker.rank, self.num_ranks) if self.axes or num_stages > 1 else (0, 0)
        self.record: Record | None = None
        self.shared: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}
        self.padding: Padding = Counter()
        self.indices: dict[tuple[object, ...], np.ndarray] = {}
        self.moves: dict[tuple[object, ...], Any] = {}

        if num_stages > 1:
            # stages need different groups, or none, but group creation is collective: create every group here
            names = [axis.name for axis in self.axes]
            for some in chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)):
                self.group(some)
            self.holders_group(range(num_stages))

    @property
    def device(self) -> str:
        return self.worker.device

    def size(self, axes: Iterable[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate on every axis."""
        coordinates = dict.fromkeys(self.sizes, 0)
        for axis in reversed(self.axes):
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return coordinates

    def index(self, axes: Iterable[str], rank: int | None = None) -> int:
        """Return the chunk index of a rank (default: this one) in a dim sharded over `axes`, outermost first."""
        coordinates, index = self.coordinates(self.rank if rank is None else rank), 0
        for axis in axes:
            index = index * self.sizes[axis] + coordinates[axis]
        return index

    def members(self, axes: Iterable[str], rank: int | None = None) -> list[int]:
        """Return the ranks that differ from a rank (default: this one) only in `axes`, in ascending order."""
        axes, ranks, stride = frozenset(axes), [0], 1
        coordinates = self.coordinates(self.rank if rank is None else rank)
        for axis in reversed(self.axes):
            steps = range(axis.size) if axis.name in axes else (coordinates[axis.name],)
            ranks = [step * stride + other for step in steps for other in ranks]
            stride *= axis.size
        return ranks

    def group(self, axes: Iterable[str]) -> DeviceMesh | None:
        """Return a one-dimensional mesh over the product of `axes`; None for one rank.

        It is cached for later plans on a mesh of the same shape. Creation is collective: every rank must call in the same order.
        """
        chosen = frozenset(axis.name for axis in self.axes if axis.name in set(axes))
        if not chosen:
            return None

        def make() -> DeviceMesh:
            mine = dist.group.WORLD
            if len(self.members(chosen)) < self.num_ranks * self.num_stages:
                for stage, rank in product(range(self.num_stages), range(self.num_ranks)):
                    members = self.members(chosen, rank)
                    if rank > members[0]:
                        continue  # its first member has created the group
                    group = dist.new_group([stage * self.num_ranks + member for member in members])
                    if stage == self.stage and self.rank in members:
                        mine = group
            return DeviceMesh.from_group(mine, self.device)

        return self.worker.cached(self._key(chosen), make)

    def shard_mesh(self, shards: Iterable[str], replicas: Iterable[str]) -> DeviceMesh | None:
        """Return the mesh for `fully_shard`: replicas by shards, or shards alone."""
        shards, replicas = frozenset(shards), frozenset(replicas)
        over, of = self.group(replicas), self.group(shards)
        if over is None or of is None:
            return of
        ranks = [[self.world_rank(rank) for rank in self.members(shards, replica)] for replica in self.members(replicas)]
        groups, names = [over.get_group(), of.get_group()], ("replicas", "shards")
        return self.worker.cached(
            ("shards and replicas", self._key(shards), self._key(replicas)),
            lambda: DeviceMesh.from_group(groups, self.device, mesh=torch.tensor(ranks), mesh_dim_names=names),
        )

    def _key(self, axes: frozenset[str]) -> tuple[object, ...]:
        shape = tuple(axis.size for axis in self.axes)
        return ("network group", self.num_stages, shape, tuple(i for i, axis in enumerate(self.axes) if axis.name in axes))

    def holders_group(self, stages: Iterable[int]) -> dist.ProcessGroup:
        """Return the group of ranks with this rank's coordinates in these stages. Collective over the world, in the same order."""
        chosen = sorted({stage % self.num_stages for stage in stages})
        return self.worker.cached(
            ("network holders", self.num_stages, self.num_ranks, *chosen),
            lambda: [dist.new_group([stage * self.num_ranks + rank for stage in chosen]) for rank in range(self.num_ranks)][self.rank],
        )

    def world_rank(self, rank: int) -> int:
        """Return the world rank of a rank of this stage."""
        return self.stage * self.num_ranks + rank

    def label(self, ranks: Iterable[int], kind: str = "") -> str:
        """Return the axes along which world ranks differ, joined by `+`; `STAGES` if they belong to several stages."""
        stages, places = zip(*((rank // self.num_ranks, self.coordinates(rank % self.num_ranks)) for rank in ranks), strict=True)
        if len(set(stages)) > 1:
            return STAGES
        return "+".join(axis.name for axis in self.axes if len({coordinates[axis.name] for coordinates in places}) > 1)

    def process_group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        group = self.group(axes)
        return None if group is None else group.get_group()

    @contextmanager
    def recording(self, issued: IssuedTraffic) -> Iterator[None]:
        """Record the collectives that are issued meanwhile."""
        self.record, self.padding = issued.record, issued.padding
        try:
            yield
        finally:
            self.record = None

    def note(self, kind: CollectiveKind, axes: Iterable[str], num_elements: float, purpose: Purpose, *, issued: float = -1.0) -> None:
        """Record a collective. `issued`: actual number of elements if it differs from that of even sharding."""
        if self.record is None:
            return
        row = NetworkTraffic(
            kind=kind,
            axes=(chosen := frozenset(axis for axis in axes if axis == STAGES or self.sizes[axis] > 1)),
            num_elements=float(num_elements),
            phase=purpose.phase,
            tensor=purpose.tensor,
            operator=purpose.operator,
            what=purpose.what,
        )
        self.record[row] += 1
        if issued >= 0 and issued != num_elements:
            self.padding[str(kind), chosen, purpose.what] += issued - num_elements  # type: ignore[assignment]


def all_reduce(mesh: NetworkMesh, tensor: torch.Tensor, axes: Iterable[str], purpose: Purpose, *, largest: bool = False) -> torch.Tensor:
    """Return the sum (or the maximum) over the group, in place."""
    axes = tuple(axes)
    group = mesh.process_group(axes)
    if group is None:
        return tensor
    tensor = tensor.contiguous()
    mesh.note(CollectiveKind.ALL_REDUCE, axes, tensor.numel(), purpose)
    dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return tensor


def begin_all_reduce(mesh: NetworkMesh, tensor: torch.Tensor, axes: Iterable[str], purpose: Purpose) -> dist.Work:
    """Start an all-reduce of a contiguous tensor in place over several ranks; the result is complete after its `wait`."""
    axes = tuple(axes)
    mesh.note(CollectiveKind.ALL_REDUCE, axes, tensor.numel(), purpose)
    return dist.all_reduce(tensor, group=mesh.process_group(axes), async_op=True)  # type: ignore[no-any-return]


def all_gather(
    mesh: NetworkMesh, tensor: torch.Tensor, axes: Iterable[str], purpose: Purpose, *, num_elements: float = -1.0
) -> torch.Tensor:
    """Return [ways, ...]: the tensor of each group member, in the order of `NetworkMesh.members`. `num_elements`: recorded size."""
    axes = tuple(axes)
    group, rows = mesh.process_group(axes), tensor.unsqueeze(0)
    if group is None:
        return rows
    issued = tensor.numel() * mesh.size(axes)
    mesh.note(CollectiveKind.ALL_GATHER, axes, num_elements if num_elements >= 0 else issued, purpose, issued=issued)
    return gathered(rows, 0, group)


def reduce_scatter(
    mesh: NetworkMesh, pieces: torch.Tensor, axes: Iterable[str], purpose: Purpose, *, num_elements: float = -1.0
) -> torch.Tensor:
    """Return this rank's piece of the sum over the group, from pieces [ways, ...]. `num_elements`: recorded size."""
    axes = tuple(axes)
    group = mesh.process_group(axes)
    if group is None:
        return pieces.squeeze(0)
    issued = pieces.numel()
    mesh.note(CollectiveKind.REDUCE_SCATTER, axes, num_elements if num_elements >= 0 else issued, purpose, issued=issued)
    return scattered(pieces, 0, group).squeeze(0)
