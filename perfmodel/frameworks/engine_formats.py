"""Formats of weights that an engine runs on a chip: rows of an engine's file (`formats`) and their application to a chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.hardware.chip import Chip
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization, has_units

PLAIN_FORMATS = (str(Dtype.BF16), str(Dtype.FP16))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFormat:
    """One format on one kind of chip.

    format    format of the checkpoint
    units     dtypes that the chip must multiply in hardware
    vendors   vendors of the chips; none: any
    runs_as   format in which the engine's kernels run it; empty: the same
    """

    format: str
    units: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ()
    runs_as: str = ""

    def __post_init__(self) -> None:
        for name in (self.format, *([self.runs_as] if self.runs_as else [])):
            if name not in QUANTIZATIONS:
                raise bad_field("formats", name, f"must be of {', '.join(QUANTIZATIONS)}", "correct the engine")
        for unit in self.units:
            if unit not in tuple(Dtype):
                raise bad_field("formats", unit, f"must be of {', '.join(Dtype)}", "correct the engine")

    def is_for(self, chip: Chip) -> bool:
        return (not self.vendors or chip.vendor.lower() in self.vendors) and all(Dtype(unit) in chip.peak_flop_rate for unit in self.units)


def format_on(formats: Sequence[EngineFormat], chip: Chip, quantization: Quantization) -> Quantization | None:
    """Return the format in which an engine runs a checkpoint; None if it cannot. Without formats the chip's units decide."""
    if not formats or quantization.name in PLAIN_FORMATS:
        return quantization if has_units(quantization, chip.peak_flop_rate) else None
    row = next((candidate for candidate in formats if candidate.format == quantization.name and candidate.is_for(chip)), None)
    runs = None if row is None else QUANTIZATIONS[row.runs_as or row.format]
    return runs if runs is not None and has_units(runs, chip.peak_flop_rate) else None


def formats_on(formats: Sequence[EngineFormat], chip: Chip) -> tuple[str, ...]:
    """Return the names of the formats that run as they are stored, not converted to another one."""
    run = {name: format_on(formats, chip, quantization) for name, quantization in QUANTIZATIONS.items()}
    return tuple(name for name, runs in run.items() if runs is not None and runs.name == name)


def require_format(engine: str, formats: Sequence[EngineFormat], chip: Chip, quantization: Quantization) -> Quantization:
    """Return the format as `format_on`. Raises InputError with the formats that run, if this one does not."""
    runs_as = format_on(formats, chip, quantization)
    if runs_as is None:
        runs = ", ".join(formats_on(formats, chip))
        raise InputError(f"quantization={quantization.name}: {engine} does not run it on {chip.name}; use one of {runs}, or another chip")
    return runs_as
