"""Machines that the tests of costs share."""

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SPEC_SHEET, Calibration
from perfmodel.hardware.chip import Chip, ComputeUnits, MemoryTier
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import Link, NetworkTier, Topology
from perfmodel.hardware.reader import load_calibration, load_cluster


def make_chip(**changes) -> Chip:
    values = {
        "name": "test-chip",
        "vendor": "nobody",
        "launch_year": 2024,
        "peak_flop_rate": {Dtype.BF16: 400e12, Dtype.FP32: 50e12},
        "memory": MemoryTier(name="HBM", capacity=64 * 2**30, bandwidth=2e12),
        "on_chip_bytes": 40e6,
        "units": ComputeUnits(compute_units=100, unit_kind="SM"),
    }
    return Chip(**(values | changes))


def make_tier(topology=Topology.SWITCH, *, size=8, bandwidth=300e9, pair_bandwidth=None, latency=2e-6, **changes) -> NetworkTier:
    link = Link(bandwidth=bandwidth, pair_bandwidth=pair_bandwidth or bandwidth, latency=latency)
    return NetworkTier(name=f"{topology}-{size}", topology=topology, size=size, link=link, **changes)


def make_machine(*tiers, calibration: Calibration = SPEC_SHEET, dtype=Dtype.BF16, chip=None, num_chips=None) -> Machine:
    tiers = tiers or (make_tier(), make_tier(Topology.FAT_TREE, size=4096, bandwidth=25e9, latency=5e-6))
    cluster = Cluster(
        name="test", chip=chip or make_chip(), num_chips=num_chips or tiers[-1].size, chips_per_node=tiers[0].size, tiers=tiers
    )
    return resolve_machine(cluster, calibration, dtype=dtype)


CALIBRATED = {"a100": "dgx-a100", "h100": "dgx-h100", "h200": "hgx-h200", "b200": "dgx-b200"}


def shipped_machine(name: str, *, clock: bool = True, dtype=Dtype.BF16) -> Machine:
    """A shipped calibration on its cluster; without the clock factor and with whole floors it is what a kernel benchmark sees."""
    from dataclasses import replace

    calibration = load_calibration(name)
    if not clock:
        burst = {"sustained_clock_fraction": 1.0, "attention_clock_fraction": 1.0, "exposed_floor_fraction": 1.0}
        calibration = replace(calibration, sustained=replace(calibration.sustained, **burst))
    return resolve_machine(load_cluster(CALIBRATED[name]), calibration, dtype=dtype)
