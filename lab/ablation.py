"""Ablation of the fitted numbers of frameworks: each in turn at its neutral value, all others as shipped.

    python -m lab.ablation CASES.jsonl

A number is judged by the runs whose predictions it changes. A number that reduces their mean error by less than `WORTH` is not kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.cases import read_runs
from lab.command import command_parser, exits_on_errors
from lab.left_out.fits import LeftOut
from lab.pages import table
from perfmodel.foundation.text import columns_text
from perfmodel.frameworks.profile import GENERIC, list_profiles, load_profile
from perfmodel.frameworks.shipped import NEUTRAL, fitted_numbers
from perfmodel.validation.cases import read_cases

Array = NDArray[np.float64]

WORTH = 0.003
"""Least reduction of the mean error of the affected runs for which a number is kept."""

_MOVES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """A number of one fit, and the mean of |predicted / measured - 1| of the runs that it moves, with it and without.

    of        what is predicted: "step time" or "memory"
    is_lent   a number of another framework, which is not fitted again
    """

    frameworks: tuple[str, ...]
    constant: str
    value: float
    of: str
    num_runs: int
    before: float
    after: float
    is_lent: bool = False

    @property
    def worth(self) -> float:
        return self.after - self.before


def num_constants() -> int:
    """Return the number of fitted numbers of all frameworks; a lent number counts where it is used."""
    return sum(len(fitted_numbers(name)) for name in list_profiles() if name != GENERIC)


def ablations(cases: Path) -> list[Ablation]:
    every = (LeftOut.of_times(read_runs(cases)), LeftOut.of_memories(read_cases(cases)))
    return [ablation for fits in every for name in fits.fits for ablation in _of_fit(fits, name)]


def _of_fit(fits: LeftOut, name: str) -> Iterator[Ablation]:
    fit, rows = fits.fits[name], fits.predicted(name)
    if not rows:
        return
    base, measured = fits.predictor.predict(rows, {}), fits.measured(rows)
    for constant in (*(item.constant.name for item in fit.constants), *fit.lent):
        value = load_profile(fit.profiles[0]).option(constant)
        without = fits.predictor.predict(rows, {constant: NEUTRAL[constant]})
        ablation = _judged(fit.profiles, constant, value, fits.what, base, without, measured)
        yield replace(ablation, is_lent=constant in fit.lent)


def _judged(frameworks: tuple[str, ...], constant: str, value: float, of: str, base: Array, without: Array, measured: Array) -> Ablation:
    moved = np.abs(np.log(without / base)) > _MOVES
    before, after = (float(np.abs(predictions / measured - 1.0)[moved].mean()) if moved.any() else 0.0 for predictions in (base, without))
    return Ablation(
        frameworks=frameworks, constant=constant, value=value, of=of, num_runs=int(moved.sum()), before=before, after=after
    )  # fmt: skip


def rows_of(entries: Sequence[Ablation]) -> list[tuple[str, ...]]:
    """Return table rows: framework, number, value, predicted quantity, runs, error with it and without, in percent."""
    return [
        (
            ", ".join(entry.frameworks),
            f"{entry.constant} (borrowed)" if entry.is_lent else entry.constant,
            f"{entry.value:.3g}",
            entry.of,
            str(entry.num_runs),
            f"{100 * entry.before:.1f}",
            f"{100 * entry.after:.1f}",
            f"{100 * entry.worth:+.1f}",
        )
        for entry in entries
    ]


HEADERS = ("framework", "number", "value", "predicts", "runs affected", "error, %", "without it, %", "difference")


def ablation_values(entries: Sequence[Ablation]) -> dict[str, object]:
    """Return the values of the section of docs/accuracy.md."""
    lent = sum(entry.is_lent for entry in entries)
    counts = {"worth": f"{100 * WORTH:.1f}", "fitted": len(entries) - lent, "lent": lent, "numbers": num_constants()}
    return {**counts, "table": table(HEADERS, rows_of(entries), (HEADERS[2], *HEADERS[4:]))}


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("ablation", __doc__)
    options = parser.parse_args(arguments)
    rows = [HEADERS, *rows_of(ablations(options.cases))]
    print(columns_text(rows))
    print(f"{num_constants()} numbers in the files of all frameworks")


if __name__ == "__main__":
    sys.exit(main())
