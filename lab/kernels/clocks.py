"""Fit of rates that tables of short bursts do not determine: sustained clocks and older attention kernels.

    python -m lab.kernels.clocks CASES.jsonl

On one chip, a clock and a framework's rate of matrix multiplies are a single factor. They are identifiable because a framework has one
rate on all chips. Megatron and NVIDIA's recipes run at the calibrated rate; loops in eager torch run at another one, which is fitted too.
All rates are fitted together, as factors on the shipped ones. Refits without each framework in turn measure the sensitivity to it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.cases import PublishedRun, read_runs
from lab.command import command_parser, exits_on_errors
from lab.fit_profiles import NOISE, fit_constants
from lab.pages import table
from lab.splits import leave_one_out
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.text import columns_text
from perfmodel.frameworks.profile import ExecutionProfile, load_profile
from perfmodel.hardware.calibration import SustainedRates
from perfmodel.hardware.reader import load_calibration
from perfmodel.uncertainty.priors import Constant
from perfmodel.validation.plan_choice import BROKEN_NVLINK
from perfmodel.validation.run_machine import calibration_of_run
from perfmodel.validation.step_times import StepTimes

Array = NDArray[np.float64]

#: Profile -> group of frameworks that share matrix-multiply kernels and are left out together.
KIN: Mapping[str, str] = {
    "composer-fsdp": "Composer",
    "deepspeed": "Megatron",
    "megatron": "Megatron",
    "megatron-2020": "Megatron",
    "nanotron": "nanotron",
    "nemo": "NVIDIA's recipes",
    "torch-fsdp2": "torch",
    "torchtitan": "torch",
}

_EAGER = frozenset({"Composer", "nanotron", "torch"})
"""Frameworks whose matrix multiplies run at one fitted fraction of the calibrated rate."""

_EAGER_RATE = "eager"

_MOST = 60
"""Largest number of runs of a framework on one calibration: a sweep of hundreds of runs is one framework."""

_STEP, _REWEIGHTINGS = 0.02, 30

#: Chips with the same silicon share a clock.
_ONE_SILICON = {"h200": "h100"}

MATMUL, FP8, ATTENTION = "matmul", "matmul in fp8", "attention"
FLASH = ("flash1", "flash2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Rate of a calibration: a sustained clock over the burst clock, or an older attention kernel over the calibrated one.

    shipped        as the calibration has it
    value, spread  fitted to the runs of all frameworks, and the standard deviation of its logarithm
    low, high      range with one framework left out in turn, to first order
    """

    calibration: str
    of: str
    shipped: float
    value: float
    spread: float
    low: float
    high: float
    num_runs: int
    frameworks: tuple[str, ...]

    @property
    def is_determined(self) -> bool:
        """Whether more than one framework determines the rate within 5 %."""
        return len(self.frameworks) > 1 and max(self.spread, np.log(self.high / self.low) / 2.0) <= _AGREED

    @property
    def agrees(self) -> bool:
        """Whether the shipped rate is within two standard deviations of the fitted one."""
        return abs(np.log(self.shipped / self.value)) <= 2.0 * self.spread


_AGREED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Runs of one profile on chips of one calibration with one matmul width: they depend on the same rates."""

    calibration: str
    profile: ExecutionProfile
    is_narrow: bool
    rows: tuple[int, ...]

    @property
    def kin(self) -> str:
        return KIN[self.profile.name]

    @property
    def rates(self) -> dict[str, tuple[str, ...]]:
        """Field of the profile -> names of its factors."""
        eager = (_EAGER_RATE,) if self.kin in _EAGER else ()
        clock = _key(self.calibration, FP8 if self.is_narrow else MATMUL)
        kernel = self.profile.kernels.attention_kernel
        older = kernel in FLASH and kernel in load_calibration(self.calibration).sustained.attention_generations
        attention = _key(self.calibration, kernel if older else ATTENTION)
        return {"matmul_rate_fraction": (clock, *eager), "attention_rate_fraction": (attention,)}

    def fields(self, values: Mapping[str, float]) -> dict[str, float]:
        return {
            name: float(self.profile.option(name) * np.prod([values[factor] for factor in factors])) for name, factors in self.rates.items()
        }


def _key(calibration: str, of: str) -> str:
    return f"{calibration}: {of}"


def fitted_clocks(runs: Sequence[PublishedRun], *, most: int = _MOST) -> list[Rate]:
    """Return all rates, fitted jointly. most: largest number of runs of a framework on one calibration, evenly spaced."""
    times, cells = StepTimes(runs=runs), _cells(runs, most)
    rows = [index for cell in cells for index in cell.rows]
    measured = np.log([runs[index].measured for index in rows])

    def log_errors(values: Mapping[str, float]) -> Array:
        return np.log(np.concatenate([times.predict(cell.rows, cell.fields(values)) for cell in cells])) - measured

    names = sorted({factor for cell in cells for factors in cell.rates.values() for factor in factors})
    constants = [Constant(name=name, prior=1.0, spread=0.1 if name == _EAGER_RATE else 0.3, lower=0.3, upper=3.0) for name in names]
    fit = fit_constants(log_errors, constants, num_runs=len(rows))
    base_errors = log_errors(fit.values)
    moved = [log_errors({**fit.values, name: fit.values[name] * np.exp(_STEP)}) for name in names]
    slopes = np.stack([(errors - base_errors) / _STEP for errors in moved], axis=1)
    known = np.array([constant.spreads(fit.values[constant.name]) * constant.spread for constant in constants])
    widths = np.array([constant.spread for constant in constants])
    every = _solved(base_errors, slopes, known, widths)
    kin = [cell.kin for cell in cells for _ in cell.rows]
    without = [_solved(base_errors[split.seen], slopes[split.seen], known, widths) for split in leave_one_out(kin)]
    rates = []
    for index, name in enumerate(names):
        if name == _EAGER_RATE:
            continue
        calibration, of = name.split(": ")
        telling = [cell for cell in cells if any(name in factors for factors in cell.rates.values())]
        frameworks = tuple(sorted({cell.kin for cell in telling}))
        shipped, value = _shipped(load_calibration(calibration).sustained, of), float(np.exp(every[index]))
        others = [value] if len(frameworks) == 1 else [float(np.exp(logs[index])) for logs in without]
        rates.append(
            Rate(
                calibration=calibration,
                of=of,
                shipped=shipped,
                value=shipped * value,
                spread=fit.spreads[name] / fit.values[name],
                low=shipped * min(others),
                high=shipped * max(others),
                num_runs=sum(len(cell.rows) for cell in telling),
                frameworks=frameworks,
            )
        )
    return rates


def _solved(errors: Array, slopes: Array, base: Array, widths: Array) -> Array:
    """Return the maximum a posteriori logarithms of the factors, to first order about `base`."""
    there = base
    for _ in range(_REWEIGHTINGS):
        left = errors + slopes @ (there - base)
        weighted = slopes * (1.0 / np.sqrt(1.0 + (left / NOISE) ** 2) / NOISE**2)[:, None]
        information = np.diag(widths**-2) + slopes.T @ weighted
        there = there - np.linalg.solve(information, weighted.T @ left + there / widths**2)
    return np.asarray(there)


def _cells(runs: Sequence[PublishedRun], most: int) -> list[_Cell]:
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for index, run in enumerate(runs):
        if run.profile not in KIN or run.choice.noted_all_reduce < BROKEN_NVLINK or run.planned.matmul_dtype is Dtype.FP4:
            continue
        calibration = calibration_of_run(run.planned.hardware)
        if calibration.sustained.sustained_clock_fraction == 1.0 or run.planned.hardware.chip.startswith(_OTHERS):
            continue
        name = _ONE_SILICON.get(calibration.name, calibration.name)
        groups.setdefault((name, run.profile, run.planned.matmul_dtype is Dtype.FP8), []).append(index)
    if not groups:
        raise InputError("cases: hold no run on a chip with a calibration and a sustained clock; give the published ones")
    return [
        _Cell(calibration=name, profile=load_profile(profile), is_narrow=is_narrow, rows=_evenly(rows, most))
        for (name, profile, is_narrow), rows in groups.items()
    ]


_OTHERS = ("v100",)
"""Chips that are predicted with a calibration of another generation."""


def _evenly(rows: Sequence[int], most: int) -> tuple[int, ...]:
    if len(rows) <= most:
        return tuple(rows)
    return tuple(rows[int(index)] for index in np.linspace(0, len(rows) - 1, most))


def _shipped(sustained: SustainedRates, of: str) -> float:
    if of in FLASH:
        return sustained.attention_generations[of]
    if of == ATTENTION:
        return sustained.attention_clock_fraction
    return sustained.clock_fractions.get(Dtype.FP8, 1.0) if of == FP8 else sustained.sustained_clock_fraction


HEADERS = ("calibration", "rate of", "shipped", "fitted", "+-, %", "without one framework", "runs", "frameworks", "")


def rows_of(rates: Sequence[Rate]) -> list[tuple[str, ...]]:
    return [
        (
            rate.calibration,
            rate.of,
            f"{rate.shipped:.2f}",
            f"{rate.value:.2f}",
            f"{100 * rate.spread:.0f}",
            f"{rate.low:.2f} to {rate.high:.2f}" if len(rate.frameworks) > 1 else "-",
            str(rate.num_runs),
            ", ".join(rate.frameworks),
            "determined" if rate.is_determined else "open",
        )
        for rate in rates
    ]


def clocks_values(rates: Sequence[Rate]) -> dict[str, object]:
    """Return the values of the section of docs/accuracy.md."""
    surprises = [f"{rate.of} of {rate.calibration}" for rate in rates if not rate.agrees]
    counts = {"most": _MOST, "determined": sum(rate.is_determined for rate in rates), "rates": len(rates)}
    return {**counts, "surprises": ", ".join(surprises) or "none", "table": table(HEADERS, rows_of(rates), HEADERS[2:5])}


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("kernels.clocks", __doc__)
    options = parser.parse_args(arguments)
    print(columns_text([HEADERS, *rows_of(fitted_clocks(read_runs(options.cases)))]))


if __name__ == "__main__":
    sys.exit(main())
