"""Calibrations, clusters and chips as YAML files that the reader turns back into the same objects."""

from pathlib import Path
from typing import Any

from perfmodel.foundation.files import dump_yaml
from perfmodel.foundation.records import record_to_data
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.units import exact_quantity
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import NetworkTier


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration file, whole or not at all; `load_calibration` gives back an equal object."""
    write_atomically(path, calibration_text(calibration))


def calibration_text(calibration: Calibration) -> str:
    """The content of a calibration file."""
    return dump_yaml(record_to_data(calibration))


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file, whole or not at all. It names the chip; the chip's own file stays where it is."""
    write_atomically(path, cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """The content of a cluster file."""
    return dump_yaml(
        {
            "name": cluster.name,
            **({"title": cluster.title} if cluster.title else {}),
            "chip": cluster.chip.name,
            "num_chips": cluster.num_chips,
            "chips_per_node": cluster.chips_per_node,
            **({"largest_job": cluster.largest_job} if cluster.largest_job else {}),
            "tiers": [_tier(tier) for tier in cluster.tiers],
            "source": cluster.source or "not stated",
            "provenance": cluster.provenance,
            **({"notes": cluster.notes} if cluster.notes else {}),
        }
    )


def _tier(tier: NetworkTier) -> dict[str, Any]:
    link = tier.link
    return {
        "name": tier.name,
        "topology": str(tier.topology),
        "size": tier.size,
        "bandwidth": exact_quantity(link.bandwidth, "bandwidth"),
        **({"pair_bandwidth": exact_quantity(link.pair_bandwidth, "bandwidth")} if link.pair_bandwidth != link.bandwidth else {}),
        "latency": exact_quantity(link.latency, "time"),
        **({"torus_shape": list(tier.torus_shape)} if tier.torus_shape else {}),
        **({"wrap_multiple": tier.wrap_multiple} if tier.wrap_multiple else {}),
        **({"oversubscription": tier.oversubscription} if tier.oversubscription != 1 else {}),
        **({} if tier.peer_to_peer else {"peer_to_peer": False}),
        "provenance": tier.provenance,
        "source": tier.source or "not stated",
    }
