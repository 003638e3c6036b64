"""Text of a cluster, as used in flags, plan files and `load_cluster`: of several kinds of chips, or named after its chip.

8@dgx-h100+8@dgx-a100                                              two kinds of chips
56@dgx-h100+8@dgx-h100*80%                                         one slow node
h20-96gb                                                           default node and links of the chip's file
h20-96gb per-node=8 scale-up=450 GB/s scale-out=400 Gbit/s         as given; rates are one direction of one chip
t4-16gb per-node=4 scale-out=12.5 Gbit/s nics=1                    the four chips of a node share a NIC of 50 Gbit/s

A cluster file may state its pools too (`MixedClusterFile` in `hardware/schemas.py`). Each pool is a number of chips, a cluster or chip
by name or file, and optionally the share of its rates that it reaches. Ranks are assigned in the order of the pools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from perfmodel.foundation.errors import InputError, bad_field, plain_text, shown
from perfmodel.foundation.units import exact_quantity, parse_quantity
from perfmodel.foundation.values import is_path
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import Link, NetworkTier, Topology

_MIXED = re.compile(r"\s*\d+\s*@")
_NEXT = re.compile(r"\+(?=\s*\d+\s*@)")
_POOL = re.compile(r"(?P<chips>\d+)\s*@\s*(?P<name>.+?)\s*(?:\*\s*(?P<speed>[\d.]+%?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolText:
    """One pool of the text: a number of chips of a cluster or chip, at this share of their rates."""

    chips: int
    name: str
    speed: float = 1.0

    @property
    def speed_text(self) -> str:
        """Suffix such as `*0.8`; empty at full speed."""
        return "" if self.speed == 1.0 else f"*{self.speed:g}"


def is_mixed(text: str) -> bool:
    """Return whether a cluster's text names pools."""
    return _MIXED.match(text) is not None


def chips_of(text: str) -> int:
    """Return the number of chips of all pools in a text."""
    return sum(pool.chips for pool in read_pools(text))


def read_pools(text: str) -> tuple[PoolText, ...]:
    """Parse the pools in a text."""
    pools = []
    for part in _NEXT.split(text):
        pool = _POOL.fullmatch(part.strip())
        if pool is None or not int(pool["chips"]):
            raise bad_field("cluster", part.strip(), "is no pool of chips", "write COUNT@NAME, such as 8@dgx-h100+8@dgx-a100")
        pools.append(PoolText(chips=int(pool["chips"]), name=pool["name"], speed=read_speed(pool["speed"]) if pool["speed"] else 1.0))
    return tuple(pools)


def read_speed(value: str | float) -> float:
    """Parse the share of their rates that the chips of a pool reach."""
    speed = parse_quantity(str(value), "fraction", field="speed")
    if not 0.0 < speed <= 10.0:
        raise bad_field("speed", value, "must be above 0 and at most 10", "write 80% for chips that are a fifth slower")
    return speed


def mixed_cluster(text: str, load: Callable[[str, int], Cluster]) -> Cluster:
    """Return the cluster of the pools in a text. load: returns a cluster by its name, with a number of chips."""
    pools = tuple(make_pool(pool_text, partial(load, pool_text.name)) for pool_text in read_pools(text))
    if len(pools) < 2:
        raise bad_field("cluster", text, "names one pool of chips only", f"use --cluster {pools[0].name} --chips {pools[0].num_chips}")
    return cluster_of_pools(pools, name="+".join(part.strip() for part in _NEXT.split(text)))


def cluster_of_pools(pools: tuple[Cluster, ...], *, name: str, title: str = "", notes: str = "") -> Cluster:
    """Return the cluster of several pools."""
    return replace(
        pools[0],
        name=name,
        title=title or " + ".join(f"{pool.num_chips} {pool.chip.title or pool.chip.name}" for pool in pools),
        num_chips=sum(pool.num_chips for pool in pools),
        source="; ".join(dict.fromkeys(pool.source for pool in pools)),
        notes=notes,
        largest_job=0,
        pools=pools,
    )


def in_proportion(cluster: Cluster, num_chips: int) -> Cluster:
    """Return the cluster with another number of chips, of its pools in the same proportions. Raises InputError."""
    if not cluster.pools or num_chips == cluster.num_chips:
        return cluster.with_chips(num_chips)
    counts = [divmod(pool.num_chips * num_chips, cluster.num_chips) for pool in cluster.pools]
    if any(rest for _, rest in counts):
        raise bad_field("chips", num_chips, f"cannot keep the proportions of {cluster.name}", "use a multiple of its smallest part")
    pools = tuple(pool.with_chips(count) for pool, (count, _) in zip(cluster.pools, counts, strict=True))
    return cluster_of_pools(pools, name="+".join(f"{pool.num_chips}@{pool.name}" for pool in pools), notes=cluster.notes)


def make_pool(text: PoolText, load: Callable[[int], Cluster]) -> Cluster:
    """Return the cluster of a pool, which may use only a part of its last node. load: returns its cluster with a number of chips."""
    node = load(1).chips_per_node
    full_chips = text.chips if text.chips < node else -(-text.chips // node) * node
    cluster = load(full_chips)
    if full_chips != text.chips:
        cluster = replace(cluster, num_chips=text.chips, chips_per_node=math.gcd(text.chips, node))
    if text.speed == 1.0:
        return cluster
    return replace(cluster, name=f"{cluster.name}{text.speed_text}", chip=at_speed(cluster.chip, text.speed))


def at_speed(chip: Chip, speed: float) -> Chip:
    """Return the chip with its compute rates and memory bandwidth scaled by `speed`; links and capacity stay."""
    return replace(
        chip,
        peak_flop_rate={dtype: rate * speed for dtype, rate in chip.peak_flop_rate.items()},
        memory=replace(chip.memory, bandwidth=chip.memory.bandwidth * speed),
    )


def joined_pools(pools: Sequence[Cluster]) -> tuple[Cluster, ...]:
    """Return the pools with the network that connects them: each with the slowest of their outermost links.

    Pools of one host each that together fit into one host (workstations with unequal cards on PCIe) are assumed to share it.
    """
    together = sum(pool.num_chips for pool in pools)
    if all(pool.tiers[0].topology is Topology.PCIE_TREE and together <= pool.tiers[0].size for pool in pools):
        links = [pool.tiers[0].link for pool in pools]
        return tuple(replace(pool, tiers=(_at_most(pool.tiers[0], links),)) for pool in pools)
    links = []
    for pool in pools:
        if not pool.is_scale_out(pool.tiers[-1]):
            rule = "has no network between nodes, by which it could be joined with other chips"
            raise bad_field("cluster", pool.name, rule, f'state it: "{pool.num_chips}@{pool.chip.name} scale-out=100 Gbit/s"')
        links.append(pool.tiers[-1].link)
    return tuple(replace(pool, tiers=(*pool.tiers[:-1], _at_most(pool.tiers[-1], links))) for pool in pools)


def _at_most(tier: NetworkTier, links: Sequence[Link]) -> NetworkTier:
    link = replace(
        tier.link,
        bandwidth=min(peer.bandwidth for peer in links),
        pair_bandwidth=min(peer.pair_bandwidth for peer in links),
        latency=max(peer.latency for peer in links),
    )
    return replace(tier, link=link)


def check_equal_chips(cluster: Cluster) -> None:
    """Raise InputError for a cluster of several kinds of chips where all chips must be equal."""
    if cluster.pools:
        takes = "predict, search, limits, explore, compare, explain, advise, trace, report, export and serve"
        rule = f"has several kinds of chips, which only {takes} take"
        raise bad_field("cluster", cluster.name, rule, f"name one kind, such as {cluster.pools[0].name}")


# --- a cluster named after its chip -----------------------------------------------------------------------------------

_STATED = re.compile(r"(?P<chip>\S.*?)(?P<stated>(?: +(?:per-node|scale-up|scale-out|nics)=[^=]*?)+) *")
_FIELD = re.compile(r" +(per-node|scale-up|scale-out|nics)=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipCluster:
    """A chip with its node and links as given by the user; None: as in the chip's file.

    chip        a name, or the path of a chip file
    per_node    chips per host
    scale_up    one direction of one chip inside a node                [byte/s]
    scale_out   one direction of one chip between nodes                [byte/s]
    nics        NICs that the chips of a node share
    """

    chip: str
    per_node: int | None = None
    scale_up: float | None = None
    scale_out: float | None = None
    nics: int | None = None

    @property
    def text(self) -> str:
        """Text of this cluster in plan files; `chip_cluster` parses it."""
        stated = [self.chip]
        if self.per_node is not None:
            stated.append(f"per-node={self.per_node}")
        for field, rate in (("scale-up", self.scale_up), ("scale-out", self.scale_out)):
            if rate is not None:
                stated.append(f"{field}={exact_quantity(rate, 'bandwidth')}")
        if self.nics is not None:
            stated.append(f"nics={self.nics}")
        return " ".join(stated)


def state_chip_cluster(
    chip: str | Path,
    *,
    per_node: int | str | None = None,
    scale_up: str | float | None = None,
    scale_out: str | float | None = None,
    nics: int | str | None = None,
) -> ChipCluster:
    """Return the cluster from user input: a chip, and rates with units (a bare number is byte/s, in Python only)."""
    name = plain_text(chip).strip()
    if not name:
        raise InputError("chip: is missing; give a name from `perfmodel chips` or the path of a chip file")
    if isinstance(chip, Path) or is_path(name):
        with suppress(OSError, ValueError, RuntimeError):
            name = str(Path(name).resolve())
    return ChipCluster(
        chip=name,
        per_node=None if per_node is None else _count(per_node, "per_node", "how many chips one host has, such as 8"),
        scale_up=_rate(scale_up, "scale_up"),
        scale_out=_rate(scale_out, "scale_out"),
        nics=None if nics is None else _count(nics, "nics", "how many NICs the chips of one host share, such as 1"),
    )


def chip_cluster(text: str) -> ChipCluster | None:
    """Parse the text of `ChipCluster.text`; None for pools and for a text without options, which may still be a chip's name."""
    if is_mixed(text):
        return None
    match = _STATED.fullmatch(text.strip())
    if match is None:
        return None
    _, *parts = _FIELD.split(match["stated"])
    stated = dict(zip(parts[::2], parts[1::2], strict=True))
    if len(stated) < len(parts) // 2:
        raise bad_field("cluster", text, "states the same thing twice", "keep one of the two")
    return state_chip_cluster(
        match["chip"],
        per_node=stated.get("per-node"),
        scale_up=stated.get("scale-up"),
        scale_out=stated.get("scale-out"),
        nics=stated.get("nics"),
    )


def _rate(value: str | float | None, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        rate: float = value
    else:
        rate = parse_quantity(value, "bandwidth", field=field)
    if not 0 < rate < 1e18:
        raise bad_field(field, shown(value), "must be positive and below 1e18 B/s", "give one direction of one chip, such as '450 GB/s'")
    return float(rate)


def _count(value: int | str, field: str, remedy: str) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()) or not 1 <= len(text) <= 6 or int(text) < 1:
        raise bad_field(field, value, "must be a whole number from 1 to 999999", f"write {remedy}")
    return int(text)


def short_name(reference: str) -> str:
    """Return the name of a cluster in tables: the file name for a path, anything else unchanged."""
    if is_mixed(reference):
        return "+".join(f"{pool.chips}@{short_name(pool.name)}{pool.speed_text}" for pool in read_pools(reference))
    stated = chip_cluster(reference)
    if stated is not None:
        return replace(stated, chip=short_name(stated.chip)).text
    return Path(reference).name if "/" in reference else reference


def chips_text(count: int) -> str:
    """Return the number of chips as text."""
    return "1 chip" if count == 1 else f"{count:,} chips"
