"""Mesh of a plan with a sharding per operator: axes on the tiers of the network.

The mesh has one axis for each prime factor of each tier's size, outermost first. For example, 32 chips as 4 nodes of 8 are
`n0 n1 | c0 c1 c2`, each of size 2. An operator assigns each axis to one of its dims or to none. The axes of a dim are in the order of the
mesh, outermost first.

"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perfmodel.foundation.errors import bad_field

#: Name of groups along the pipeline; other groups have the names of axes.
STAGES = "stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Mesh axis of `size` ranks; `tier` counts the network tiers of the cluster from the innermost (0)."""

    name: str
    size: int
    tier: int


def axes_mask(axes: Sequence[MeshAxis], names: Collection[str]) -> int:
    """Return a set of axes as a bit mask: bit i is axis i of the mesh, outermost first."""
    return sum(1 << i for i, axis in enumerate(axes) if axis.name in names)


def mesh_axes(num_chips: int, tier_sizes: tuple[int, ...], *, most: int = 0) -> tuple[MeshAxis, ...]:
    """Return one axis for each prime factor of each tier, outermost tier first, larger factors first within a tier.

    tier_sizes   chips in one domain of each tier, innermost first (`Cluster.tiers[i].size`)
    most         largest number of axes (0: any): the smallest axes of the tier with most axes are joined

    The size of a tier is the greatest divisor of the remaining chips that fits. So 24 chips on nodes of 8 are 8 x 3, and 12 are 6 x 2.
    """
    if isinstance(num_chips, bool) or not isinstance(num_chips, int) or num_chips < 1:
        raise bad_field("chips", num_chips, "must be a whole number of at least 1", "use 8, 16, 32 or 64")
    factors: list[list[int]] = []
    left, inner = num_chips, 1
    for tier, size in enumerate(tier_sizes):
        is_last = tier == len(tier_sizes) - 1
        degree = left if is_last else max(d for d in range(1, min(left, max(1, size // inner)) + 1) if left % d == 0)
        inner *= degree
        left //= degree
        primes, divisor = list[int](), 2
        while degree > 1:
            if degree % divisor == 0:
                primes.insert(0, divisor)
                degree //= divisor
            else:
                divisor += 1
        factors.append(primes)
    while most and sum(map(len, factors)) > max(most, sum(map(bool, factors))):
        longest = max(factors, key=len)
        longest[-2:] = [longest[-1] * longest[-2]]
        longest.sort(reverse=True)
    return tuple(
        MeshAxis(name=f"t{tier}{chr(ord('a') + i)}", size=size, tier=tier)
        for tier, sizes in reversed(list(enumerate(factors)))
        for i, size in enumerate(sizes)
    )


__all__ = ["STAGES", "MeshAxis", "axes_mask", "mesh_axes"]
