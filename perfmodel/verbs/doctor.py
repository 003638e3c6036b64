"""`doctor`: state of the installation, of this machine and of the shipped data, and advice for better predictions."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from perfmodel.cost.resolve import choose_calibration, user_folders
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import Provenance
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.local import gpu_names, local_cluster
from perfmodel.hardware.reader import chip_called, list_calibrations, list_chips, load_calibration, load_chip, load_prices

#: Optional package -> commands that need it.
OPTIONAL_PARTS = {
    "torch": "run, audit, calibrate, demo, shard and import",
    "pyarrow": "Parquet files",
    "joblib": "sweep with several processes",
    "distributed": "sweep --engine dask",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalPart:
    """An optional package: its version, empty if it is not installed, and the commands that need it."""

    name: str
    version: str
    needed_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """A processor of this machine. chip: the known chip, empty if it is unknown; calibration: basis of its kernel times."""

    name: str
    chip: str
    calibration: str
    is_calibrated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """State of an installation.

    hardware_data   kind of shipped data -> number and date
    advice          measures that improve predictions, the most important first
    """

    version: str
    python: str
    parts: tuple[OptionalPart, ...]
    devices: tuple[LocalDevice, ...]
    calibrations_folder: str
    hardware_data: dict[str, str]
    advice: tuple[str, ...]


def _installed(name: str) -> str:
    """Return the version of a package, empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def diagnose() -> Diagnosis:
    """Return the installed packages, the calibration and GPUs of this machine, the date of hardware data, and advice. Changes nothing."""
    from perfmodel import __version__

    devices, advice = [], []
    try:
        cluster = local_cluster()
        devices.append(_device(f"CPU: {cluster.title}", "localhost", cluster.chip))
        if not devices[0].is_calibrated:
            advice.append("perfmodel calibrate: measures this machine's CPU, for predictions of localhost")
    except InputError as error:
        advice.append(str(error))
    for name, count in Counter(gpu_names()).items():
        try:
            chip = chip_called(name)
        except InputError:  # the name is a prefix of several chips
            chip = ""
        devices.append(_device(f"{count} x {name}", chip, load_chip(chip) if chip else None))
        if not chip:
            advice.append(f"{name}: is no known chip; describe it (`perfmodel chips --template`), or see `perfmodel chips`")
        elif not devices[-1].is_calibrated:
            advice.append(f"{chip}: its kernels are not measured; give --calibration FILE of this chip, or fit a profile to your runs")
    if not _installed("torch"):
        advice.append(f"pip install 'perfmodel[torch]': {OPTIONAL_PARTS['torch']} need torch")
    advice += [
        "perfmodel fit RUNS --save mine.yaml: a profile of your own measured runs; --profile mine.yaml then predicts with it",
        "--profile NAME, --setting NAME=VALUE: the framework and its setup; without them the mean of the known frameworks is assumed",
    ]
    folders, prices = user_folders(), load_prices().values()
    dates = sorted(load_calibration(name).date for name in list_calibrations())
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        parts=tuple(OptionalPart(name=name, version=_installed(name), needed_for=purpose) for name, purpose in OPTIONAL_PARTS.items()),
        devices=tuple(devices),
        calibrations_folder=str(folders[0]) if folders else "",
        hardware_data={
            "chips": f"{len(list_chips())}",
            "calibrations": f"{len(dates)}, measured {dates[0]} to {dates[-1]}",
            "prices": f"{len(prices)}, of {max(price.date for price in prices)}",
        },
        advice=tuple(advice),
    )


def _device(name: str, chip_name: str, chip: Chip | None) -> LocalDevice:
    """Return a device with the state of its calibration. chip: None for an unknown one."""
    calibration = choose_calibration(chip) if chip is not None else None
    is_calibrated = calibration is not None and calibration.provenance is Provenance.CALIBRATED
    return LocalDevice(name=name, chip=chip_name, calibration=calibration.name if calibration else "", is_calibrated=is_calibrated)
