"""Links and nested tiers of a network: the bandwidth from one chip to its peers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.session import session_cache


class Topology(StrEnum):
    """Wiring of the chips (or the inner domains) of one tier."""

    SWITCH = "switch"
    FULL_MESH = "full_mesh"
    TORUS = "torus"
    PCIE_TREE = "pcie_tree"
    FAT_TREE = "fat_tree"


# A torus is tabulated by the number of members of a group.
MAX_TORUS = 2**17

# Without peer-to-peer every byte crosses the bus twice: to host memory and back.
STAGED_FRACTION = 0.5


@dataclass(slots=True, frozen=True, kw_only=True)
class Link:
    """Link of one chip to the rest of its tier.

    bandwidth       one direction, to all peers together                 [byte/s]
    pair_bandwidth  one direction, to one peer (a mesh: one link's)      [byte/s]
    latency         one hop, hardware and transport                      [s]
    """

    bandwidth: float
    pair_bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for name in ("bandwidth", "pair_bandwidth"):
            value = getattr(self, name)
            if not 1 <= value < math.inf:
                raise bad_field(name, value, "must be positive, 1 B/s at least", "give one direction of one chip")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise bad_field("latency", self.latency, "must not be negative", "write '0 s' for none")
        if self.pair_bandwidth > self.bandwidth * (1 + 1e-12):
            raise bad_field("pair_bandwidth", self.pair_bandwidth, f"must not exceed bandwidth={self.bandwidth}", "swap the two")


@dataclass(slots=True, frozen=True, kw_only=True)
class NetworkTier:
    """One level of the network; tiers nest, innermost first.

    size              chips in one domain of this tier, inner tiers included (8, then 72, then 4096)
    torus_shape       chips (inner domains) along each dimension; () unless a torus
    wrap_multiple     a torus dimension of a slice wraps around if it is a multiple of this; 0 = never
    oversubscription  sum of the chips' link bandwidths over the shared bandwidth (fat tree); 1 = full bisection
    peer_to_peer      False: every transfer is staged through host memory (PCIe tree)
    nics_per_node     NICs that the chips of a node share: a chip alone gets the rate of a NIC; 0: each chip has its share only
    provenance        read | recalled | mixed | measured
    """

    name: str
    topology: Topology
    size: int
    link: Link
    torus_shape: tuple[int, ...] = ()
    wrap_multiple: int = 0
    oversubscription: float = 1.0
    peer_to_peer: bool = True
    nics_per_node: int = 0
    source: str = ""
    provenance: str = "recalled"

    def __post_init__(self) -> None:
        where = f"tier {self.name}: "
        if self.size < 1:
            raise bad_field(where + "size", self.size, "must be at least 1", "count the chips of one domain")
        if (self.topology == Topology.TORUS) != bool(self.torus_shape):
            raise bad_field(where + "torus_shape", self.torus_shape, f"goes with topology torus, not {self.topology}", "give both or none")
        if any(dim < 1 for dim in self.torus_shape) or (self.torus_shape and self.size % math.prod(self.torus_shape)):
            raise bad_field(where + "torus_shape", self.torus_shape, f"its product must divide size={self.size}", "correct one of the two")
        if math.prod(self.torus_shape) > MAX_TORUS:
            raise bad_field(where + "torus_shape", self.torus_shape, f"may hold {MAX_TORUS:,} chips at most", "use a fat tree around it")
        if self.wrap_multiple < 0 or (self.wrap_multiple and self.topology != Topology.TORUS):
            raise bad_field(where + "wrap_multiple", self.wrap_multiple, "is a positive count on a torus", "leave it out elsewhere")
        if not (math.isfinite(self.oversubscription) and self.oversubscription >= 1):
            raise bad_field(where + "oversubscription", self.oversubscription, "must be at least 1", "write 1 for full bisection")
        if self.oversubscription > 1 and self.topology != Topology.FAT_TREE:
            raise bad_field(
                where + "oversubscription", self.oversubscription, f"belongs to a fat tree, not a {self.topology}", "leave it out"
            )
        if not self.peer_to_peer and self.topology != Topology.PCIE_TREE:
            raise bad_field(where + "peer_to_peer", self.peer_to_peer, f"belongs to a PCIe tree, not a {self.topology}", "leave it out")
        if self.nics_per_node < 0 or (self.nics_per_node and self.topology not in (Topology.FAT_TREE, Topology.SWITCH)):
            raise bad_field(where + "nics_per_node", self.nics_per_node, "is a positive count between nodes", "leave it out elsewhere")

    def slice_shape(self, num_chips: int) -> tuple[int, ...]:
        """Return the torus shape of a slice of `num_chips` chips of one domain; () if this tier is not a torus. Counts inner domains.

        The most cubic box that fits, with priority for boxes that wrap around in every dimension (TPU v4 and v5p: full cubes).
        """
        if not self.torus_shape:
            return ()
        shape = _slice_shape(self.torus_shape, self.wrap_multiple, min(num_chips, math.prod(self.torus_shape)))
        if not shape:
            fits = " x ".join(str(dim) for dim in self.torus_shape)
            raise bad_field("num_chips", num_chips, f"no box of that many chips fits the {fits} torus {self.name}", "use a power of two")
        return shape

    def wraps(self, dim: int) -> bool:
        """Return whether a slice's torus dimension of `dim` chips wraps around."""
        return self.wrap_multiple > 0 and dim % self.wrap_multiple == 0


@session_cache(maxsize=512)
def _slice_shape(torus_shape: tuple[int, ...], wrap_multiple: int, num_chips: int) -> tuple[int, ...]:
    """Return the best box of `num_chips` inside the torus, shortest dimension first; () if none fits."""
    limits = tuple(sorted(torus_shape))
    boxes = [box for box in _boxes(num_chips, len(limits)) if all(dim <= limit for dim, limit in zip(box, limits, strict=True))]
    if not boxes:
        return ()
    return min(boxes, key=lambda box: (not (wrap_multiple and all(dim % wrap_multiple == 0 for dim in box)), sum(box), box))


def _boxes(volume: int, num_dims: int, least: int = 1) -> list[tuple[int, ...]]:
    """Return all non-decreasing factorizations of `volume` into `num_dims` factors of at least `least`."""
    if num_dims == 1:
        return [(volume,)] if volume >= least else []
    return [
        (factor, *rest)
        for factor in range(least, math.isqrt(volume) + 1)
        if volume % factor == 0
        for rest in _boxes(volume // factor, num_dims - 1, factor)
    ]


def check_tiers(tiers: Sequence[NetworkTier], *, chips_per_node: int) -> None:
    """Check that tier sizes increase and divide, that nodes fit into tiers or vice versa, and that torus shapes span their tiers."""
    if not tiers:
        raise InputError("tiers: empty; give at least one network tier")
    inner_size, inner_name = 1, "one chip"
    for tier in tiers:
        if tier.size % inner_size or (tier.size == inner_size and tier is not tiers[0]):
            raise bad_field(
                f"tier {tier.name}: size",
                tier.size,
                f"must be a larger multiple of {inner_size}, the size of {inner_name}",
                "count inner tiers in",
            )
        if tier.torus_shape and math.prod(tier.torus_shape) * inner_size != tier.size:
            raise bad_field(
                f"tier {tier.name}: torus_shape",
                tier.torus_shape,
                f"its product times {inner_size} must be size={tier.size}",
                "correct one of the two",
            )
        inner_size, inner_name = tier.size, tier.name
    if chips_per_node < 1:
        raise bad_field("chips_per_node", chips_per_node, "must be at least 1", "count the chips of one host")
    for tier in tiers:
        if tier.size % chips_per_node and chips_per_node % tier.size:
            raise bad_field(
                "chips_per_node",
                chips_per_node,
                f"must divide size={tier.size} of tier {tier.name} or be a multiple of it",
                "correct one of the two",
            )
