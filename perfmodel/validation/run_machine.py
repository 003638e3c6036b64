"""Machine of a measured run, the input of an estimator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.resolve import choose_calibration
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.session import session_cache
from perfmodel.hardware.calibration import PRIOR_NAME, SPEC_SHEET, SPEC_SHEET_NAME, Calibration, default_calibration
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.prior import other_generations, prior_calibration
from perfmodel.hardware.reader import calibrations_for, cluster_of, load_calibration, load_chip, load_cluster, measured_chips
from perfmodel.validation.case_plan import HardwareOfCase

#: Matrix multiplies run in these dtypes; attention, elementwise operators and everything else run in bf16.
_NARROW = (Dtype.FP8, Dtype.FP4)


@session_cache(maxsize=4096, file=lambda hardware: hardware.cluster)
def cluster_of_run(hardware: HardwareOfCase) -> Cluster:
    if hardware.cluster:
        return load_cluster(hardware.cluster, num_chips=hardware.num_chips)
    return cluster_of(hardware.chip, hardware.chips_per_node, hardware.num_chips, hardware.inter_node_bandwidth_per_chip)


def calibration_of_run(hardware: HardwareOfCase, name: str | Path | None = None) -> Calibration:
    """Return the calibration of a run.

    name   name or path; None: the chip's default; "spec-sheet": none; "prior": the prior from the vendor's other generations
    """
    chip = cluster_of_run(hardware).chip
    if name is None and hardware.cluster:
        return _chosen_calibration(chip, hardware.calibration)
    return _named_calibration(chip.name, name or "")


@session_cache(maxsize=256, file=lambda chip, name: name)
def _chosen_calibration(chip: Chip, name: str) -> Calibration:
    return choose_calibration(chip, name)


@session_cache(maxsize=256, file=lambda chip, name: name)
def _named_calibration(chip: str, name: str | Path) -> Calibration:
    if not name:
        return default_calibration(chip, calibrations_for(chip))
    if str(name) == SPEC_SHEET_NAME:
        return SPEC_SHEET
    if str(name) == PRIOR_NAME:
        chip_spec = load_chip(chip)
        return prior_calibration(chip_spec, other_generations(chip_spec, measured_chips())) or SPEC_SHEET
    return load_calibration(name)


def machine_of_run(hardware: HardwareOfCase, dtype: Dtype, *, calibration: str | Path | None = None) -> Machine:
    """Return the machine of a run. dtype: of matrix multiplies; calibration: the name of `calibration_of_run`."""
    return _machine(cluster_of_run(hardware), calibration_of_run(hardware, calibration), dtype)


@session_cache(maxsize=4096)
def _machine(cluster: Cluster, calibration: Calibration, dtype: Dtype) -> Machine:
    machine = resolve_machine(cluster, calibration, dtype=dtype)
    return replace(resolve_machine(cluster, calibration, dtype=Dtype.BF16), low=machine) if dtype in _NARROW else machine
