"""Write strategies/frameworks/*/fitted.yaml: the numbers of each framework that are fitted to its runs.

    python -m lab.fitted CASES.jsonl [--out strategies/frameworks]

Step times determine the constants of `lab/left_out/fits.py`, which are fitted here to all runs. Reported memories determine those of
`lab/left_out/memories.py`. A number keeps its date while its value is unchanged.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.left_out.fits import LeftOut
from lab.left_out.memories import MEMORY_FITS, Memories, runs_with_memory
from lab.left_out.runs import read_runs
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
    profiles: dict[str, Numbers] = {}
    for profile, numbers in _of_steps(cases):
        profiles.setdefault(profile, {}).update(numbers)
    known = {profile: {constant: number.value for constant, number in numbers.items()} for profile, numbers in profiles.items()}
    for profile, numbers in _of_memory(cases, known):
        profiles.setdefault(profile, {}).update(numbers)
    return profiles


def _of_steps(cases: Path) -> list[tuple[str, Numbers]]:
    fits, entries = LeftOut(runs=read_runs(cases)), []
    for name, fit in fits.fits.items():
        values = fits.fitted(name)
        numbers = {}
        for constant, value in values.values.items():
            relatives = fit.lent.get(constant, ())
            of = relatives or (name,)
            runs = [fits.runs[index] for source in of for index in fits.rows_of(source)]
            number = _number(
                value, _spread(fits, constant, of), [(run.model, run.planned.hardware.chip) for run in runs], STEPS + _of_runs(relatives)
            )
            numbers[constant] = replace(number, is_lent=bool(relatives))
        entries += [(profile, numbers) for profile in fit.profiles]
        entries += [(profile, {key: _lent(number, name) for key, number in numbers.items()}) for profile in fit.lends_to]
    return entries


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


def _of_memory(cases: Path, known: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Numbers]]:
    memories, entries = Memories(runs=runs_with_memory(read_cases(cases)), known=known), []
    for name, fit in MEMORY_FITS.items():
        runs = memories.of(name)
        if not runs:
            continue
        values, of = memories.fitted(name), [(run.model, run.chip) for run in runs]
        numbers = {constant: _number(value, values.spreads[constant], of, MEMORY) for constant, value in values.values.items()}
        entries.append((name, numbers))
        entries += [(profile, {key: _lent(number, name) for key, number in numbers.items()}) for profile in fit.lends_to]
    return entries


def _number(value: float, spread: float, runs: Sequence[tuple[str, str]], how: str) -> FittedNumber:
    return FittedNumber(
        value=float(f"{value:.3g}"),
        spread=float(f"{spread:.2g}"),
        n=len(runs),
        models=len({model for model, _ in runs}),
        chips=tuple(sorted({chip for _, chip in runs})),
        date=datetime.date.today().isoformat(),
        how=how,
    )


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
