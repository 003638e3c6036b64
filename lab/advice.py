"""Check advice on published sweeps: of two runs that differ in one option, is the one predicted to be faster really faster?

    python -m lab.advice CASES.jsonl [--left-out FILE.csv] [--wrong]

Both runs are of one source, with the same model, chips and batch. `perfmodel advise` ranks a change by the predicted step times of both
plans, and so does this. Runs with equal options count once, with their median time; pairs within 3 % of each other do not count.
`--left-out` is the output of `python -m lab.left_out`: predictions by fits that did not see the model of the run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from lab.accuracy import read_left_out
from lab.cases import is_primary
from lab.command import command_parser, exits_on_errors
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.text import columns_text
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.plan_choice import NEAR_BEST
from perfmodel.validation.run_labels import PLAN_FIELDS, text_without
from perfmodel.validation.validate import CasePredictor
from perfmodel.verbs.advice import LEAST_GAIN

#: Inputs of a run that `advise` can change. dp follows from the other degrees.
OPTIONS = (PLAN_FIELDS - {"dp"}) | {"precision", "settings"}
_DEGREES = ("tp", "pp", "cp", "ep", "virtual_stages")
#: Options without effect where a degree is 1: they follow from it.
_NEEDS = {"sequence_parallel": "tp", "virtual_stages": "pp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run with its options; measured and predicted: step times [s]."""

    id: str
    options: Mapping[str, Any]
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs that differ in one option; `fast` is measured as the faster one."""

    option: str
    fast: Run
    slow: Run

    @property
    def is_right(self) -> bool:
        return self.fast.predicted < self.slow.predicted

    @property
    def is_advised(self) -> bool:
        """Whether `advise` would offer one of the two for the other: the predicted gain is large enough."""
        low, high = sorted((self.fast.predicted, self.slow.predicted))
        return 1 - low / high > LEAST_GAIN


def pairs(cases: Iterable[Case], left_out: Mapping[str, float] | None = None) -> Iterator[Pair]:
    """Yield the pairs of primary runs that differ in one option and more than 3 % in their measured step time.

    left_out   id -> predicted step time [s]; None: by the shipped profiles
    """
    predictor = CasePredictor(has_intervals=False)
    for same in grouped(filter(is_primary, cases), lambda case: text_without(case, OPTIONS | {"dp"})).values():
        runs = list(_runs(same, predictor, left_out)) if len(same) > 1 else []
        for one, other in combinations(runs, 2):
            differing = [name for name in sorted({*one.options, *other.options}) if one.options.get(name) != other.options.get(name)]
            # without those that follow from a degree of 1 in one of the two
            degrees = {name: (one.options[degree], other.options[degree]) for name, degree in _NEEDS.items()}
            names = [name for name in differing if 1 not in degrees.get(name, ())]
            if len(names) != 1:
                continue
            fast, slow = sorted((one, other), key=lambda run: run.measured)
            if slow.measured > fast.measured * (1 + NEAR_BEST):
                yield Pair(option=names[0], fast=fast, slow=slow)


def _runs(cases: Sequence[Case], predictor: CasePredictor, left_out: Mapping[str, float] | None) -> Iterator[Run]:
    """Yield one run for each set of options, with the median time."""
    for repeats in grouped(cases, lambda case: json.dumps(_options(case), sort_keys=True, default=str)).values():
        first = repeats[0]
        time = predictor.row(first).predicted_step_time if left_out is None else left_out.get(first.id, math.nan)
        if not math.isnan(time):
            measured = median(case.measured("step_time") for case in repeats)
            yield Run(id=first.id, options=_options(first), measured=measured, predicted=time)


def _options(case: Case) -> dict[str, Any]:
    """Return option -> value; each setting is an option. A degree that is not given is 1."""
    inputs = case.inputs
    settings = inputs.get("settings")
    options = {name: inputs.get(name) for name in OPTIONS - {"settings"}} | (dict(settings) if isinstance(settings, Mapping) else {})
    options |= {name: inputs.get(name) or 1 for name in _DEGREES}
    return {name: value for name, value in options.items() if value not in (None, False)}


def table(compared: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Return rows of option, pairs, right, advised and right of these; the last one over all."""
    rows = [(option, list(same)) for option, same in grouped(compared, lambda pair: pair.option).items()]
    rows.sort(key=lambda row: -len(row[1]))
    lines: list[tuple[str, ...]] = []
    for option, same in (*rows, ("all", list(compared))):
        advised = [pair for pair in same if pair.is_advised]
        lines.append((option, f"{len(same)}", share(same), f"{len(advised)}", share(advised)))
    return lines


def share(compared: Sequence[Pair]) -> str:
    return f"{sum(pair.is_right for pair in compared) / len(compared):.1%}" if compared else "-"


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("advice", __doc__)
    parser.add_argument("--wrong", action="store_true", help="list the pairs whose direction is predicted wrong")
    parser.add_argument("--left-out", type=Path, metavar="FILE.csv", help="predictions by fits that did not see the model of a run")
    given = parser.parse_args(arguments)
    path: Path = given.cases
    compared = list(pairs(read_cases(path), None if given.left_out is None else read_left_out(given.left_out)))
    headings = ("option", "pairs", "right", "advised", "right")
    print(columns_text([headings, *table(compared)]))
    for pair in compared if given.wrong else ():
        if not pair.is_right:
            fast, slow = pair.fast, pair.slow
            gains = f"measured {slow.measured / fast.measured - 1:+.1%}, predicted {slow.predicted / fast.predicted - 1:+.1%}"
            values = f"{fast.options.get(pair.option)} over {slow.options.get(pair.option)}"
            print(f"{pair.option}: {values}: {gains}: {fast.id}, {slow.id}")


if __name__ == "__main__":
    sys.exit(main())
