"""The machine that a measured run was on, as the estimator takes it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.resolve import choose_calibration
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import PRIOR_NAME, SPEC_SHEET, SPEC_SHEET_NAME, Calibration, default_calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.prior import other_generations, prior_calibration
from perfmodel.hardware.reader import calibrations_for, cluster_of, load_calibration, load_chip, load_cluster, measured_chips
from perfmodel.validation.case_plan import HardwareOfCase

#: Matrix multiplies in these run beside attention, activations and everything else in bf16.
_NARROW = (Dtype.FP8, Dtype.FP4)


@lru_cache(maxsize=4096)
def cluster_of_run(hardware: HardwareOfCase) -> Cluster:
    if hardware.cluster:
        return load_cluster(hardware.cluster, num_chips=hardware.num_chips)
    return cluster_of(hardware.chip, hardware.chips_per_node, hardware.num_chips, hardware.inter_node_bandwidth_per_chip)


@lru_cache(maxsize=4096)
def calibration_of_run(hardware: HardwareOfCase, asked: str | Path | None = None) -> Calibration:
    """asked: a name or a path; None: the default of the chip; "spec-sheet": none; "prior": what other chips of its maker let expect."""
    chip = cluster_of_run(hardware).chip
    if asked is None:
        return choose_calibration(chip, hardware.calibration) if hardware.cluster else _default(chip.name)
    return _asked(chip.name, asked)


@lru_cache(maxsize=256)
def _default(chip: str) -> Calibration:
    return default_calibration(chip, calibrations_for(chip))


@lru_cache(maxsize=256)
def _asked(chip: str, calibration: str | Path) -> Calibration:
    if str(calibration) == SPEC_SHEET_NAME:
        return SPEC_SHEET
    if str(calibration) == PRIOR_NAME:
        found = load_chip(chip)
        return prior_calibration(found, other_generations(found, measured_chips())) or SPEC_SHEET
    return load_calibration(calibration)


@lru_cache(maxsize=4096)
def machine_of_run(hardware: HardwareOfCase, dtype: Dtype, *, calibration: str | Path | None = None) -> Machine:
    """dtype: of matrix multiplies. calibration: as `calibration_of_run` is asked."""
    overlay = calibration_of_run(hardware, calibration)
    cluster = cluster_of_run(hardware)
    machine = resolve_machine(cluster, overlay, dtype=dtype)
    return replace(resolve_machine(cluster, overlay, dtype=Dtype.BF16), low=machine) if dtype in _NARROW else machine
