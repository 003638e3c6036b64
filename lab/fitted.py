"""Write strategies/frameworks/*/fitted.yaml: the numbers of each framework that are fitted to its runs.

    python -m lab.fitted CASES.jsonl [--out strategies/frameworks]

The constants of `lab/left_out/fits.py` are fitted to all runs. A number keeps its date while its value is unchanged.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.cases import read_runs
from lab.command import command_parser, exits_on_errors
from lab.left_out.fits import LeftOut
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.files import dump_yaml
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.units import exact_quantity
from perfmodel.frameworks.shipped import FITTED, FittedNumber, fitted_numbers, frameworks_dir, unit_of
from perfmodel.validation.cases import read_cases

Numbers = dict[str, FittedNumber]

HEAD = "# Written by `python -m lab.fitted`: values fitted to this framework's runs. Not edited by hand.\n"

STEPS, MEMORY = "step times", "memory that is reported"


def fitted_profiles(cases: Path) -> dict[str, Numbers]:
    """Return every number that is fitted to runs, by profile."""
    profiles = _numbers(LeftOut.of_times(read_runs(cases)), STEPS)
    known = {profile: {constant: number.value for constant, number in numbers.items()} for profile, numbers in profiles.items()}
    for profile, numbers in _numbers(LeftOut.of_memories(read_cases(cases), known), MEMORY).items():
        profiles[profile] = profiles.get(profile, {}) | numbers
    return profiles


def _numbers(fits: LeftOut, how: str) -> dict[str, Numbers]:
    """Return the numbers of the fits whose frameworks have runs, by profile. how: what they were fitted to."""
    profiles: dict[str, Numbers] = {}
    for name, fit in fits.fits.items():
        if not fits.predicted(name):
            continue
        numbers = {}
        for constant, value in fits.fitted(name).values.items():
            relatives = fit.lent.get(constant, ())
            of = relatives or (name,)
            runs = [fits.runs[index] for source in of for index in fits.rows_of(source)]
            numbers[constant] = FittedNumber(
                value=float(f"{value:.3g}"),
                spread=float(f"{_spread(fits, constant, of):.2g}"),
                n=len(runs),
                models=len({run.model for run in runs}),
                chips=tuple(sorted({run.planned.hardware.chip for run in runs})),
                date=datetime.date.today().isoformat(),
                how=how + _of_runs(relatives),
                is_lent=bool(relatives),
            )
        profiles |= dict.fromkeys(fit.profiles, numbers)
        profiles |= {profile: {key: _lent(number, name) for key, number in numbers.items()} for profile in fit.lends_to}
    return profiles


def _spread(fits: LeftOut, constant: str, of: Sequence[str]) -> float:
    """Return the spread of one fit's number, or the scatter of several fits about their geometric mean."""
    fitted = [fits.fitted(name) for name in of]
    if len(fitted) == 1:
        return fitted[0].spreads[constant]
    logs = np.log([fit.values[constant] for fit in fitted])
    return float(np.exp(logs.mean()) * logs.std(ddof=1))


def _of_runs(relatives: Sequence[str]) -> str:
    names = " and ".join(f"{name}'s" for name in relatives)
    return f" of {names} runs" if relatives else ""


def _lent(number: FittedNumber, name: str) -> FittedNumber:
    return replace(number, how=number.how if number.is_lent else number.how + _of_runs([name]), is_lent=True)


def file_text(numbers: Mapping[str, FittedNumber], before: Mapping[str, FittedNumber]) -> str:
    """Return the contents of a file; an unchanged number keeps its date."""

    def quantity(constant: str, value: float) -> str | float:
        return exact_quantity(value, unit_of(constant)) if constant.endswith("_bytes") or "time" in constant else value

    data = {}
    for constant, number in sorted(numbers.items()):
        old = before.get(constant)
        data[constant] = {
            "value": quantity(constant, number.value),
            "spread": quantity(constant, number.spread),
            "n": number.n,
            "models": number.models,
            "chips": list(number.chips),
            "date": old.date if old is not None and old.value == number.value else number.date,
            "how": number.how,
            **({"lent": True} if number.is_lent else {}),
        }
    return HEAD + (dump_yaml(data, inline_leaves=True) if data else "{}\n")


def write_fitted(cases: Path, out: Path) -> list[Path]:
    written = []
    for profile, numbers in fitted_profiles(cases).items():
        folder = out / profile
        if not folder.is_dir():
            raise InputError(f"out={one_line(out, 200)}: has no folder {profile}; give the folder of the framework profiles")
        if not numbers:
            (folder / FITTED).unlink(missing_ok=True)
            continue
        before = fitted_numbers(profile) if out.resolve() == frameworks_dir().resolve() else {}
        write_atomically(folder / FITTED, file_text(numbers, before))
        written.append(folder / FITTED)
    return written


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("fitted", __doc__)
    parser.add_argument("--out", type=Path, default=Path("strategies/frameworks"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    for path in write_fitted(options.cases, options.out):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
