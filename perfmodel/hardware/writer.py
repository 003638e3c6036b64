"""Writer of calibrations, clusters and chips as YAML files, from which the reader returns equal objects."""

from pathlib import Path
from typing import Any

from perfmodel.foundation.files import dump_yaml
from perfmodel.foundation.records import record_to_data
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.units import exact_quantity
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.chip import FACT_GROUPS, Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import check_equal_chips
from perfmodel.hardware.fabric import NetworkTier, Topology


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration file atomically; `load_calibration` returns an equal object."""
    write_atomically(path, calibration_text(calibration))


def calibration_text(calibration: Calibration) -> str:
    """Return the content of a calibration file."""
    return dump_yaml(record_to_data(calibration))


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file atomically. It names the chip; the chip's own file is not written."""
    write_atomically(path, cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """Return the content of a cluster file, of chips of one kind."""
    check_equal_chips(cluster)
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


def save_chip(chip: Chip, path: str | Path) -> None:
    """Write a chip file atomically; `load_chip` returns an equal object."""
    write_atomically(path, chip_text(chip))


def chip_text(chip: Chip) -> str:
    """Return the content of a chip file."""
    memory, tiers = chip.memory, [_tier(tier) for tier in chip.node.default_tiers]
    has_fabric = bool(tiers) and chip.node.default_tiers[-1].topology is Topology.FAT_TREE
    texts = {"title": chip.title, "aliases": list(chip.aliases), "notes": chip.notes}
    return dump_yaml(
        {
            "name": chip.name,
            "vendor": chip.vendor,
            "launch_year": chip.launch_year,
            "peak_flop_rate": {str(dtype): exact_quantity(rate, "flop_rate") for dtype, rate in chip.peak_flop_rate.items()},
            "memory": {
                "name": memory.name,
                "capacity": exact_quantity(memory.capacity, "bytes"),
                "bandwidth": exact_quantity(memory.bandwidth, "bandwidth"),
                **({"usable_capacity": exact_quantity(memory.usable, "bytes")} if memory.usable else {}),
            },
            "on_chip": {
                "compute_units": chip.units.compute_units,
                "unit_kind": chip.units.unit_kind,
                "capacity": exact_quantity(chip.on_chip_bytes, "bytes"),
            },
            "devices_per_chip": chip.units.devices_per_chip,
            "any_operand_order": chip.units.any_operand_order,
            **({"tdp": exact_quantity(chip.tdp_watts, "power")} if chip.tdp_watts else {}),
            "host_link": exact_quantity(chip.host_bandwidth, "bandwidth"),
            **({"matmul_fraction": chip.matmul_fraction} if chip.matmul_fraction else {}),
            "chips_per_node": chip.node.chips_per_node,
            "scale_up": tiers[:-1] if has_fabric else tiers,
            **({"scale_out": tiers[-1]} if has_fabric else {}),
            "facts": {
                group: {"provenance": word, "source": chip.source or "not stated"}
                for group, word in chip.provenance.items()
                if group in FACT_GROUPS
            },
            **{name: value for name, value in texts.items() if value},
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
        **({"nics_per_node": tier.nics_per_node} if tier.nics_per_node else {}),
        "provenance": tier.provenance,
        "source": tier.source or "not stated",
    }
