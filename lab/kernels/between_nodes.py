"""Collectives between nodes: fits to SimAI, published nccl-tests and Megatron-Core's all-to-alls, as fractions of the NIC's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.kernels.chip_kernels import collective_kernel, collective_of_chip, size_decades
from lab.kernels.chips import ChipTables
from lab.kernels.kernel_fit import EACH_GROUP, KernelFit, Parameter, bare_machine, chosen_rows, columns_of, fit_parameters, joined, micro
from lab.kernels.tables import (
    CollectiveTable,
    published_all_to_all,
    read_collectives,
    read_many_nodes_all_reduce,
    read_published_all_reduce,
    read_simai,
)
from perfmodel.calibrate.fits import Array, rounded
from perfmodel.cost.collectives import collective_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SCALE_OUT, SCALE_UP, CollectiveModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import Link
from perfmodel.hardware.reader import load_cluster

SCALE_OUT_FRACTION = 0.85
"""Share of a NIC's rate for large messages between nodes: SimAI's tables reach .95, EFA clusters .8, InfiniBand in Calculon's A100 system
.9."""

TREE_LEVEL_TIME = 39e-6
"""[s] A level of the tree between nodes, up and down: nccl-tests floors of 44 and 69 us on 2 nodes (1 level), 184 us on 16 (4 levels)."""

NVLINK_OVER_NETWORK_HOP = 3.4 / 14.0
"""Latency of a ring hop inside a node over one between nodes, simple protocol, in NCCL's own tuning table (src/graph/tuning.cc)."""

SIMAI_NIC_BANDWIDTH = 50e9
"""[byte/s] of one chip: SimAI's tables are assumed to use 400 Gbit/s NICs."""

Kernel = KernelFit[CollectiveTable, CollectiveModel]


def between_nodes(folder: Path, tables: ChipTables) -> Iterator[tuple[CollectiveKind, Kernel]]:
    """Yield all-gather, all-reduce and all-to-all, from H100 and H200 tables. tables: of the chip inside the nodes (H100)."""
    cluster = load_cluster("dgx-h100", num_chips=1024)
    inside = {
        kind: collective_kernel(read_collectives(folder, tables.folder, tables.nccl, kind), kind, cluster).model()
        for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
    }
    inside[CollectiveKind.ALL_REDUCE] = with_tree(collective_of_chip(folder, tables, CollectiveKind.ALL_REDUCE, cluster))

    def kernel(
        kind: CollectiveKind, table: CollectiveTable, make: Callable[..., CollectiveModel], *, parts: Mapping[str, slice] | None = None
    ) -> Kernel:
        def predict(model: CollectiveModel, rows: CollectiveTable) -> Array:
            time, scales = np.empty_like(rows.time), columns_of(rows)["link_scale"]
            collectives = {SCALE_UP: {kind: inside[kind]}, SCALE_OUT: {kind: model}}
            for scale in np.unique(scales):
                machine = bare_machine(with_faster_links(cluster, scale), Dtype.BF16, collectives=collectives)
                some = chosen_rows(rows, scales == scale)
                places = [some.ranks_per_node, some.ranks]
                time[scales == scale] = collective_time(kind, some.num_bytes, group_size=some.ranks, inside=places, machine=machine)
            return time

        return KernelFit(
            name=f"scale_out.{kind}",
            table=table,
            groups=size_decades(table),
            fit=lambda seen: fit_parameters(make, BETWEEN, lambda model: predict(model, seen), seen.time),
            predict=predict,
            num_folds=EACH_GROUP,
            parts=parts or {},
            uses_all=True,
        )

    def ring(hop_time: float, **ramp: float) -> CollectiveModel:
        inner = max(hop_time * NVLINK_OVER_NETWORK_HOP - inside[CollectiveKind.ALL_GATHER].hop_time, 0.0)
        return _ramped(**ramp, hop_time=hop_time, inner_hop_time=rounded(inner))

    gathers = kernel(CollectiveKind.ALL_GATHER, read_simai(folder, "nic_ratio", nic_bandwidth=SIMAI_NIC_BANDWIDTH), ring)
    yield CollectiveKind.ALL_GATHER, gathers
    gather = gathers.model()

    def tree(hop_time: float, **ramp: float) -> CollectiveModel:
        hops = {"hop_time": 2.0 * gather.hop_time, "inner_hop_time": 2.0 * gather.inner_hop_time}  # both ways
        return replace(_ramped(**ramp, base_time=hop_time, **hops), tree_hop_time=TREE_LEVEL_TIME, nested=True)

    two_nodes = joined(read_published_all_reduce(folder, "H100", nodes=2), read_published_all_reduce(folder, "H200", nodes=2))
    yield CollectiveKind.ALL_REDUCE, kernel(CollectiveKind.ALL_REDUCE, joined(two_nodes, read_many_nodes_all_reduce(folder)), tree)
    simai = read_simai(folder, "ata_ratio", nic_bandwidth=SIMAI_NIC_BANDWIDTH)
    exchanges, num_points = _exchanges(chosen_rows(simai, simai.ranks > 16))
    yield CollectiveKind.ALL_TO_ALL, kernel(CollectiveKind.ALL_TO_ALL, exchanges, _ramped, parts={"": slice(num_points)})


#: Parameters between nodes: time of a hop (of a tree: of the kernel), ramp of the bandwidth.
BETWEEN = {
    "hop_time": Parameter(10, 0, 200, micro),
    "ramp_time": Parameter(10, 0, 300, micro),
    "ramp_exponent": Parameter(0.4, 0.1, 0.95),
}


def with_tree(kernel: Kernel) -> CollectiveModel:
    """Return the model of a collective in a node, with a tree instead of ring hops beyond the measured ranks.

    The two are equal at the largest measured number of ranks.
    """
    model, most_ranks = kernel.model(), float(kernel.table.ranks.max())
    return replace(model, tree_hop_time=rounded(model.hop_time * (most_ranks - 1) / np.ceil(np.log2(most_ranks))))


def _exchanges(simai: CollectiveTable) -> tuple[CollectiveTable, int]:
    """Return the rows of SimAI, those of the other source repeated to equal weight, and the number of distinct points.

    SimAI's figures of two nodes are left out: they reach half of the NIC's rate, NCCL 82 %.
    """
    published = published_all_to_all()
    table = joined(simai, published)
    for _ in range(round(len(simai.time) / len(published.time)) - 1):
        table = joined(table, published)
    return table, len(simai.time) + len(published.time)


def with_faster_links(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with the bandwidth of all links scaled, at the same latency."""

    def faster(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * scale, pair_bandwidth=link.pair_bandwidth * scale)

    return replace(cluster, tiers=tuple(replace(tier, link=faster(tier.link)) for tier in cluster.tiers))


def _ramped(
    *, ramp_time: float, ramp_exponent: float, base_time: float = 0.0, hop_time: float = 0.0, inner_hop_time: float = 0.0
) -> CollectiveModel:
    return CollectiveModel(
        base_time=base_time,
        hop_time=hop_time,
        inner_hop_time=inner_hop_time,
        bandwidth_fraction=SCALE_OUT_FRACTION,
        ramp_time=ramp_time,
        ramp_exponent=ramp_exponent if ramp_time > 0 else 0.5,
    )
