"""What a few runs of a framework tell of its others: the table of 0, 1, 3 and 10 given runs, from one command.

    python -m perfmodel.lab.few_runs CASES.jsonl [--draws 4] [--seed 1]

Each group's runs are read as if nobody had named their framework. So many of them, drawn at random, are given to `perfmodel fit`'s own
fit, which starts from `generic` as all other frameworks make it; the rest is predicted. Errors are means of |predicted / measured - 1| over
draws; intervals are the 80 % ones that the fitted profile has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import InputError, PerfModelError
from perfmodel.foundation.text import columns_text
from perfmodel.lab.cases import Case, read_cases
from perfmodel.lab.own_runs.fit import LogTimes, OwnRun, fit_some, mean_error
from perfmodel.lab.own_runs.habits import HABITS
from perfmodel.lab.strangers import GROUPS, Strangers, group_of, hidden
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.parallel.residuals import NORMAL
from perfmodel.report.table import percent

Array = NDArray[np.float64]

GIVEN = (1, 3, 10)
_MOST_PREDICTED = 60
"""Runs of a group that a draw is judged by: of the largest a random part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """errors, coverages: by the number of runs that were given; those that a group has too few runs for are left out."""

    name: str
    num_runs: int
    errors: Mapping[int, float]
    coverages: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenGroup:
    """Runs of one framework, read without its name; profile: what is to be left out of what a fit starts from."""

    profile: str
    runs: list[OwnRun]


def groups_of(cases: Sequence[Case]) -> dict[str, HiddenGroup]:
    """Primary runs of dense decoders by group (`strangers.GROUPS`)."""
    found: dict[str, HiddenGroup] = {}
    for case in cases:
        try:
            name = group_of(case)
            run = hidden(case) if name else None
        except InputError:
            continue
        if run is None:
            continue
        own = OwnRun(id=case.id, planned=run.planned, measured=case.measured_time, settings=run.settings)
        found.setdefault(name, HiddenGroup(profile=run.profile, runs=[])).runs.append(own)
    return found


def figures_of(name: str, runs: Sequence[OwnRun], base: ExecutionProfile, *, draws: int, seed: int) -> GroupFigures:
    """Of one group, its framework starting from `base`."""
    every = LogTimes(runs=runs, base=base, habits=HABITS)
    measured = np.log([run.measured for run in runs])
    start = every.at(every.start) - measured
    errors, coverages = {0: mean_error(start)}, {}
    for given in GIVEN:
        if given >= len(runs):
            continue
        random = np.random.default_rng((seed, given))
        off, inside = [], []
        for _ in range(draws):
            chosen = random.permutation(len(runs))
            known, rest = chosen[:given].tolist(), chosen[given : given + _MOST_PREDICTED].tolist()
            fit = fit_some(every, known)
            left = every.at(fit.values, rest) - measured[rest]
            off.append(mean_error(left))
            inside.append(float((np.abs(left) < NORMAL * fit.spread(every.slopes(fit.values, rest))).mean()))
        errors[given], coverages[given] = float(np.mean(off)), float(np.mean(inside))
    return GroupFigures(name=name, num_runs=len(runs), errors=errors, coverages=coverages)


def table_text(figures: Sequence[GroupFigures]) -> str:
    """A line for each group, and their mean, each group weighing one."""
    counts = (0, *GIVEN)
    rows = [("group", "runs", *(f"{count} given" for count in counts), *(f"intervals, {count}" for count in GIVEN))]
    for each in figures:
        rows.append(
            (
                each.name,
                str(each.num_runs),
                *(percent(each.errors[count]) if count in each.errors else "" for count in counts),
                *(percent(each.coverages[count]) if count in each.coverages else "" for count in GIVEN),
            )
        )
    errors = [_mean([each.errors[count] for each in figures if count in each.errors]) for count in counts]
    coverages = [_mean([each.coverages[count] for each in figures if count in each.coverages]) for count in GIVEN]
    rows.append(("mean, each group weighing one", "", *errors, *coverages))
    return columns_text(rows)


def _mean(values: Sequence[float]) -> str:
    return percent(float(np.mean(values))) if values else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], prog="python -m perfmodel.lab.few_runs")
    parser.add_argument("cases", type=Path, metavar="CASES.jsonl", help="published training runs, one JSON object a line")
    parser.add_argument("--draws", type=int, default=4, metavar="N", help="random draws of each number of given runs")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args(arguments)
    try:
        groups = groups_of(list(read_cases(options.cases)))
        if not groups:
            raise InputError(f"cases={options.cases}: holds no primary training run of the groups; give the published ones")
        strangers = Strangers()
        found = [
            figures_of(name, groups[name].runs, strangers.profile_without(groups[name].profile), draws=options.draws, seed=options.seed)
            for name, _ in GROUPS
            if name in groups
        ]
        print(table_text(found))
    except PerfModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
