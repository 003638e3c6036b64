"""The mesh of a plan on the ranks of a run: torch device meshes, process groups, and names for any group of ranks.

Parameters live on a mesh (pp, dp_replicate, dp_shard x cp, tp): cp is a data axis for weights (Megatron's dp-cp group,
torchtitan's dp_shard_cp), so the ZeRO axes are one mesh dimension of dp_shard * cp ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from perfmodel.execute.launch.launch import Worker
from perfmodel.parallel.layout import DEFAULT_ORDER, ParallelLayout

#: Outermost first: how the axes of the parameter mesh nest, whatever the order of the ranks.
CANONICAL_ORDER = tuple(reversed(DEFAULT_ORDER))


def rank_grid(layout: ParallelLayout, order: Sequence[str]) -> torch.Tensor:
    """ranks[pp, dp_replicate, dp_shard, cp, tp] when ranks are numbered with `order`, innermost axis first."""
    outermost_first = tuple(reversed(tuple(order)))
    grid = torch.arange(layout.num_chips).reshape([layout.degree(axis) for axis in outermost_first])
    return grid.permute([outermost_first.index(axis) for axis in CANONICAL_ORDER]).contiguous()


@dataclass(slots=True)
class RunMesh:
    """One rank's place in the mesh, and the groups that it talks in. Groups of one rank are None."""

    layout: ParallelLayout
    ranks: torch.Tensor
    coordinates: dict[str, int]
    parameter_mesh: DeviceMesh
    groups: dict[str, dist.ProcessGroup | None]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        return self.groups["+".join(axes)]

    def axis_of(self, members: Sequence[int]) -> str:
        """Names of the axes along which these ranks differ, joined by `+`; "none" for a single rank."""
        places = [self._coordinates(rank) for rank in members]
        return "+".join(axis for axis in CANONICAL_ORDER if len({place[axis] for place in places}) > 1) or "none"

    def _coordinates(self, rank: int) -> dict[str, int]:
        place = (self.ranks == rank).nonzero()[0].tolist()
        return dict(zip(CANONICAL_ORDER, place, strict=True))


def _new_group(ranks: torch.Tensor, axes: Sequence[str], my_rank: int) -> dist.ProcessGroup | None:
    """The group of ranks that differ from this one in `axes` only. Every rank of the world must call this alike."""
    inside = [CANONICAL_ORDER.index(axis) for axis in axes]
    outside = [i for i in range(len(CANONICAL_ORDER)) if i not in inside]
    lists = ranks.permute([*outside, *inside]).reshape(-1, int(torch.tensor([ranks.shape[i] for i in inside]).prod()))
    if lists.shape[1] == 1:
        return None
    mine = None
    for members in lists.tolist():
        group = dist.new_group(members)
        if my_rank in members:
            mine = group
    return mine


def build_mesh(worker: Worker, layout: ParallelLayout, order: Sequence[str]) -> RunMesh:
    """The mesh of a layout, made once for each worker group: process groups are few and dear."""
    key = ("mesh", layout, tuple(order))
    if key in worker.cache:
        return worker.cache[key]  # type: ignore[no-any-return]
    ranks = rank_grid(layout, order)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    parameter_mesh = DeviceMesh(worker.device, ranks.reshape(sizes), mesh_dim_names=("pp", "dp_replicate", "dp_shard_cp", "tp"))
    combinations = (
        ("pp",),
        ("cp",),
        ("tp",),
        ("dp_replicate",),
        ("dp_shard", "cp"),
        ("dp_replicate", "dp_shard", "cp"),
    )
    groups = {"+".join(axes): _new_group(ranks, axes, worker.rank) for axes in combinations}
    # Tied embeddings: the first and the last stage of each pipeline share a gradient (algebra: the pseudo-axis of R18).
    groups["tied"] = None
    if layout.pp > 1:
        for first, last in zip(ranks[0].flatten().tolist(), ranks[-1].flatten().tolist(), strict=True):
            group = dist.new_group([first, last])
            if worker.rank in (first, last):
                groups["tied"] = group
    place = (ranks == worker.rank).nonzero()[0].tolist()
    mesh = RunMesh(layout, ranks, dict(zip(CANONICAL_ORDER, place, strict=True)), parameter_mesh, groups)
    worker.cache[key] = mesh
    return mesh
