"""Machine of a serving engine: full clock, kernel floors partly overlapped by graphs, products in each format."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.calibration import NO_TILES, SPEC_SHEET, Calibration
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization, has_units

LEAST_TILE_ROWS = 64.0
"""Rows of the smallest tile of shipped calibrations."""
LEAST_MEASURED_RIDGE = 312e12 / 2.039e12
"""FLOPs per byte of the A100, data sheet: the least of the chips with measured kernels. [FLOP/byte]"""


def serving_machine(cluster: Cluster, calibration: Calibration, engine: Engine, quantization: Quantization) -> Machine:
    """Return the rates of a chip under an engine, in 16 bits and, in `serving`, in each format. Raises InputError if the chip has no units
    for `quantization`.

    Decode is memory-bound and does not throttle: clocks are those of the data sheet. A replayed graph overlaps part of each kernel's floor.
    """
    chip = cluster.chip
    if not has_units(quantization, chip.peak_flop_rate):
        runs = ", ".join(name for name, other in QUANTIZATIONS.items() if has_units(other, chip.peak_flop_rate))
        rule = f"{chip.name} has no units for it ({quantization.needs})"
        raise bad_field("quantization", quantization.name, rule, f"use {runs} or another chip")
    calm = replace(
        with_few_rows(calibration, chip),
        sustained_clock_fraction=1.0,
        clock_fractions={},
        attention_clock_fraction=1.0,
        exposed_floor_fraction=engine.kernels.floor_fraction,
    )
    usual = Dtype.BF16 if Dtype.BF16 in chip.peak_flop_rate else Dtype.FP16
    return resolve_machine(cluster, calm, dtype=usual)


def with_few_rows(calibration: Calibration, chip: Chip) -> Calibration:
    """Return the calibration with a kernel for products of few rows, if it was measured on a chip with more FLOPs per byte.

        mu = r0 rho / rho0 for rho < rho0     rho  FLOP rate over memory bandwidth [FLOP/byte]

    Fits have tiles of at least r0 = 64 rows; still, a product of one row is memory-bound on every measured chip. On a chip with fewer FLOPs
    per byte (H20, GeForce, Apple's), a padded tile would take longer than reading the weights. Libraries avoid that (GEMV and split-k
    kernels). On such chips few rows are padded to the number that keeps the ratio of compute to memory of the measured chip with the least
    rho, the A100. Other chips are unchanged.
    """
    rate = chip.peak_flop_rate.get(Dtype.BF16) or chip.peak_flop_rate.get(Dtype.FP16) or max(chip.peak_flop_rate.values())
    share = rate / chip.memory.bandwidth / LEAST_MEASURED_RIDGE
    if share >= 1.0 or chip.name in calibration.chips:
        return calibration
    models = calibration.matmul or SPEC_SHEET.matmul
    few = {name: replace(model, few_rows=LEAST_TILE_ROWS * share) for name, model in models.items() if model.tiles != NO_TILES}
    return replace(calibration, matmul={**models, **few})
