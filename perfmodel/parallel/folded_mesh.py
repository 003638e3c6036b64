"""Ranks of a plan on the finer axes that compose its attention and expert meshes (`algebra/folding.py`), and names of groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.algebra.degrees import fine_sizes
from perfmodel.parallel.algebra.folding import EXPERT_AXES, REFINED, data_axis, expert_parts
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan

#: Data-parallel axes of experts: the first holds replicas, ZeRO may shard over the second.
EXPERT_DATA: Mapping[str, tuple[str, ...]] = {"edp_replicate": ("dp_replicate",), "edp_shard": ("dp_shard", "cp")}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedMesh:
    """Mesh of finer axes.

    sizes   finer axis -> ranks
    parts   axis of the layout -> the finer axes of which it is the product, outermost first
    """

    sizes: Mapping[str, int]
    parts: Mapping[str, tuple[str, ...]]

    def fine_indices(self, indices: Mapping[str, int]) -> dict[str, int]:
        """Return the index of a rank on each finer axis, given its indices on the axes of the layout."""
        finer = {}
        for axis, parts in self.parts.items():
            index = indices[axis]
            for part in reversed(parts):
                index, finer[part] = divmod(index, self.sizes[part])
        return finer

    def group_name(self, places: Sequence[Mapping[str, int]], kind: str) -> str:
        """Return the name of the group of ranks with these indices on the axes of the layout; "none" for a single rank."""
        spanned = {axis for axis in self.parts if len({rank[axis] for rank in places}) > 1}
        if any(len(self.parts[axis]) > 1 for axis in spanned):
            finer = [self.fine_indices(rank) for rank in places]
            return self.name([axis for axis in self.sizes if len({rank[axis] for rank in finer}) > 1], kind)
        return "+".join(axis for axis in self.parts if axis in spanned) or "none"

    def name(self, axes: Collection[str], kind: str) -> str:
        """Return the name of the group over these finer axes: axes of the layout joined by +, outermost first, or axes of experts.

        Where both name the same ranks, the all-to-all of experts has the name of their axes, all else that of the layout's.
        """
        wanted = {axis for axis in axes if self.sizes.get(axis, 1) > 1}
        experts = {"ep": EXPERT_AXES, "etp": REFINED["etp"], "edp": sum(EXPERT_DATA.values(), ()), **EXPERT_DATA}
        names = [self._among(wanted, self.parts), self._among(wanted, experts)]
        if kind == CollectiveKind.ALL_TO_ALL and "ep" in names[1].split("+"):
            names.reverse()
        for name in names:
            if name:
                return name
        # a group of neither mesh: the axes of the layout that it spans
        return "+".join(axis for axis, parts in self.parts.items() if wanted.intersection(parts))

    def _among(self, wanted: set[str], named: Mapping[str, tuple[str, ...]]) -> str:
        """Return the names of the axes that together are exactly the wanted ones; "" if there are none."""
        left, names = set(wanted), []
        for name, parts in named.items():
            present = {part for part in parts if self.sizes.get(part, 1) > 1}
            if present and present <= left:
                names.append(name)
                left -= present
        return "" if left else "+".join(names)


def expert_rank(plan: Plan, indices: Mapping[str, int]) -> int:
    """Return the index of a rank in its expert-parallel group, whose ranks are numbered in the order of all ranks."""
    mesh = folded_mesh(plan)
    finer, strides = mesh.fine_indices(indices), []
    for axis, parts in mesh.parts.items():
        stride = plan.layout.stride(axis, plan.order)
        for part in reversed(parts):
            strides.append((stride, part))
            stride *= mesh.sizes[part]
    index, ways = 0, 1
    for _, part in sorted(entry for entry in strides if entry[1] in EXPERT_AXES and mesh.sizes[entry[1]] > 1):
        index += finer[part] * ways
        ways *= mesh.sizes[part]
    return index


def folded_mesh(plan: Plan) -> FoldedMesh:
    """Return the mesh of a plan with or without experts."""
    layout = plan.layout
    degrees = tuple((axis, layout.degree(axis)) for axis in reversed(DEFAULT_ORDER))
    fine = fine_sizes(plan.job.transformer, cp=layout.cp, tp=layout.tp)
    return _folded(degrees, fine["tp_kv"], plan.folding)


@session_cache(maxsize=256)
def _folded(degrees: tuple[tuple[str, int], ...], tp_kv: int, experts: tuple[int, int] | None) -> FoldedMesh:
    sizes = dict(degrees)
    parts = {axis: (axis,) for axis in sizes} | {"tp": AXIS_PARTS["tp"]}
    tp_q = sizes.pop("tp") // tp_kv
    sizes |= {"tp_kv": tp_kv, "tp_q": tp_q}
    if experts is not None:
        expert_sizes = expert_parts(tp_kv=tp_kv, tp_q=tp_q, cp=sizes["cp"], ep=experts[0], etp=experts[1])
        taken = {axis: int(size) for axis, size in expert_sizes.items()}
        data = data_axis(sizes["dp_shard"])
        sizes |= {data: sizes[data] // taken["dp_ep"], "cp": sizes["cp"] // taken["cp_ep"]}
        sizes |= {axis: sizes[axis] // taken[f"{axis}_ep"] for axis in ("tp_kv", "tp_q")}
        sizes |= taken
        parts |= {data: (data, "dp_ep"), "cp": REFINED["cp"], "tp": (*REFINED["tp_kv"], *REFINED["tp_q"])}
    return FoldedMesh(sizes=sizes, parts=parts)
