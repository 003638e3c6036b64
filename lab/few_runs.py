"""Errors for an unseen framework after 0, 1, 3 and 10 of its runs are given to the fit.

    python -m lab.few_runs CASES.jsonl [--draws 4] [--seed 1]

Each group's runs are read as if nobody had named their framework. So many of them, drawn at random, are given to `perfmodel fit`'s own
fit, which starts from `generic` as all other frameworks make it; the rest is predicted. Errors are means of |predicted / measured - 1| over
draws; intervals are the 80 % ones that the fitted profile has.

Plans: how much slower than the best measured one the plan is that a user would take, on average over draws and jobs (runs that differ in
their plan only). Times of runs that were given are known, those of others expected over what the fit leaves open, and before any fit over
the frameworks that are known (`frameworks/ensemble.py`, as a search does): he takes the plan whose time is least.
Which runs are given decides how much they tell, so three ways are told apart: any of the framework's, of other models and numbers of chips
for the most part; any of the job's own; and those of the job that are expected to be fastest, which are the ones that a search puts first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lab.command import command_parser, exits_on_errors
from lab.strangers import GROUPS, Strangers, judged_group
from perfmodel.fitting.fit import LogTimes, OwnFit, OwnRun, fit_some, mean_error
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.text import columns_text
from perfmodel.frameworks.ensemble import points_about
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.interval import NORMAL
from perfmodel.report.markdown import markdown_table
from perfmodel.report.table import Table, percent
from perfmodel.uncertainty.priors import HABITS
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.hidden_framework import hidden
from perfmodel.validation.plan_choice import LEAST_PLANS, Choice, PlanGroup, plan_choices

Array = NDArray[np.float64]

GIVEN = (1, 3, 10)
DRAWS, SEED = 4, 1
_MOST_PREDICTED = 60
"""Runs of a group that a draw is judged by: of the largest a random part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """By the number of runs that were given; those that a group has too few runs for are left out.

    regrets      of the plan that would be chosen after any runs of the group, one a draw and job
    of_the_job   the same after any runs of the job; jobs that have no more plans than that are left out
    tried_first  the same after those of the job that are expected to be fastest, one a job
    first_three  of the best of the three plans that a stranger would try first, one a job
    """

    name: str
    num_runs: int
    errors: Mapping[int, float]
    coverages: Mapping[int, float]
    regrets: Mapping[int, Sequence[float]] = field(default_factory=dict)
    of_the_job: Mapping[int, Sequence[float]] = field(default_factory=dict)
    tried_first: Mapping[int, Sequence[float]] = field(default_factory=dict)
    first_three: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenGroup:
    """Runs of one framework, read without its name; profile: what is to be left out of what a fit starts from."""

    profile: str
    runs: list[OwnRun]
    choices: list[Choice] = field(default_factory=list)

    @property
    def jobs(self) -> list[list[int]]:
        """Places of runs that differ in their plan only, of at least `LEAST_PLANS` plans."""
        members: dict[str, list[int]] = {}
        for place, choice in enumerate(self.choices):
            members.setdefault(choice.group, []).append(place)
        return [places for places in members.values() if len({self.choices[place].plan for place in places}) >= LEAST_PLANS]

    def judged(self, job: Sequence[int], log_times: Array, known: Sequence[int] = ()) -> PlanGroup:
        """The choice among the runs of a job by predicted times, of runs that are known by the measured one."""
        times = zip(job, np.exp(log_times), strict=True)
        told = [replace(self.choices[i], predicted=self.runs[i].measured if i in known else float(time)) for i, time in times]
        return plan_choices(told).groups[0]


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


def expected_log_times(every: LogTimes, fit: OwnFit, chosen: Sequence[int]) -> Array:
    """log(time) of some of the runs, expected over what a fit leaves open."""
    total = np.zeros(len(chosen))
    for weight, point in points_about(fit.posterior.covariance):
        values = {}
        for constant, spreads in zip(every.constants, point.tolist(), strict=True):
            moved = constant.value(constant.spreads(fit.values[constant.name]) + spreads)
            values[constant.name] = min(max(moved, constant.lower), constant.upper)
        total += weight * np.exp(every.at(values, chosen))
    return np.asarray(np.log(total))


def figures_of(name: str, group: HiddenGroup, base: ExecutionProfile, *, first: Array | None = None, draws: int, seed: int) -> GroupFigures:
    """Of one group, its framework starting from `base`; first: times by which plans are chosen before any fit [s], those of
    the base where none are given."""
    runs = group.runs
    every = LogTimes(runs=runs, base=base, habits=HABITS)
    measured = np.log([run.measured for run in runs])
    at_base = every.at(every.start)
    start = at_base - measured
    first = np.exp(at_base) if first is None else first
    errors, coverages = {0: mean_error(start)}, {}
    jobs = group.jobs
    at_first = [group.judged(job, np.log(first[job])) for job in jobs]
    regrets = {0: [judged.regret for judged in at_first]}
    of_the_job, tried_first = _given_of_the_job(group, every, jobs, first=first, draws=draws, seed=seed)
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
            regrets[given] += [group.judged(job, expected_log_times(every, fit, job), known).regret for job in jobs]
        errors[given], coverages[given] = float(np.mean(off)), float(np.mean(inside))
    return GroupFigures(
        name=name,
        num_runs=len(runs),
        errors=errors,
        coverages=coverages,
        regrets=regrets,
        of_the_job=of_the_job,
        tried_first=tried_first,
        first_three=[judged.best_of_three for judged in at_first],
    )


def _given_of_the_job(
    group: HiddenGroup, every: LogTimes, jobs: Sequence[Sequence[int]], *, first: Array, draws: int, seed: int
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Regrets after runs of the job itself: any, and those that are expected to be fastest."""
    of_the_job: dict[int, list[float]] = {given: [] for given in GIVEN}
    tried_first: dict[int, list[float]] = {given: [] for given in GIVEN}
    for given in GIVEN:
        random = np.random.default_rng((seed, given, len(GIVEN)))
        for job in jobs:
            if given >= len(job):
                continue
            for draw in range(draws + 1):
                order = random.permutation(len(job)) if draw < draws else np.argsort(first[job], kind="stable")
                known = [job[place] for place in order[:given]]
                fit = fit_some(every, known)
                judged = group.judged(job, expected_log_times(every, fit, job), known)
                (of_the_job if draw < draws else tried_first)[given].append(judged.regret)
    return of_the_job, tried_first


def table_text(figures: Sequence[GroupFigures]) -> str:
    return "\n".join((columns_text(rows_of(figures)), regrets_text(figures), columns_text(regret_rows(figures)))).strip()


def rows_of(figures: Sequence[GroupFigures]) -> list[tuple[str, ...]]:
    """Headers, a line for each group, and their mean, each group weighing one."""
    counts = (0, *GIVEN)
    rows: list[tuple[str, ...]] = [("group", "runs", *(f"{count} given" for count in counts), *(f"coverage, {count}" for count in GIVEN))]
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
    rows.append(("mean over groups", "", *errors, *coverages))
    return rows


def mean_regrets(figures: Sequence[GroupFigures], kind: str = "regrets") -> dict[int, float]:
    """By the number of runs that were given, every job weighing one."""
    found = {count: [regret for each in figures for regret in getattr(each, kind).get(count, ())] for count in (0, *GIVEN)}
    return {count: float(np.mean(regrets)) for count, regrets in found.items() if regrets}


_WAYS = (
    ("regrets", "any of the group"),
    ("of_the_job", "any of the job"),
    ("tried_first", "the expected fastest of the job"),
)


def regret_rows(figures: Sequence[GroupFigures]) -> list[tuple[str, ...]]:
    """Headers, and a line for each way of giving runs; none where no job has plans to choose from."""
    at_first = mean_regrets(figures).get(0)
    if at_first is None:
        return []
    rows: list[tuple[str, ...]] = [("runs given", *(f"{count} given" for count in (0, *GIVEN)))]
    for kind, which in _WAYS:
        means = mean_regrets(figures, kind)
        rows.append((which, percent(at_first), *(percent(means[count]) if count in means else "" for count in GIVEN)))
    return rows


def regrets_text(figures: Sequence[GroupFigures]) -> str:
    if not regret_rows(figures):
        return "Choice of plan: no group of runs differs in its plan only"
    first = percent(float(np.mean([regret for each in figures for regret in each.first_three])))
    return (
        "Choice of plan: how much slower the chosen plan is than the best. The choice is the plan with the least time: measured if its run "
        "is given, otherwise expected over the posterior of the fit. The lower rows hold jobs that have more plans than runs given. With "
        f"no runs given, the best of the three plans expected to be fastest, all measured, is {first} slower"
    )


def few_runs_figures(cases: Sequence[Case], *, draws: int = DRAWS, seed: int = SEED) -> list[GroupFigures]:
    """Of every group of the published runs."""
    groups, strangers = groups_of(cases), Strangers()
    if not groups:
        raise InputError("cases: hold no primary training run of the groups; give the published ones")
    return [
        figures_of(
            name,
            group,
            strangers.profile_without(group.profile),
            first=strangers.expected(group.profile, group.runs),
            draws=draws,
            seed=seed,
        )
        for name, group in ((name, groups[name]) for name, _ in GROUPS if name in groups)
    ]


def few_runs_section(figures: Sequence[GroupFigures]) -> str:
    """For docs/accuracy.md."""
    if not figures:
        return ""
    return f"""

### With a few runs of the framework

The given number of runs of a group, drawn at random ({DRAWS} draws), is passed to `perfmodel fit`, which starts from the same `generic`.
The remaining runs are predicted. The table has their mean error, and the coverage of the 80 % interval of the fitted profile.

{_markdown(rows_of(figures))}

{regrets_text(figures)}.

{_markdown(regret_rows(figures))}"""


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    headers, *lines = rows
    return markdown_table(Table(title="", headers=headers, rows=tuple(lines), right=headers[1:]))


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
