"""The mesh of a plan on the ranks of a run: torch device meshes, process groups, and names for any group of ranks.

Parameters are laid out on a mesh (pp, dp_replicate, dp_shard x cp, tp). For weights, cp is a data axis (Megatron's dp-cp group,
torchtitan's dp_shard_cp), so the ZeRO axes are one mesh dimension of dp_shard * cp ranks. Expert weights use another mesh of
the same ranks (`parallel/folded_mesh.py`): (pp, edp_replicate, edp_shard, ep x etp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from perfmodel.execute.launch.launch import Worker
from perfmodel.parallel.algebra.folding import EXPERT_AXES, REFINED
from perfmodel.parallel.folded_mesh import EXPERT_DATA, FoldedMesh, folded_mesh
from perfmodel.parallel.layout import DEFAULT_ORDER, ParallelLayout
from perfmodel.parallel.plan import Plan

#: Nesting of the axes in the parameter mesh, outermost first, independent of the order of the ranks.
CANONICAL_ORDER = tuple(reversed(DEFAULT_ORDER))


def rank_grid(layout: ParallelLayout, order: Sequence[str]) -> torch.Tensor:
    """Return ranks[pp, dp_replicate, dp_shard, cp, tp] if ranks are numbered with `order`, innermost axis first."""
    outermost_first = tuple(reversed(tuple(order)))
    grid = torch.arange(layout.num_chips).reshape([layout.degree(axis) for axis in outermost_first])
    return grid.permute([outermost_first.index(axis) for axis in CANONICAL_ORDER]).contiguous()


@dataclass(slots=True)
class RunMesh:
    """One rank's coordinates in the mesh, and its process groups. Groups of one rank are None.

    expert_mesh   mesh of expert weights: (edp_replicate, edp_shard); None without experts
    """

    layout: ParallelLayout
    order: tuple[str, ...]
    folded: FoldedMesh
    coordinates: dict[str, int]
    parameter_mesh: DeviceMesh
    groups: dict[str, dist.ProcessGroup | None]
    expert_mesh: DeviceMesh | None = None
    places: dict[int, dict[str, int]] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Return the number of ranks of a group."""
        group = self.groups[axis]
        return 1 if group is None else dist.get_world_size(group)

    def index(self, axis: str) -> int:
        """Return this rank's index in a group."""
        group = self.groups[axis]
        return 0 if group is None else dist.get_rank(group)

    @property
    def has_experts_apart(self) -> bool:
        """Whether an expert is replicated over fewer ranks than an attention weight."""
        ranks = (self.layout.dp_replicate, self.layout.dp_shard * self.layout.cp)
        return self.expert_mesh is not None and (self.size("edp_replicate"), self.size("edp_shard")) != ranks

    def axis_of(self, members: Sequence[int], kind: str) -> str:
        """Return the name of the group of these ranks for this kind of collective; "none" for a single rank."""
        for rank in members:
            if rank not in self.places:
                left, self.places[rank] = rank, {}
                for axis in self.order:
                    left, self.places[rank][axis] = divmod(left, self.layout.degree(axis))
        return self.folded.group_name([self.places[rank] for rank in members], kind)


def _lists(ranks: torch.Tensor, names: Sequence[str], axes: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that differ only in `axes`; names: dims of `ranks`."""
    inside = [names.index(axis) for axis in axes]
    outside = [i for i in range(len(names)) if i not in inside]
    size = prod(ranks.shape[i] for i in inside)
    return ranks.permute([*outside, *inside]).reshape(-1, size).tolist()  # type: ignore[no-any-return]


def _new_group(lists: list[list[int]], my_rank: int) -> dist.ProcessGroup | None:
    """Create these groups and return the one of this rank. Collective: every rank of the world must call this in the same order."""
    if len(lists[0]) == 1:
        return None
    mine = None
    for members in lists:
        group = dist.new_group(members)
        if my_rank in members:
            mine = group
    return mine


def run_mesh(worker: Worker, plan: Plan) -> RunMesh:
    """Return the mesh of a plan, cached per worker group, as process groups are limited and expensive."""
    folded = folded_mesh(plan)
    key = ("mesh", plan.layout, plan.order, tuple(folded.sizes.items()) if plan.has_experts else None)
    return worker.cached(key, lambda: build_mesh(worker, plan, folded))


def build_mesh(worker: Worker, plan: Plan, folded: FoldedMesh) -> RunMesh:
    """Create the device meshes and process groups of a plan. Collective."""
    layout, order = plan.layout, plan.order
    ranks = rank_grid(layout, order)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    parameter_mesh = DeviceMesh(worker.device, ranks.reshape(sizes), mesh_dim_names=("pp", "dp_replicate", "dp_shard_cp", "tp"))
    combinations = ("pp", "cp", "tp", "dp_replicate", "dp_shard+cp", "dp_replicate+dp_shard+cp")
    groups = {axes: _new_group(_lists(ranks, CANONICAL_ORDER, axes.split("+")), worker.rank) for axes in combinations}
    # Tied embeddings: the first and the last stage of each pipeline share a gradient (algebra: the pseudo-axis of R18).
    groups["tied"] = None
    if layout.pp > 1:
        for first, last in zip(ranks[0].flatten().tolist(), ranks[-1].flatten().tolist(), strict=True):
            group = dist.new_group([first, last])
            if worker.rank in (first, last):
                groups["tied"] = group
    coordinates = (ranks == worker.rank).nonzero()[0].tolist()
    expert_mesh = None
    if plan.has_experts:
        names = [part for axis in CANONICAL_ORDER for part in folded.parts[axis]]
        finer = ranks.reshape([folded.sizes[name] for name in names])
        possible = {"ep": EXPERT_AXES, "etp": REFINED["etp"], **EXPERT_DATA}
        axes_of = {name: [axis for axis in axes if axis in names] for name, axes in possible.items()}
        axes_of["edp"] = [*axes_of["edp_replicate"], *axes_of["edp_shard"]]
        groups |= {name: _new_group(_lists(finer, names, axes), worker.rank) for name, axes in axes_of.items()}
        nested = [["pp"], axes_of["edp_replicate"], axes_of["edp_shard"], [*axes_of["ep"], *axes_of["etp"]]]
        grid = finer.permute([names.index(axis) for axes in nested for axis in axes])
        grid = grid.reshape([prod(folded.sizes[axis] for axis in axes) for axes in nested])
        expert_mesh = DeviceMesh(worker.device, grid, mesh_dim_names=("pp", "edp_replicate", "edp_shard", "experts"))
    return RunMesh(layout, order, folded, dict(zip(CANONICAL_ORDER, coordinates, strict=True)), parameter_mesh, groups, expert_mesh)
