"""Time of a collective on nested network tiers: the cheapest of ring, tree, hierarchical and one-shot.

Bandwidth is per chip, so concurrent groups on the chips of one node share its NICs implicitly. If chips share a NIC and only some of
them send (`lone_rate`), these get more. All functions are elementwise on broadcast arrays; a group of one rank takes exactly 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.compute import table_entries
from perfmodel.cost.link_rates import LinkRates
from perfmodel.cost.machine import Machine
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.hardware.calibration import COLLECTIVE_CODE

Array = NDArray[np.float64]

__all__ = ["COLLECTIVE_CODE", "CollectiveKind", "collective_time"]


def collective_time(
    kind: CollectiveKind | NDArray[np.integer],
    num_bytes: Column,
    *,
    group_size: Column,
    inside: Sequence[Column],
    machine: Machine,
    exchanged: Sequence[Column] | None = None,
) -> Any:
    """Return the time of one collective of a group, alone on its links. [s]

    t = sum over crossed tiers of a  +  min(sum h_ring a1, sum h_tree a_tree)  +  max over tiers of (V_i / B_i + c (V_i / MiB)^x)
        + sum over crossed tiers of  l L_i s(V / n / v_l) + J s(V / n / v_J),   s(x) = x^2 / (1 + x^2)
    L_i = a + min(h_ring a1, h_tree a_tree): the tier's own latency

    V_i also counts p g V / n, the rank's own chunk. A ring that leaves an inner domain takes `inner_hop_time` more for each hop inside.

    kind        a kind, or an array of codes (`COLLECTIVE_CODE`) that broadcasts against the rest
    num_bytes   V    buffer at full size in the group; of an all-to-all the local buffer                [byte]
    group_size  n    ranks; 2 for a send (1: nothing is sent)                                           [-]
    exchanged   of an all-to-all: for each tier, the share of V that a chip sends there; None: (n_i - n_i-1) / n
    inside      n_i  ranks of the group inside one domain of tier i, innermost first; the last is n     [-]

    With n_-1 = 1 and p passes (all-reduce 2, others 1, `RING_PASSES`), at tier i:
    ring hops n / n_{i-1} - n / n_i, tree levels ceil(log2(n_i / n_{i-1})), and bytes V_i that a chip sends
    ring          p V (n - 1) / n / n_{i-1}     if tier i is crossed: the ranks of an inner domain share the flow through it
    hierarchical  p V (1 / n_{i-1} - 1 / n_i)   the inner tiers reduce before or gather after
    all-to-all    V (n_i - n_{i-1}) / n
    Tiers work at the same time on different chunks: the slowest sets the pace. In one tier all three are p V (n - 1) / n.
    With in-switch reduction (`switch_fraction`), the time of the bytes is at most that of V, whatever n.
    If the library has it (`one_shot_time`), a small all-reduce instead sends V to each of the n - 1 peers at once.
    Full mesh: B_i grows with the peers, min(bandwidth, (n - 1) * pair bandwidth). Torus: see `link_rates._torus_slowdown`.

    Source: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005 (ring, recursive halving and doubling). Base, steps or ramp and the achieved
    fraction of B_i are fitted to NCCL (or gloo), whose choice of algorithm and protocol they contain. The steps l and J are at the sizes
    where NCCL leaves its low-latency protocol and enters its bulk protocol.
    """
    links = machine.links
    code = COLLECTIVE_CODE[kind] if isinstance(kind, str) else kind
    coefficients = table_entries(links.table, code, has_columns=links.table.ndim > 3)
    if len(inside) == 1:
        return _one_tier_time(num_bytes, group_size, coefficients[:, 0], links, exchanged)
    return _nested_time(num_bytes, group_size, inside, coefficients, links, exchanged)


def send_time(num_bytes: Column, ranks: Column, hop: Sequence[Column], machine: Machine) -> Any:
    """Return the time of a send from one pipeline rank to the next, averaged over neighbouring pairs; 0 with one rank. [s]

    t = sum over tiers i of  (s_i - s_{i-1}) * send through tier i
    s_i: share of the pairs that lie in one domain of tier i, hop_i - 1; of the outermost 1
    Through shared NICs (`lone_rate`), the send takes a chip's rate times the pipeline ranks of its node.

    hop   of each tier (`LayoutGrid.hop`)
    """
    pair = np.where(ranks > 1, 2.0, 1.0)
    total: Any = 0.0
    nearer: Any = 0.0
    for tier in range(len(hop)):
        together = hop[tier] - 1.0 if tier < len(hop) - 1 else 1.0
        if np.any(together > nearer):
            inside = [np.ones_like(pair)] * tier + [pair] * (len(hop) - tier)
            sent = num_bytes / lone_rate(ranks, hop, machine) if machine.links.lone > 1.0 and tier == len(hop) - 1 else num_bytes
            time = collective_time(CollectiveKind.SEND_RECV, sent, group_size=pair, inside=inside, machine=machine)
            total = total + (together - nearer) * time
        nearer = together
    return total


def lone_rate(ranks: Column, hop: Sequence[Column], machine: Machine) -> Any:
    """Return the rate between nodes of a chip over its share of the node's NICs, if one pipeline rank of the node sends. [-]

    n / ceil(n / m): the other m - 1 pipeline ranks of the node leave the NICs to it; at most the rate of one NIC

    hop   of each tier (`LayoutGrid.hop`)
    """
    if machine.links.lone == 1.0:
        return 1.0
    nodes = 1.0 + (2.0 - hop[-2]) * (ranks - 1.0)
    return np.where(nodes > 1.0, np.minimum(ranks / nodes, machine.links.lone), 1.0)


def _one_tier_time(num_bytes: Column, group_size: Column, coefficients: Array, links: LinkRates, exchanged: Sequence[Column] | None) -> Any:
    base, hop, tree, inverse_bandwidth, ramp, exponent, nested, ring, pairwise, one_shot, _, in_switch, *protocols = coefficients
    n = group_size
    peers = n - 1.0
    crossed = np.minimum(peers, 1.0)
    latency = base * crossed + np.minimum(peers * hop, _tree_levels(n) * tree)
    sent = (nested + ring + pairwise) * num_bytes * (peers / n)
    if exchanged is not None:
        sent = np.where(pairwise > 0, pairwise * num_bytes * exchanged[0], sent)
    if links.stepped:
        chunk = num_bytes / n
        latency = latency + _protocol_time(chunk, crossed, latency, protocols)
        sent = sent + protocols[0] * (crossed * chunk)
    seconds = inverse_bandwidth
    if links.has_slowdown:
        seconds = seconds * _tier_slowdown(n, pairwise, links, 0)
    moving = sent * seconds
    if links.has_in_switch:
        moving = np.minimum(moving, num_bytes * in_switch)
    time = latency + moving
    if links.has_ramp:
        time = time + ramp * np.power(sent, exponent)
    if links.has_one_shot:
        time = np.minimum(time, crossed * one_shot + (peers * num_bytes) * seconds)
    return time


def _nested_time(
    num_bytes: Column,
    group_size: Column,
    inside: Sequence[Column],
    coefficients: Array,
    links: LinkRates,
    exchanged: Sequence[Column] | None,
) -> Any:
    n = group_size
    shape = np.broadcast_shapes(np.shape(n), *map(np.shape, inside))
    num_dims = max(len(shape), coefficients.ndim - 2, np.ndim(num_bytes))
    coefficients = coefficients.reshape(*coefficients.shape[:2], *(1,) * (num_dims + 2 - coefficients.ndim), *coefficients.shape[2:])
    base, hop, tree, inverse_bandwidth, ramp, exponent, nested, ring, pairwise, one_shot, inner_hop, in_switch = coefficients[:12]
    members = np.empty((len(inside) + 1, *(1,) * (num_dims - len(shape)), *shape))
    members[0] = 1.0
    for tier, count in enumerate(inside):
        members[tier + 1] = count
    inner, outer = members[:-1], members[1:]
    parts = n / members
    hops = parts[:-1] - parts[1:]
    branches = outer / inner
    crossed = np.minimum(branches - 1.0, 1.0)
    share = 1.0 / members
    apart = (outer - inner) / n if exchanged is None else np.stack(np.broadcast_arrays(*exchanged))
    flow = ring * (crossed * ((n - 1.0) / n) * share[:-1]) + nested * (share[:-1] - share[1:]) + pairwise * apart
    sent = flow * num_bytes
    ring_latency = _total(hops * hop) + _total(hops[:-1] * (inner_hop[1:] * crossed[1:]))
    levels = _tree_levels(branches)
    latency = _total(base * crossed) + np.minimum(ring_latency, _total(levels * tree))
    chunk = num_bytes / n
    for tier in links.stepped:
        steps = coefficients[12:, tier]
        inner_latency = base[tier] * crossed[tier] + np.minimum(hops[tier] * hop[tier], levels[tier] * tree[tier])
        latency = latency + _protocol_time(chunk, crossed[tier], inner_latency, steps)
        sent[tier] += steps[0] * (crossed[tier] * chunk)
    seconds = inverse_bandwidth
    if links.has_slowdown:
        slowdowns = [_tier_slowdown(branches[tier], pairwise[tier], links, tier) for tier in range(len(inside))]
        seconds = seconds * np.stack(np.broadcast_arrays(*slowdowns))
    moving = sent * seconds
    if links.has_in_switch:
        moving = np.minimum(moving, num_bytes * in_switch)
    if links.has_ramp:
        moving = moving + ramp * np.power(sent, exponent)
    time = latency + moving.max(axis=0)  # a maximum is exact in any order
    if links.has_one_shot:
        time = np.minimum(time, _total(crossed * one_shot) + ((n - 1.0) * num_bytes) * (crossed * seconds).max(axis=0))
    return time


def _protocol_time(chunk: Column, crossed: Column, latency: Column, steps: Sequence[Any] | Array) -> Any:
    """Return the steps between protocols of one tier: l L s(chunk / v_l) + J s(chunk / v_J). [s]"""
    _, step, step_square, bulk, bulk_square = steps
    square = chunk * chunk
    return latency * step * (square / (square + step_square)) + crossed * bulk * (square / (square + bulk_square))


def _total(by_tier: Array) -> Array:
    """Sum over the tiers in order: the order of numpy's own sum depends on the shape."""
    total = by_tier[0]
    for values in by_tier[1:]:
        total = total + values
    return total


def _tree_levels(branches: Column) -> Any:
    """Return ceil(log2(branches)), exactly: the binary exponent of the number just below. [-]"""
    return np.frexp(branches - 0.5)[1]


def _tier_slowdown(members: Column, pairwise: Column, links: LinkRates, tier: int) -> Any:
    """Return the slow-down of a torus or a full mesh by the members of a group in a domain; 1 on a switch. [-]

    In a full mesh a chip reaches each peer by its own link: with few peers the other links idle.
    """
    rings, exchanges = links.torus[tier]
    if rings.size:
        index = np.minimum(np.asarray(members).astype(np.int64), rings.size - 1)
        return np.where(pairwise > 0, exchanges[index], rings[index])
    return np.maximum(links.mesh[tier] / np.maximum(members - 1.0, 1.0), 1.0)
