"""A plan in which every operator of a network is cut in its own way: mesh axes with a place on the network tiers, and who uses which.

The mesh has one axis for each prime factor of each tier's size, outermost first: 32 chips as 4 nodes of 8 are `n0 n1 | c0 c1 c2`, each of
size 2. An operator puts each axis on one of its dims or on none. Within a dim the cuts lie in the order of the mesh, outermost first.

A tensor with several readers is held in one layout from which all of them read (`Held`): it is redistributed to that once, and the
gradients of its readers are added before they are reduced (R7): partial on the union of the axes on which any of them is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.algebra.sharding import Held, Sharding
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.job import Optimizer

#: What groups along a pipeline are called, beside those along axes.
STAGES = "stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """size ranks; `tier` counts the network tiers of the cluster from the innermost (0)."""

    name: str
    size: int
    tier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlan:
    """axes: outermost first; shardings: operator -> dim -> axes, outermost first; held: tensors with several readers.

    network, sizes   what the network was built from: its name, and the sizes given beyond its defaults
    inputs           of an imported module: what its forward is called with
    stages           of a pipeline: the first operator of each stage; the axes are then those of one stage's chips
    batch            of one microbatch

    What it is predicted with: zero, optimizer, and by name precision, profile and calibration, "" for the chip's own.
    """

    network: str
    batch: int
    cluster: str
    axes: tuple[MeshAxis, ...]
    shardings: Mapping[str, Sharding]
    held: Mapping[str, Held]
    sizes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    num_microbatches: int = 1
    zero: int = 0
    optimizer: str = Optimizer.ADAMW
    precision: str = ""
    profile: str = ""
    calibration: str = ""

    @property
    def is_imported(self) -> bool:
        """Whether the network is a module of one's own, `module:factory`."""
        return ":" in self.network

    @property
    def num_chips(self) -> int:
        """Of one stage."""
        return prod(axis.size for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        """Of all stages together."""
        return self.num_chips * max(1, len(self.stages))

    def size(self, names: frozenset[str] | tuple[str, ...]) -> int:
        return prod(axis.size for axis in self.axes if axis.name in names)


def axes_mask(axes: Sequence[MeshAxis], names: Collection[str]) -> int:
    """A set of axes as a bit mask: bit i is axis i of the mesh, outermost first."""
    return sum(1 << i for i, axis in enumerate(axes) if axis.name in names)


def mesh_axes(num_chips: int, tier_sizes: tuple[int, ...], *, most: int = 0) -> tuple[MeshAxis, ...]:
    """One axis for each prime factor of each tier, outermost tier first, larger factors first within a tier.

    tier_sizes   chips in one domain of each tier, innermost first (`Cluster.tiers[i].size`)
    most         axes at most (0: any number): the smallest of the tier that has most of them are joined

    A tier takes gcd(what is left, its own factor): 24 chips on nodes of 8 are 8 x 3, 12 on nodes of 8 are 4 x 3.
    """
    if isinstance(num_chips, bool) or not isinstance(num_chips, int) or num_chips < 1:
        raise bad_field("chips", num_chips, "must be a whole number of at least 1", "use 8, 16, 32 or 64")
    factors: list[list[int]] = []
    left, inner = num_chips, 1
    for tier, size in enumerate(tier_sizes):
        is_last = tier == len(tier_sizes) - 1
        degree = left if is_last else _greatest_divisor(left, max(1, size // inner))
        inner *= degree
        left //= degree
        factors.append(sorted(_prime_factors(degree), reverse=True))
    while most and sum(map(len, factors)) > max(most, sum(map(bool, factors))):
        longest = max(factors, key=len)
        longest[-2:] = [longest[-1] * longest[-2]]
        longest.sort(reverse=True)
    return tuple(
        MeshAxis(name=f"t{tier}{chr(ord('a') + i)}", size=size, tier=tier)
        for tier, sizes in reversed(list(enumerate(factors)))
        for i, size in enumerate(sizes)
    )


def _greatest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def check_plan(plan: NetworkPlan, network: Graph) -> None:
    """Every operator has a sharding that the mesh and its sizes allow; every tensor with several readers is held."""
    if plan.network != network.name:
        raise bad_field("network", plan.network, f"the plan is not for {network.name}", "use the network that it was made for")
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
    producers = network.producers()
    for tensor, readers in network.readers().items():
        if len(readers) > 1 and tensor in producers and tensor not in plan.held:
            raise bad_field("held", tensor, "is read by several operators and has no layout of its own", "add it")


def cut_sizes(operator: Operator, network: Graph, dim: str) -> tuple[int, ...]:
    """Every size that cutting a dim meets: the dim's own, and those of the tensors' positions that it names."""
    sizes = [operator.dims[dim]]
    for operand in (*operator.inputs, operator.output):
        if dim in operand.dims:
            sizes.append(network.tensors[operand.tensor].shape[operand.dims.index(dim)])
    return tuple(sizes)


def divides(operator: Operator, network: Graph, dim: str, parts: int) -> bool:
    """Whether a dim may be cut into so many parts: it may be cut, and each size that the cut meets has that many equal parts."""
    if dim in operator.whole:
        return parts == 1
    if dim in operator.padded:
        return parts <= operator.dims[dim]
    return gcd(*cut_sizes(operator, network, dim)) % parts == 0


__all__ = [
    "MeshAxis",
    "NetworkPlan",
    "axes_mask",
    "check_plan",
    "cut_sizes",
    "divides",
    "mesh_axes",
]
