"""Whether a machine's numbers were measured on its own chip."""

from perfmodel.cost.machine import Machine
from perfmodel.hardware.calibration import Provenance


def is_calibrated(machine: Machine) -> bool:
    """Return whether the matrix multiplies, most of a step, were measured on this chip."""
    return machine.basis.parts["matmul"].startswith(Provenance.CALIBRATED)


def uncalibrated(machine: Machine) -> str:
    """Return in words what the chip has instead of a full calibration of its own; empty if it has one."""
    if is_calibrated(machine):
        return ""
    is_partial = machine.basis.parts["matmul"].startswith(Provenance.PARTIAL)
    return f"a {Provenance.PARTIAL} only" if is_partial else "no calibration of its own"
