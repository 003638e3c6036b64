"""What a few runs of a framework tell of its others: the table of 0, 1, 3 and 10 given runs, from one command.

    python -m perfmodel.lab.few_runs CASES.jsonl [--draws 4] [--seed 1]

Each group's runs are read as if nobody had named their framework. So many of them, drawn at random, are given to `perfmodel fit`'s own
fit, which starts from `generic` as all other frameworks make it; the rest is predicted. Errors are means of |predicted / measured - 1| over
draws; intervals are the 80 % ones that the fitted profile has. Plans: how much slower than the best measured one the plan is that the
fitted profile predicts to be fastest, on average over draws and groups of runs that differ in their plan only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.text import columns_text
from perfmodel.lab.cases import Case, read_cases
from perfmodel.lab.command import command_parser, exits_on_errors
from perfmodel.lab.own_runs.fit import LogTimes, OwnRun, fit_some, mean_error
from perfmodel.lab.own_runs.habits import HABITS
from perfmodel.lab.plan_choice import Choice, PlanGroup, plan_choices
from perfmodel.lab.strangers import GROUPS, Strangers, hidden, judged_group
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.parallel.residuals import NORMAL
from perfmodel.report.markdown import markdown_table
from perfmodel.report.table import Table, percent

Array = NDArray[np.float64]

GIVEN = (1, 3, 10)
DRAWS, SEED = 4, 1
_MOST_PREDICTED = 60
"""Runs of a group that a draw is judged by: of the largest a random part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """By the number of runs that were given; those that a group has too few runs for are left out.

    regrets      of the plan that would be chosen, one a draw and choice
    first_three  of the best of the three plans that a stranger would try first, one a choice
    """

    name: str
    num_runs: int
    errors: Mapping[int, float]
    coverages: Mapping[int, float]
    regrets: Mapping[int, Sequence[float]] = field(default_factory=dict)
    first_three: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenGroup:
    """Runs of one framework, read without its name; profile: what is to be left out of what a fit starts from."""

    profile: str
    runs: list[OwnRun]
    choices: list[Choice] = field(default_factory=list)


def groups_of(cases: Sequence[Case]) -> dict[str, HiddenGroup]:
    """Primary runs of dense decoders by group (`strangers.GROUPS`)."""
    found: dict[str, HiddenGroup] = {}
    for case in cases:
        try:
            choice, name = judged_group(case)
            run = hidden(case) if name else None
        except InputError:
            continue
        if run is None or choice is None:
            continue
        own = OwnRun(id=case.id, planned=run.planned, measured=case.measured_time, settings=run.settings)
        group = found.setdefault(name, HiddenGroup(profile=run.profile, runs=[]))
        group.runs.append(own)
        group.choices.append(choice)
    return found


def figures_of(name: str, group: HiddenGroup, base: ExecutionProfile, *, draws: int, seed: int) -> GroupFigures:
    """Of one group, its framework starting from `base`."""
    runs = group.runs
    every = LogTimes(runs=runs, base=base, habits=HABITS)
    measured = np.log([run.measured for run in runs])
    start = every.at(every.start) - measured
    errors, coverages = {0: mean_error(start)}, {}
    chosen_at_first = _choices(group, every.at(every.start))
    regrets = {0: [judged.regret for judged in chosen_at_first]}
    for given in GIVEN:
        if given >= len(runs):
            continue
        random = np.random.default_rng((seed, given))
        off, inside, regrets[given] = [], [], []
        for _ in range(draws):
            chosen = random.permutation(len(runs))
            known, rest = chosen[:given].tolist(), chosen[given : given + _MOST_PREDICTED].tolist()
            fit = fit_some(every, known)
            left = every.at(fit.values, rest) - measured[rest]
            off.append(mean_error(left))
            inside.append(float((np.abs(left) < NORMAL * fit.spread(every.slopes(fit.values, rest))).mean()))
            if regrets[0]:
                regrets[given] += [judged.regret for judged in _choices(group, every.at(fit.values))]
        errors[given], coverages[given] = float(np.mean(off)), float(np.mean(inside))
    return GroupFigures(
        name=name,
        num_runs=len(runs),
        errors=errors,
        coverages=coverages,
        regrets=regrets,
        first_three=[judged.best_of_three for judged in chosen_at_first],
    )


def _choices(group: HiddenGroup, log_times: Array) -> Sequence[PlanGroup]:
    """Every choice among the group's runs."""
    predicted = (replace(choice, predicted=float(time)) for choice, time in zip(group.choices, log_times, strict=True))
    return plan_choices(predicted).groups


def table_text(figures: Sequence[GroupFigures]) -> str:
    return f"{columns_text(rows_of(figures))}\n{regrets_text(figures)}"


def rows_of(figures: Sequence[GroupFigures]) -> list[tuple[str, ...]]:
    """Headers, a line for each group, and their mean, each group weighing one."""
    counts = (0, *GIVEN)
    rows: list[tuple[str, ...]] = [("group", "runs", *(f"{count} given" for count in counts), *(f"intervals, {count}" for count in GIVEN))]
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
    return rows


def mean_regrets(figures: Sequence[GroupFigures]) -> dict[int, float]:
    """By the number of runs that were given, every choice weighing one."""
    found = {count: [regret for each in figures for regret in each.regrets.get(count, ())] for count in (0, *GIVEN)}
    return {count: float(np.mean(regrets)) for count, regrets in found.items() if regrets}


def regrets_text(figures: Sequence[GroupFigures]) -> str:
    found = mean_regrets(figures)
    if not found:
        return "choice of plan: no group of runs differs in its plan only"
    given = ", ".join(f"{percent(regret)} with {count} given" for count, regret in found.items())
    first = percent(float(np.mean([regret for each in figures for regret in each.first_three])))
    return (
        f"choice of plan: the one that is predicted to be fastest is slower than the best by {given}; the best of the three that are "
        f"predicted to be fastest with none given, all of them measured, by {first}"
    )


def few_runs_figures(cases: Sequence[Case], *, draws: int = DRAWS, seed: int = SEED) -> list[GroupFigures]:
    """Of every group of the published runs."""
    groups, strangers = groups_of(cases), Strangers()
    if not groups:
        raise InputError("cases: hold no primary training run of the groups; give the published ones")
    return [
        figures_of(name, groups[name], strangers.profile_without(groups[name].profile), draws=draws, seed=seed)
        for name, _ in GROUPS
        if name in groups
    ]


def few_runs_section(figures: Sequence[GroupFigures]) -> str:
    """For docs/accuracy.md."""
    if not figures:
        return ""
    headers, *rows = rows_of(figures)
    told = regrets_text(figures)
    return f"""

### With a few of its runs

So many runs of a group, drawn at random ({DRAWS} draws), are given to the fit of `perfmodel fit`, which starts from the same `generic`; the
rest is predicted: mean error, and the share of the rest that lies in the 80 % interval of the fitted profile.

{markdown_table(Table(title="", headers=headers, rows=tuple(rows), right=headers[1:]))}

{told[0].upper()}{told[1:]}."""


def _mean(values: Sequence[float]) -> str:
    return percent(float(np.mean(values))) if values else ""


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("few_runs", __doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help="random draws of each number of given runs")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N")
    options = parser.parse_args(arguments)
    print(table_text(few_runs_figures(list(read_cases(options.cases)), draws=options.draws, seed=options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
