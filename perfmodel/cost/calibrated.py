"""Whether a machine's numbers were measured on its own chip."""

from perfmodel.cost.machine import Machine
from perfmodel.hardware.calibration import Provenance


def is_calibrated(machine: Machine) -> bool:
    """By its matrix multiplies, which most of a step is made of."""
    return machine.rests_on["matmul"].startswith(Provenance.CALIBRATED)


def uncalibrated(machine: Machine) -> str:
    """Return what the chip has in place of a whole calibration of its own, in words; nothing if it has one."""
    if is_calibrated(machine):
        return ""
    is_partial = machine.rests_on["matmul"].startswith(Provenance.PARTIAL)
    return f"a {Provenance.PARTIAL} only" if is_partial else "no calibration of its own"
