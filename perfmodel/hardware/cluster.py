"""A cluster: chips of one kind, and the network tiers between them."""

import dataclasses
import math
from dataclasses import dataclass

from perfmodel.errors import bad_field
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.network import Link, NetworkTier, Topology, check_tiers

# A scale-out fabric may grow to this many chips before its file must say more.
MAX_SCALE_OUT_CHIPS = 16384


@dataclass(slots=True, frozen=True, kw_only=True)
class Cluster:
    """Chips and their network.

    num_chips       of the job at hand; `with_chips` gives another number
    chips_per_node  chips of one host; not the scale-up domain (GB200: 4 and 72)
    tiers           innermost first; the last one covers everything
    """

    name: str
    chip: Chip
    num_chips: int
    chips_per_node: int
    tiers: tuple[NetworkTier, ...]
    source: str = ""
    notes: str = ""
    title: str = ""
    provenance: str = "recalled"

    def __post_init__(self) -> None:
        check_tiers(self.tiers, chips_per_node=self.chips_per_node)
        n, node, largest = self.num_chips, self.chips_per_node, self.max_chips
        if n < 1:
            raise bad_field("num_chips", n, "must be at least 1")
        if n > largest:
            raise bad_field("num_chips", n, f"cluster {self.name} has at most {largest} chips", "use fewer chips or another cluster")
        if n > node and n % node:
            below = n - n % node
            above = f" or {below + node}" if below + node <= largest else ""
            raise bad_field("num_chips", n, f"must be a multiple of chips_per_node={node}, or less than one node", f"use {below}{above}")
        inner_size = 1
        for tier in self.tiers:
            if tier.torus_shape:
                if n > tier.size and n % tier.size:
                    raise bad_field("num_chips", n, f"more than one {tier.name} domain takes whole domains of {tier.size} chips")
                tier.slice_shape(max(min(n, tier.size) // inner_size, 1))
            inner_size = tier.size

    @property
    def max_chips(self) -> int:
        """The largest number of chips that the outermost tier holds."""
        return self.tiers[-1].size

    @property
    def scale_up_size(self) -> int:
        """Chips of one scale-up domain: the largest tier below the scale-out fabric (the whole cluster where it has none)."""
        inner = [tier.size for tier in self.tiers if not self.is_scale_out(tier)]
        return inner[-1] if inner else 1

    def is_scale_out(self, tier: NetworkTier) -> bool:
        """Whether `tier` is the fabric between nodes: a fat tree, or one switch beyond the node around a tier that holds whole nodes.

        A switch that is the innermost tier is scale-up however many nodes it spans (NVL72), and so is one that stays within the node.
        """
        if tier.topology is not Topology.SWITCH or tier is not self.tiers[-1] or len(self.tiers) == 1:
            return tier.topology is Topology.FAT_TREE
        return tier.size > self.chips_per_node and self.tiers[-2].size >= self.chips_per_node

    def with_chips(self, num_chips: int) -> "Cluster":
        """The same cluster with another number of chips: a part of a node, or whole nodes, up to `max_chips`."""
        return dataclasses.replace(self, num_chips=num_chips)


def make_cluster(
    chip: Chip, *, num_chips: int, chips_per_node: int | None = None, inter_node_bandwidth_per_chip: float | None = None
) -> Cluster:
    """A cluster of any size around one chip, from the chip's usual links; `cluster_of` is the same by the chip's name.

    chips_per_node                 None = as usual for the chip
    inter_node_bandwidth_per_chip  one direction; None = the chip's usual NICs   [byte/s]

    Where a node is smaller or larger than usual, a scale-up domain that is one node (A100: 8 and 8) changes with it, and one that spans
    nodes (GB200, TPU) stays.
    """
    if not chip.default_tiers:
        raise bad_field("chip", chip.name, "does not say how it is usually connected", "add scale_up and scale_out to its file")
    node = chip.chips_per_node if chips_per_node is None else chips_per_node
    if node < 1:
        raise bad_field("chips_per_node", node, "must be at least 1")
    *inner, fabric = chip.default_tiers
    tiers: list[NetworkTier] = []
    for tier in inner:
        if tier.size == chip.chips_per_node and node != tier.size:
            if node == 1 or tier.torus_shape:
                continue
            tier = dataclasses.replace(tier, size=node)
        if tiers and (tier.size <= tiers[-1].size or tier.size % tiers[-1].size):
            continue
        tiers.append(tier)
    domain = math.lcm(node, tiers[-1].size if tiers else 1)
    size = domain * math.ceil(max(num_chips, MAX_SCALE_OUT_CHIPS) / domain)
    if inter_node_bandwidth_per_chip is not None:
        rate = inter_node_bandwidth_per_chip
        link = Link(bandwidth=rate, pair_bandwidth=rate, latency=fabric.link.latency)
        source = "scale-out bandwidth as given; latency: " + fabric.source
        fabric = dataclasses.replace(fabric, link=link, source=source)
    tiers.append(dataclasses.replace(fabric, size=size))
    return Cluster(
        name=f"{chip.name}-x{num_chips}",
        chip=chip,
        num_chips=num_chips,
        chips_per_node=node,
        tiers=tuple(tiers),
        title=f"{num_chips} x {chip.title or chip.name}",
        source=f"usual links of {chip.name}: {chip.source}",
        provenance=chip.provenance.get("scale_up", "recalled"),
    )
