"""Schemas of hardware files: chips, clusters and calibrations."""

from __future__ import annotations

from functools import cache

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.schemas import FileModel, count, file_model, list_of, map_of, model_of, number, one_of, quantity, text
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.chip import MAX_MATMUL_FRACTION, PROVENANCES
from perfmodel.hardware.fabric import Topology

_PROVENANCE = (one_of(PROVENANCES), "how the numbers are known")
_SOURCE = (text(), "where the numbers are from")
_NOTES = (text(may_be_empty=True), "anything else")
_TITLE = (text(), "its name as people write it")

TIER = file_model(
    "Tier",
    {
        "name": (text(), "what the links are called, such as nvlink"),
        "topology": (one_of([str(member) for member in Topology]), "how chips are connected"),
        "size": (count(), "chips, or groups of the tier inside it, that the tier connects"),
        "bandwidth": (quantity("bandwidth"), "one direction of one chip, to all peers together"),
        "latency": (quantity("time"), "from one chip to another"),
        "provenance": _PROVENANCE,
        "source": _SOURCE,
    },
    {
        "pair_bandwidth": (quantity("bandwidth"), "one direction of one chip to one peer; the whole bandwidth if left out"),
        "torus_shape": (list_of(count(), least=1, most=6), "of a torus: chips along each dimension"),
        "wrap_multiple": (count(), "of a torus: a dimension whose size is a multiple of it wraps around"),
        "oversubscription": (number(1, 1000), "how many times slower the shared links are than those of all chips together"),
        "peer_to_peer": (bool, "false: transfers are staged through host memory"),
    },
)

CHIP = file_model(
    "Chip",
    {
        "name": (text(), "what options and files call it"),
        "vendor": (text(), "who makes it, such as nvidia: decides the share of the memory that programs can use"),
        "launch_year": (count(), "when it was launched"),
        "peak_flop_rate": (map_of(quantity("flop_rate")), f"dense rate of each dtype ({', '.join(Dtype)}) that the whole chip multiplies"),
        "memory": (
            file_model(
                "Memory",
                {
                    "name": (text(), "its kind, such as hbm"),
                    "capacity": (quantity("bytes"), "as the driver reports it, all devices of the chip together"),
                    "bandwidth": (quantity("bandwidth"), "of reads or writes"),
                },
                {"usable_capacity": (quantity("bytes"), "what the runtime offers a program; a share of the capacity if left out")},
            ),
            "the memory of the chip",
        ),
        "on_chip": (
            file_model(
                "OnChip",
                {
                    "compute_units": (count(), "SMs, CUs or TensorCores"),
                    "unit_kind": (text(), "what these are called"),
                },
                {"capacity": (quantity("bytes"), "last-level cache or scratchpad")},
            ),
            "what lies on the chip",
        ),
        "facts": (
            map_of(file_model("Fact", {"provenance": _PROVENANCE, "source": _SOURCE}), may_be_empty=True),
            "provenance and source of each group of numbers that the file states",
        ),
    },
    {
        "title": _TITLE,
        "aliases": (list_of(text(), most=16), "other names that options take"),
        "devices_per_chip": (count(), "devices that torch or JAX sees; 1 if left out"),
        "any_operand_order": (bool, "products in 8 bits take operands in either order; false if left out"),
        "tdp": (quantity("power"), "thermal design power"),
        "host_link": (quantity("bandwidth"), "to the memory of the host, one direction"),
        "matmul_fraction": (number(0, MAX_MATMUL_FRACTION), "share of the dense 16-bit peak that the best measured products reach"),
        "chips_per_node": (count(), "chips of a usual node"),
        "scale_up": (list_of(TIER, most=8), "the usual links inside a node, innermost first"),
        "scale_out": (TIER, "the usual links between nodes"),
        "notes": _NOTES,
    },
)

CLUSTER = file_model(
    "Cluster",
    {
        "name": (text(), "what options and files call it"),
        "chip": (text(), "a chip's name, or the path of its file relative to this one"),
        "num_chips": (count(), "chips of the cluster"),
        "chips_per_node": (count(), "chips of a node"),
        "tiers": (list_of(TIER, least=1, most=8), "network tiers, innermost first; the last one covers the cluster"),
        "source": _SOURCE,
        "provenance": _PROVENANCE,
    },
    {"title": _TITLE, "notes": _NOTES, "largest_job": (count(), "chips of the largest job that may run")},
)


@cache
def hardware_model(kind: str) -> type[FileModel]:
    """The model of a chip's, a cluster's or a calibration's file."""
    return {"chip": CHIP, "cluster": CLUSTER, "calibration": model_of(Calibration)}[kind]
