"""Whether a machine's numbers were measured on its own chip."""

from perfmodel.cost.machine import Machine
from perfmodel.hardware.calibration import Provenance


def is_calibrated(machine: Machine) -> bool:
    """By its matrix multiplies, which most of a step is made of."""
    return machine.rests_on["matmul"].startswith(Provenance.CALIBRATED)
