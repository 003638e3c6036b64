"""Rates of a cluster's links: floats by parameter, tier and collective, measured if there are models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.hardware.calibration import RAMP_BYTES, SCALE_OUT, SCALE_UP, Calibration, CollectiveModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import STAGED_FRACTION, NetworkTier, Topology
from perfmodel.hardware.serving_kernels import ONE_SHOT, TWO_SHOT

if TYPE_CHECKING:
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.hardware.fabric import NetworkTier

Array = NDArray[np.float64]

NEVER = 1e30
"""Latency of an algorithm that the library does not have: never the cheapest, and still 0 when multiplied by no hops. [s]"""

DEFAULT_LINK_FRACTION = 0.8
"""Share of a link's bandwidth that a collective reaches without measurements: NCCL on NVLink and InfiniBand, large messages, typically
.75-.9.
"""

CHANNEL_BANDWIDTH = 12.5e9
"""[byte/s] Link bandwidth that one channel fills: 24 channels on an A100's NVLink of 300 GB/s, 12 on a V100's of 150, 2 on PCIe 3.0 x16."""

MOST_CHANNELS = 24.0
"""Channels of a ring over NVLink on A100, H100 and later."""

FEWEST_CHANNELS = 2.0


def channels_of(bandwidth: Column) -> Any:
    """Return the number of channels of a communicator. bandwidth: of one chip's links, one direction."""
    return np.minimum(np.maximum(np.ceil(bandwidth / CHANNEL_BANDWIDTH), FEWEST_CHANNELS), MOST_CHANNELS)


# For a collective without measurements on a tier: the nearest collectives, in order.
_NEAREST_COLLECTIVE: Mapping[CollectiveKind, tuple[CollectiveKind, ...]] = MappingProxyType(
    {
        CollectiveKind.ALL_GATHER: (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE),
        CollectiveKind.REDUCE_SCATTER: (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE),
        CollectiveKind.ALL_REDUCE: (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER),
        CollectiveKind.ALL_TO_ALL: (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
        CollectiveKind.SEND_RECV: (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL),
    }
)

RING_PASSES: Mapping[CollectiveKind, float] = MappingProxyType(
    {
        CollectiveKind.ALL_REDUCE: 2.0,
        CollectiveKind.REDUCE_SCATTER: 1.0,
        CollectiveKind.ALL_GATHER: 1.0,
        CollectiveKind.ALL_TO_ALL: 1.0,
        CollectiveKind.SEND_RECV: 2.0,
    }
)
"""Wire bytes of a rank over V (n - 1) / n; a send has n = 2 ranks and moves all of V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemoryRates:
    """`SmallAllReduceModel`s in SI units: (base [s], each peer [s], [s/byte]) of both kernels.

    most_ranks   chips of the innermost domain, beyond which peer memory cannot be read; 1 if it cannot be read at all
    """

    one_shot: tuple[float, float, float]
    two_shot: tuple[float, float, float]
    most_ranks: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkRates:
    """Tables by parameter, tier and collective code; for columns of clusters also by cluster. `LINK_ROWS` names the rows of `table`.

    mesh         for each tier, links to distinct peers that together make the bandwidth (1 on a switch)
    torus        for each tier, (slow-down of rings, of all-to-alls) by number of members; empty arrays if it is no torus
    has_slowdown some tier is a full mesh or a torus
    has_one_shot, has_in_switch, has_ramp   some entry has a one-shot algorithm, in-switch reduction, a ramp
    stepped      tiers with steps between protocols
    lone         rate of a chip whose node sends nothing else, over its share of the NICs; 1 without shared NICs
    peer_memory  custom all-reduces of ranks that read each other's memory
    """

    table: Array
    mesh: tuple[Column, ...]
    torus: tuple[tuple[Array, Array], ...]
    has_slowdown: bool
    has_one_shot: bool
    has_in_switch: bool
    has_ramp: bool
    stepped: tuple[int, ...]
    peer_memory: PeerMemoryRates
    lone: float = 1.0

    def flat(self) -> LinkRates:
        """Return the rates of a library that has flat rings only: all bytes of nested algorithms go around one ring."""
        nested, ring = (LINK_ROWS.index(name) for name in ("nested", "ring"))
        table = self.table.copy()
        table[ring] += table[nested]
        table[nested] = 0.0
        return replace(self, table=table)


LINK_ROWS = (
    "base",
    "hop",
    "tree",
    "inverse_bandwidth",
    "ramp",
    "exponent",
    "nested",
    "ring",
    "pairwise",
    "one_shot",
    "inner_hop",
    "in_switch",
    "own",
    "step",
    "step_bytes_squared",
    "bulk",
    "bulk_bytes_squared",
)


def tier_kind(cluster: Cluster, tier: NetworkTier) -> str:
    """Return scale-out for the fabric between nodes, and scale-up for every tier inside it. A cluster may lack either."""
    return SCALE_OUT if cluster.is_scale_out(tier) else SCALE_UP


def link_rates(cluster: Cluster, calibration: Calibration) -> LinkRates:
    """Return the rates of the tiers of a cluster, from measured models or from the links of its file."""
    columns = np.broadcast_shapes(*(np.shape(x) for tier in cluster.tiers for x in (tier.link.bandwidth, tier.link.latency)))
    table = np.zeros((len(LINK_ROWS), len(cluster.tiers), len(CollectiveKind), *columns))
    mesh, torus = [], []
    domain = 1
    for index, tier in enumerate(cluster.tiers):
        models = tier_models(cluster, tier, calibration)
        bandwidth = calibration.peaks.get(f"{tier_kind(cluster, tier)}_bandwidth", tier.link.bandwidth) / tier.oversubscription
        if not (models or tier.peer_to_peer):
            bandwidth = bandwidth * STAGED_FRACTION
        for code, kind in enumerate(CollectiveKind):
            model, passes = _collective_model(models, kind, tier.link.latency, is_inside=tier_kind(cluster, tier) == SCALE_UP)
            is_pairwise = kind is CollectiveKind.ALL_TO_ALL
            is_nested = model.nested and not is_pairwise and kind is not CollectiveKind.SEND_RECV
            values = (
                model.base_time,
                model.hop_time,
                _or_never(model.tree_hop_time),
                1.0 / (bandwidth * model.bandwidth_fraction),
                model.ramp_time / RAMP_BYTES**model.ramp_exponent,
                model.ramp_exponent,
                passes * is_nested,
                passes * (not is_nested and not is_pairwise),
                passes * is_pairwise,
                _or_never(model.one_shot_time),
                model.inner_hop_time,
                1.0 / (bandwidth * model.switch_fraction) if model.switch_fraction > 0 else NEVER,
                passes * model.own_share,
                model.step_share,
                model.step_bytes**2,
                model.bulk_time,
                model.bulk_bytes**2,
            )
            for row, value in enumerate(values):
                table[row, index, code] = value
        mesh.append(tier.link.bandwidth / tier.link.pair_bandwidth if tier.topology is Topology.FULL_MESH else 1.0)
        torus.append(_torus_slowdown(tier, max(min(cluster.num_chips, tier.size) // domain, 1)))
        domain = tier.size
    rows = dict(zip(LINK_ROWS, table, strict=True))
    return LinkRates(
        table=table,
        mesh=tuple(mesh),
        torus=tuple(torus),
        has_slowdown=any(np.max(links) > 1 for links in mesh) or any(rings.size for rings, _ in torus),
        has_one_shot=bool((rows["one_shot"] < NEVER).any()),
        has_in_switch=bool((rows["in_switch"] < NEVER).any()),
        has_ramp=bool(rows["ramp"].any()),
        stepped=tuple(
            int(tier) for tier in np.flatnonzero((rows["own"] + rows["step"] + rows["bulk"]).reshape(len(cluster.tiers), -1).any(axis=1))
        ),
        peer_memory=_peer_memory_rates(cluster, calibration),
        lone=max(cluster.tiers[-2].size / nics, 1.0) if len(cluster.tiers) > 1 and (nics := cluster.tiers[-1].nics_per_node) else 1.0,
    )


def _peer_memory_rates(cluster: Cluster, calibration: Calibration) -> PeerMemoryRates:
    tier = cluster.tiers[0]
    bandwidth = calibration.peaks.get(f"{SCALE_UP}_bandwidth", tier.link.bandwidth)
    is_linked = tier.peer_to_peer and tier.topology in (Topology.SWITCH, Topology.FULL_MESH) and not cluster.is_scale_out(tier)
    models = calibration.kernels.serving.with_typical().small_all_reduce
    one_shot, two_shot = (
        (model.base_time, model.peer_time, 1.0 / (bandwidth * model.bandwidth_fraction)) for model in (models[ONE_SHOT], models[TWO_SHOT])
    )
    return PeerMemoryRates(one_shot=one_shot, two_shot=two_shot, most_ranks=float(tier.size) if is_linked else 1.0)


def _or_never(time: Column) -> Any:
    return np.where(np.equal(time, 0.0), NEVER, time)


def tier_models(cluster: Cluster, tier: NetworkTier, calibration: Calibration) -> Mapping[CollectiveKind, CollectiveModel]:
    """Return the measured models that apply to `tier`. Those of a switch do not apply to a related chip's mesh, torus or PCIe tree."""
    kind = tier_kind(cluster, tier)
    if kind == SCALE_UP and cluster.chip.name not in calibration.chips and tier.topology is not Topology.SWITCH:
        return {}
    return with_latency(calibration.kernels.collectives.get(kind, {}), stated_latency_difference(cluster, tier), RING_PASSES)


def _collective_model(
    models: Mapping[CollectiveKind, CollectiveModel], kind: CollectiveKind, latency: Any, *, is_inside: bool
) -> tuple[CollectiveModel, float]:
    """Return the measured model of `kind`, else the nearest collective's, else alpha-beta on the link; and the number of ring passes."""
    passes = RING_PASSES[kind]
    if kind in models:
        return models[kind], passes
    for near in _NEAREST_COLLECTIVE[kind]:
        if near in models:
            model = models[near]
            scale = 1.0 if kind is CollectiveKind.SEND_RECV else passes / RING_PASSES[near]
            return replace(model, hop_time=model.hop_time * scale, tree_hop_time=model.tree_hop_time * scale), passes
    # Thakur, Rabenseifner & Gropp 2005: a ring pass takes n - 1 hops, recursive halving or doubling log2 n; a send is one hop.
    is_exchange = kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV)
    hop_time = latency if is_exchange else passes * latency
    return (
        CollectiveModel(
            hop_time=hop_time,
            bandwidth_fraction=DEFAULT_LINK_FRACTION,
            tree_hop_time=0.0 if is_exchange else hop_time,
            one_shot_time=latency if kind is CollectiveKind.ALL_REDUCE and is_inside else 0.0,
            nested=True,
        ),
        passes,
    )


def _torus_slowdown(tier: NetworkTier, num_chips: int) -> tuple[Array, Array]:
    """Return the slow-down over the link's full bandwidth by number of members, of rings and of all-to-alls; empty without a torus. [-]

    A group is assumed to fill the dims of the job's slice in order. A chip has two links in each of D dims, and `bandwidth` is all of them
    together. Rings run in all dims that the group spans at once, in both directions. A dim that does not wrap has half the bandwidth,
    because data that leaves at one end must return through the same links. In an all-to-all over l chips of a dim, a link carries l/4 times
    what a chip sends, over two links (l/2 in the middle of a dim that does not wrap). Its time therefore grows with the longest dim.

    Source: Jouppi et al., ISCA 2023 (TPU v4); Google Cloud TPU documentation (a dim wraps when it is a multiple of 4, on v5e and
    v6e when it is 16).
    """
    if not tier.torus_shape:
        return np.empty(0), np.empty(0)
    shape = tier.slice_shape(num_chips)
    members = np.arange(np.prod(shape) + 1.0)
    left, share, longest = members.copy(), np.zeros_like(members), np.zeros_like(members)
    for length in shape:
        span = np.minimum(left, length)
        wraps = (span == length) & tier.wraps(length)
        share += np.where(span > 1, np.where(wraps, 1.0, 0.5), 0.0)
        longest = np.maximum(longest, np.where(span > 1, np.where(wraps, span / 4, span / 2), 0.0))
        left = np.ceil(left / length)
    ring = len(tier.torus_shape) / np.maximum(share, 0.5)
    pairwise = np.maximum(ring, len(tier.torus_shape) * longest * members / np.maximum(members - 1, 1))
    return ring, pairwise


# --- latency stated by the cluster's file -----------------------------------------------------------------------------


def stated_latency_difference(cluster: Cluster, tier: NetworkTier) -> Column:
    """Return the extra latency of a hop of `tier` over a hop of the chip's default links there. [s]

    The chip's file lists the default links; without them the result is 0. It is negative if the cluster's links are faster.
    """
    is_out = cluster.is_scale_out(tier)
    usual = [default for default in cluster.chip.node.default_tiers if (default.topology is Topology.FAT_TREE) == is_out]
    inner = [other for other in cluster.tiers if cluster.is_scale_out(other) == is_out]
    if not usual:
        return 0.0
    return tier.link.latency - usual[min(inner.index(tier), len(usual) - 1)].link.latency


def with_latency(
    models: Mapping[CollectiveKind, CollectiveModel], difference: Column, passes: Mapping[CollectiveKind, float]
) -> Mapping[CollectiveKind, CollectiveModel]:
    """Return the models for links on which each hop takes `difference` longer; if negative, shorter than measured, down to 0.

    passes  ring hops for each hop of the model (an all-reduce has two ring passes)
    """
    if np.all(difference == 0.0):
        return models

    def longer(time: float, by: Column) -> Any:
        return np.maximum(time + by, 1e-12) if time else 0.0  # 0: the library has no such algorithm

    changed = {}
    for kind, model in models.items():
        hop: Any = difference * (1.0 if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV) else passes[kind])
        changed[kind] = replace(
            model,
            hop_time=cast(float, np.maximum(model.hop_time + hop, 0.0)),  # or a column
            tree_hop_time=longer(model.tree_hop_time, hop),
            one_shot_time=longer(model.one_shot_time, difference),
        )
    return changed
