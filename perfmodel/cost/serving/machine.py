"""The machine as a serving engine finds it: short bursts at full clock, floors half hidden by graphs, products in each format."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.serving.engine import Engine
from perfmodel.workload.quantization import Quantization


def serving_machine(cluster: Cluster, calibration: Calibration, engine: Engine, quantization: Quantization) -> Machine:
    """Rates of a chip under an engine, in 16 bits and, in `serving`, in each format. Raises InputError where the chip has no units for
    `quantization`.

    Decoding waits for memory and does not throttle: clocks are the data sheet's. A replayed graph hides part of each kernel's floor.
    """
    chip = cluster.chip
    if quantization.needs not in chip.peak_flop_rate and not (quantization.is_plain and Dtype.FP16 in chip.peak_flop_rate):
        known = ", ".join(str(each) for each in chip.peak_flop_rate)
        raise bad_field("quantization", quantization.name, f"{chip.name} has no units for it (it has {known})", "use another chip or bf16")
    calm = replace(
        calibration,
        sustained_clock_fraction=1.0,
        clock_fractions={},
        attention_clock_fraction=1.0,
        exposed_floor_fraction=engine.floor_fraction,
    )
    usual = Dtype.BF16 if Dtype.BF16 in chip.peak_flop_rate else Dtype.FP16
    return resolve_machine(cluster, calm, dtype=usual)
