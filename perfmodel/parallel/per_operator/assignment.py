"""Assignments: the mesh axes that shard each dim of each operator, in place of a rule set for all operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.algebra.sharding import FINE_AXES, Held, Sharding
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.workload.graph import Graph, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A sharding per operator.

    axes       mesh of one stage's chips, outermost first
    shardings  operator -> dim -> axes, outermost first
    held       layouts of tensors with several readers
    stages     of a pipeline: the first operator of each stage; empty for one stage
    key        hash, the key of cached programs

    A tensor with several readers is held in one layout from which all of them read (`Held`). It is redistributed to that layout once. The
    gradients of its readers are added before they are reduced (R7): the sum is partial on the union of the axes on which any of them is.
    """

    axes: tuple[MeshAxis, ...]
    shardings: Mapping[str, Sharding]
    held: Mapping[str, Held] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    key: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        shardings = frozenset((name, frozenset(cuts.items())) for name, cuts in self.shardings.items())
        object.__setattr__(self, "key", hash((self.axes, shardings, frozenset(self.held.items()), self.stages)))

    def __hash__(self) -> int:
        return self.key

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_chips(self) -> int:
        """Chips of one stage."""
        return prod(axis.size for axis in self.axes)

    def size(self, names: frozenset[str] | tuple[str, ...]) -> int:
        """Return the number of ranks of the group over these axes."""
        return prod(axis.size for axis in self.axes if axis.name in names)

    @property
    def has_named_axes(self) -> bool:
        """Whether its axes have the names of rule sets."""
        return any(axis.name in FINE_AXES for axis in self.axes)

    def described(self) -> str:
        """Return a text such as `2 stages of 4 x 8 chips`: chips of each network tier, outermost first."""
        tiers = sorted({axis.tier for axis in self.axes}, reverse=True)
        sizes = [prod(axis.size for axis in self.axes if axis.tier == tier) for tier in tiers] or [1]
        chips = " x ".join(map(str, sizes)) + " chips" + (" (across nodes x within one)" if len(sizes) > 1 else "")
        return f"{len(self.stages)} stages of {chips}" if self.stages else chips

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a plan's file; an operator without cuts has an empty map."""
        return {
            "axes": [{"name": axis.name, "size": axis.size, "tier": axis.tier} for axis in self.axes],
            "stages": list(self.stages),
            "shardings": {name: {dim: list(axes) for dim, axes in cuts.items() if axes} for name, cuts in self.shardings.items()},
            "held": {name: {"cuts": [list(cut) for cut in held.cuts], "partial": sorted(held.partial)} for name, held in self.held.items()},
        }


def check_assignment(plan: Assignment, network: Graph, *, needs_held: bool = False) -> None:
    """Check that every operator has a valid sharding, and every tensor with several readers a held layout if any has one.

    needs_held   held layouts are required; a plan by rule sets needs none
    """
    known = {axis.name: axis.size for axis in plan.axes}
    unknown = plan.shardings.keys() - {operator.name for operator in network.operators}
    if unknown:
        raise bad_field(
            "shardings", min(unknown), f"is no operator of {network.name}", "search and save the plan again, or remove the operator"
        )
    for operator in network.operators:
        if operator.name not in plan.shardings:
            raise InputError(f"operator {operator.name}: has no sharding; give it one (an empty map leaves it whole)")
        seen: set[str] = set()
        for dim, axes in plan.shardings[operator.name].items():
            if dim not in operator.dims:
                raise bad_field(f"shardings[{operator.name}]", dim, "is not a dim of the operator", f"use {', '.join(operator.dims)}")
            for axis in axes:
                if axis not in known:
                    raise bad_field(f"shardings[{operator.name}].{dim}", axis, "is not an axis of the mesh", f"use {', '.join(known)}")
                if axis in seen:
                    raise bad_field(f"shardings[{operator.name}].{dim}", axis, "cuts the operator twice", "an axis may occur once")
                seen.add(axis)
            parts = prod(known[axis] for axis in axes)
            if not divides(operator, network, dim, parts):
                raise bad_field(
                    f"shardings[{operator.name}].{dim}",
                    parts,
                    f"parts do not divide every size that they cut, or {dim} must stay whole",
                    "use fewer parts",
                )
    for tensor in network.shared() if plan.held or needs_held else ():
        if tensor not in plan.held:
            raise bad_field("held", tensor, "is read by several operators and has no layout of its own", "add it")


def cut_sizes(operator: Operator, network: Graph, dim: str) -> tuple[int, ...]:
    """Return every size that sharding a dim affects: the dim's own, and those of the tensor positions with its name."""
    sizes = [operator.dims[dim]]
    for operand in (*operator.inputs, operator.output):
        if dim in operand.dims:
            sizes.append(network.tensors[operand.tensor].shape[operand.dims.index(dim)])
    return tuple(sizes)


def divides(operator: Operator, network: Graph, dim: str, parts: int) -> bool:
    """Return whether a dim may be sharded into `parts`: it need not stay whole, and `parts` divides every affected size."""
    if dim in operator.roles.unsplit:
        return parts == 1
    if dim in operator.roles.padded:
        return parts <= operator.dims[dim]
    return gcd(*cut_sizes(operator, network, dim)) % parts == 0


def assignment_from_dict(data: Mapping[str, Any]) -> Assignment:
    """Return the assignment of a plan file that has its schema (`parallel/schemas.py`)."""
    return Assignment(
        axes=tuple(MeshAxis(name=axis["name"], size=axis["size"], tier=axis["tier"]) for axis in data["axes"]),
        shardings={name: {dim: tuple(axes) for dim, axes in cuts.items()} for name, cuts in data["shardings"].items()},
        held={
            name: Held(cuts=tuple(tuple(cut) for cut in held["cuts"]), partial=frozenset(held.get("partial", ())))
            for name, held in data.get("held", {}).items()
        },
        stages=tuple(data.get("stages", ())),
    )
