"""A cluster: chips of one kind, and the network tiers between them."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.fabric import Link, NetworkTier, Topology, check_tiers

# Maximum size of a scale-out fabric if its file does not state a larger one.
MAX_SCALE_OUT_CHIPS = 16384

# Latencies of links given by their rate alone: one hop of NVLink and of InfiniBand, from NCCL's tuning tables.
_STATED_SCALE_UP_LATENCY = 0.6e-6
_STATED_SCALE_OUT_LATENCY = 2.7e-6


@dataclass(slots=True, frozen=True, kw_only=True)
class Cluster:
    """Chips and their network.

    num_chips       chips of the current job; `with_chips` sets another number
    chips_per_node  chips per host; not the scale-up domain (GB200: 4 and 72)
    tiers           innermost first; the last one covers everything
    largest_job     largest job in chips if it is smaller than the last tier; 0 = no such limit
    pools           one cluster per kind of chips, in the order of the ranks (`hardware/cluster_text.py`); chip, node and tiers are
                    then those of the first pool
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
    largest_job: int = 0
    pools: "tuple[Cluster, ...]" = ()

    def __post_init__(self) -> None:
        check_tiers(self.tiers, chips_per_node=self.chips_per_node)
        if self.pools:
            return  # each pool is already checked
        n, node, largest = self.num_chips, self.chips_per_node, self.max_chips
        if not isinstance(n, int) or isinstance(n, bool):
            raise bad_field("num_chips", repr(n), "must be a whole number of at least 1", "write 64")
        if n < 1:
            raise bad_field("num_chips", n, "must be at least 1", "say how many chips the job runs on")
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
                    raise bad_field(
                        "num_chips",
                        n,
                        f"more than one {tier.name} domain takes whole domains of {tier.size} chips",
                        f"use {n - n % tier.size}",
                    )
                tier.slice_shape(max(min(n, tier.size) // inner_size, 1))
            inner_size = tier.size

    def __hash__(self) -> int:
        return hash((self.name, self.num_chips))

    @property
    def max_chips(self) -> int:
        """Largest number of chips: the size of the outermost tier."""
        return self.tiers[-1].size

    def mean_chip(self, value: Callable[[Chip], float]) -> float:
        """Return the mean of a number over the chips of all pools; 0 if a chip's file does not state it."""
        pools = self.pools or (self,)
        values = [value(pool.chip) for pool in pools]
        return sum(pool.num_chips * item for pool, item in zip(pools, values, strict=True)) / self.num_chips if all(values) else 0.0

    def is_scale_out(self, tier: NetworkTier) -> bool:
        """Return whether `tier` is the fabric between nodes: a fat tree, or one switch around a tier of full nodes.

        A switch that is the innermost tier is scale-up, no matter how many nodes it spans (NVL72). So is one inside the node.
        """
        if tier.topology is not Topology.SWITCH or tier is not self.tiers[-1] or len(self.tiers) == 1:
            return tier.topology is Topology.FAT_TREE
        return tier.size > self.chips_per_node and self.tiers[-2].size >= self.chips_per_node

    def with_chips(self, num_chips: int) -> "Cluster":
        """Return the same cluster with another number of chips: a part of a node, or full nodes.

        A fat tree may exceed its size: it is extended with the same bandwidth per chip and the same latency, and
        `largest_job` keeps the size that its source states. Other outermost tiers end at `max_chips`.
        """
        count, fabric = _count(num_chips, "num_chips"), self.tiers[-1]
        if self.pools:
            if count != self.num_chips:
                raise bad_field("chips", count, f"{self.name} has {self.num_chips}", "leave it out, or change the numbers of its pools")
            return self
        if count <= fabric.size or count % self.chips_per_node or fabric.topology is not Topology.FAT_TREE:
            return dataclasses.replace(self, num_chips=count)
        inner = self.tiers[-2].size if len(self.tiers) > 1 else 1
        larger = dataclasses.replace(fabric, size=fabric.size * -(-count // fabric.size) if fabric.size % inner == 0 else count)
        largest = self.largest_job or fabric.size
        return dataclasses.replace(self, num_chips=count, tiers=(*self.tiers[:-1], larger), largest_job=largest)


_UNUSED_RATE = 1e9  # byte/s, network of a single chip without traffic


def make_cluster(
    chip: Chip,
    *,
    num_chips: int | None = None,
    chips_per_node: int | None = None,
    scale_up_bandwidth: float | None = None,
    inter_node_bandwidth_per_chip: float | None = None,
    nics_per_node: int | None = None,
    name: str = "",
) -> Cluster:
    """Return a cluster of any size around one chip, with the chip's usual links; `cluster_of` takes the chip's name.

    num_chips                      None = one node
    chips_per_node                 None = as usual for the chip
    scale_up_bandwidth             one direction inside a node; None = the chip's usual links   [byte/s]
    inter_node_bandwidth_per_chip  one direction; None = the chip's usual NICs                  [byte/s]
    nics_per_node                  NICs that the chips of a node share; None = a chip has its share only

    If a node is smaller or larger than usual, a scale-up domain of exactly one node (A100: 8 and 8) is resized with it. A domain that spans
    nodes (GB200, TPU) keeps its size.
    """
    node = chip.node.chips_per_node if chips_per_node is None else chips_per_node
    node = _count(node, "chips_per_node")
    wanted = node if num_chips is None else _count(num_chips, "num_chips")
    for field, rate in (("scale_up", scale_up_bandwidth), ("inter_node_bandwidth_per_chip", inter_node_bandwidth_per_chip)):
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 1 <= rate <= 1e26):
            raise bad_field(field, shown(rate), "must be a number of bytes a second, 1 at least", "write 5e10")
    *usual, fabric = chip.node.default_tiers if _ends_in_fabric(chip) else (*chip.node.default_tiers, None)
    tiers: list[NetworkTier] = []
    for tier in usual:
        assert tier is not None
        if tier.size == chip.node.chips_per_node and node != tier.size:
            if node == 1 or tier.torus_shape:
                continue
            tier = dataclasses.replace(tier, size=node)
        inner_size = tiers[-1].size if tiers else 1
        if tiers and (tier.size <= inner_size or tier.size % inner_size):
            continue
        if tier.torus_shape and math.prod(tier.torus_shape) * inner_size != tier.size:
            continue  # a torus of domains that this node lacks
        tiers.append(tier)
    if scale_up_bandwidth is not None and node > 1:
        tiers = [_at_rate(tier, scale_up_bandwidth) for tier in tiers] or [_stated_scale_up(node, scale_up_bandwidth)]
    if node > 1 and not tiers:
        raise bad_field("chip", chip.name, "does not say how the chips of a node are joined", "give scale_up too, such as '64 GB/s'")
    if inter_node_bandwidth_per_chip is not None:
        fabric = _fabric(fabric, inter_node_bandwidth_per_chip)
    if fabric is None and not tiers and wanted == 1:  # a single chip needs no network: a node of one
        tiers.append(_stated_scale_up(1, scale_up_bandwidth or _UNUSED_RATE))
    if fabric is None and wanted > (tiers[-1].size if tiers else 0):
        raise bad_field("chip", chip.name, "does not say how nodes are joined", "give scale_out too, such as '400 Gbit/s'")
    if fabric is not None:
        if nics_per_node is not None:
            fabric = dataclasses.replace(fabric, nics_per_node=nics_per_node)
        domain = math.lcm(node, tiers[-1].size if tiers else 1)
        size = domain * max(math.ceil(max(wanted, MAX_SCALE_OUT_CHIPS) / domain), 2 if tiers else 1)
        tiers.append(dataclasses.replace(fabric, size=size))
    return Cluster(
        name=name or f"{chip.name}-x{wanted}",
        chip=chip,
        num_chips=wanted,
        chips_per_node=node,
        tiers=tuple(tiers),
        title=f"{chip.title or chip.name}, {node} a node",
        source=f"usual links of {chip.name}: {chip.source}",
        provenance=chip.provenance.get("scale_up", "recalled"),
    )


def _count(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
        raise bad_field(field, shown(value), "must be a whole number of at least 1", "write 8")
    return value


def _ends_in_fabric(chip: Chip) -> bool:
    """Return whether the last tier in a chip's file connects nodes."""
    tiers = chip.node.default_tiers
    if not tiers or tiers[-1].topology is Topology.FAT_TREE:
        return bool(tiers)
    return len(tiers) > 1 and tiers[-1].topology is Topology.SWITCH and tiers[-2].size >= chip.node.chips_per_node


def _at_rate(tier: NetworkTier, bandwidth: float) -> NetworkTier:
    """Return the tier with links of that rate. A rate above a card's PCIe bandwidth implies a switch like NVLink."""
    if tier.topology is Topology.PCIE_TREE and bandwidth > tier.link.bandwidth:
        return _stated_scale_up(tier.size, bandwidth)
    pair = bandwidth * tier.link.pair_bandwidth / tier.link.bandwidth
    link = Link(bandwidth=bandwidth, pair_bandwidth=pair, latency=tier.link.latency)
    return dataclasses.replace(tier, link=link, source="bandwidth as given; the rest: " + tier.source)


def _stated_scale_up(node: int, bandwidth: float) -> NetworkTier:
    return NetworkTier(
        name="scale-up",
        topology=Topology.SWITCH,
        size=node,
        link=Link(bandwidth=bandwidth, pair_bandwidth=bandwidth, latency=_STATED_SCALE_UP_LATENCY),
        source="bandwidth as given; latency as NVLink's, assumed",
    )


def _fabric(usual: NetworkTier | None, bandwidth: float) -> NetworkTier:
    """Return the fabric between nodes with the given NIC bandwidth; the rest as usual for the chip, else assumed."""
    latency = usual.link.latency if usual else _STATED_SCALE_OUT_LATENCY
    link = Link(bandwidth=bandwidth, pair_bandwidth=bandwidth, latency=latency)
    if usual is not None:
        return dataclasses.replace(usual, link=link, source="scale-out bandwidth as given; latency: " + usual.source)
    source = "bandwidth as given; full bisection and InfiniBand's latency assumed"
    return NetworkTier(name="fabric", topology=Topology.FAT_TREE, size=MAX_SCALE_OUT_CHIPS, link=link, source=source)
