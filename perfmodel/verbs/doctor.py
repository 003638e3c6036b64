"""`doctor`: the installation, this machine and the shipped data, and what would improve predictions."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from perfmodel.cost.resolve import choose_calibration, user_folders
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import Provenance
from perfmodel.hardware.local import gpu_names, local_cluster
from perfmodel.hardware.reader import chip_called, list_calibrations, list_chips, load_calibration, load_chip, load_prices

#: Optional package -> what needs it.
OPTIONAL_PARTS = {
    "torch": "run, audit, calibrate, demo, shard and import",
    "pyarrow": "Parquet files",
    "joblib": "sweep with several processes",
    "distributed": "sweep --engine dask",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalPart:
    """An optional package: its version, empty where it is not installed, and what needs it."""

    name: str
    version: str
    needed_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """A processor of this machine. chip: the known chip, empty where there is none; calibration: basis of its kernels' times."""

    name: str
    chip: str
    calibration: str
    is_calibrated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """State of an installation.

    hardware_data   what is shipped -> number and date
    advice          what would improve predictions, the most important first
    """

    version: str
    python: str
    parts: tuple[OptionalPart, ...]
    devices: tuple[LocalDevice, ...]
    calibrations_folder: str
    hardware_data: dict[str, str]
    advice: tuple[str, ...]


def _installed(name: str) -> str:
    """Version of a package, empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def diagnose() -> Diagnosis:
    """Return what is installed, whether this machine is calibrated, its GPUs, the date of hardware data, and advice. Changes nothing."""
    from perfmodel import __version__

    parts = [OptionalPart(name=name, version=_installed(name), needed_for=purpose) for name, purpose in OPTIONAL_PARTS.items()]
    devices, advice = [], []
    try:
        here = local_cluster()
        own = choose_calibration(here.chip)
        is_calibrated = own.provenance is Provenance.CALIBRATED
        devices.append(LocalDevice(name=f"CPU: {here.title}", chip="localhost", calibration=own.name, is_calibrated=is_calibrated))
        if not is_calibrated:
            advice.append("perfmodel calibrate: measures this machine's CPU, for predictions of localhost")
    except InputError as error:
        advice.append(str(error))
    names = gpu_names()
    for name in dict.fromkeys(names):
        try:
            chip = chip_called(name)
        except InputError:  # several chips begin so
            chip = ""
        found = choose_calibration(load_chip(chip)) if chip else None
        is_calibrated = found is not None and found.provenance is Provenance.CALIBRATED
        label = f"{names.count(name)} x {name}"
        devices.append(LocalDevice(name=label, chip=chip, calibration=found.name if found else "", is_calibrated=is_calibrated))
        if not chip:
            advice.append(f"{name}: is no known chip; describe it (`perfmodel chips --template`), or see `perfmodel chips`")
        elif not is_calibrated:
            advice.append(f"{chip}: its kernels are not measured; give --calibration FILE of this chip, or fit a profile to your runs")
    if not _installed("torch"):
        advice.append(f"pip install 'perfmodel[torch]': {OPTIONAL_PARTS['torch']} need torch")
    advice.append("perfmodel fit RUNS --save mine.yaml: a profile of your own measured runs; --profile mine.yaml then predicts with it")
    advice.append(
        "--profile NAME, --setting NAME=VALUE: the framework and its setup; without them the mean of the known frameworks is assumed"
    )
    folders, prices = user_folders(), load_prices().values()
    dates = sorted(load_calibration(each).date for each in list_calibrations())
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        parts=tuple(parts),
        devices=tuple(devices),
        calibrations_folder=str(folders[0]) if folders else "",
        hardware_data={
            "chips": f"{len(list_chips())}",
            "calibrations": f"{len(dates)}, measured {dates[0]} to {dates[-1]}",
            "prices": f"{len(prices)}, of {max(each.date for each in prices)}",
        },
        advice=tuple(advice),
    )
