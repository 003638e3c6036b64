"""Errors for an unseen framework after 0, 1, 3 and 10 of its runs are given to the fit.

    python -m lab.few_runs CASES.jsonl [--draws 12] [--seed 1]

The runs of each group are read without the name of their framework. Some of them, drawn at random, are given to the fit of `perfmodel
fit`, which starts from a `generic` profile of all other frameworks; the rest is predicted. Errors are means of |predicted / measured - 1|
over draws; intervals are the 80 % ones of the fitted profile. The squared errors before any fit are split into what the runs of a group
have in common, and what differs between its jobs, between the layouts of a job, and between the runs of a layout.

Plans: how much slower than the best measured one the chosen plan is, on average over draws and jobs (runs that differ in their plan only).
The choice is the plan with the least time: measured if its run is given, otherwise expected over the posterior of the fit, and before any
fit over the known frameworks (`frameworks/ensemble.py`, as in a search). Three ways of giving runs are compared: any of the framework's,
mostly of other models and numbers of chips; any of the job's own; and those of the job that are expected to be fastest, which a search
lists first.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lab.cases import PublishedRun
from lab.command import command_parser, exits_on_errors
from lab.pages import Section, page, table
from lab.splits import k_of_n
from lab.unseen import GROUPS, UnseenFrameworks, hidden_runs
from perfmodel.fitting.fit import LogTimes, UserFit, UserRun, fit_some, mean_error
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.text import percent
from perfmodel.frameworks.ensemble import points_about
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.interval import NORMAL
from perfmodel.uncertainty.priors import BEHAVIOURS
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.plan_choice import LEAST_PLANS, PlanGroup, plan_choices

Array = NDArray[np.float64]

GIVEN = (1, 3, 10)
DRAWS, SEED = 12, 1
_CHOICE_DRAWS = 4
"""Largest number of draws by which choices of plans are judged: each of them predicts every job."""

_MOST_PREDICTED = 60
"""Largest number of runs of a group that are predicted in a draw; larger groups are sampled."""


ANY, OF_JOB, FASTEST = WAYS = ("any of the group", "any of the job", "the expected fastest of the job")
"""Ways of giving runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """Figures by the number of given runs; numbers for which a group has too few runs are left out.

    components    mean square of log(predicted / measured) before any fit, by part: see `components_of`
    common_known  mean error without the median of log(predicted / measured): that of the best factor for all runs
    regrets       of the chosen plan, by the way of giving runs: one a draw and job. Jobs without further plans are left out
    first_three   of the best of the three plans that are expected to be fastest before any run is given, one a job
    """

    name: str
    num_runs: int
    errors: Mapping[int, float]
    coverages: Mapping[int, float]
    components: tuple[float, ...]
    common_known: float
    regrets: Mapping[str, Mapping[int, Sequence[float]]]
    first_three: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenGroup:
    """Runs of one framework, read without its name."""

    runs: list[PublishedRun]

    @property
    def jobs(self) -> list[list[int]]:
        """Indices of runs that differ in their plan only, of at least `LEAST_PLANS` plans."""
        jobs = grouped(range(len(self.runs)), lambda index: self.runs[index].choice.group).values()
        return [places for places in jobs if len({self.runs[index].choice.plan for index in places}) >= LEAST_PLANS]

    def judged(self, job: Sequence[int], log_times: Array, known: Sequence[int] = ()) -> PlanGroup:
        """Return the choice among the runs of a job by predicted times, and by the measured one of runs that are known."""
        times = zip(job, np.exp(log_times), strict=True)
        choices = [replace(self.runs[i].choice, predicted=self.runs[i].measured if i in known else float(time)) for i, time in times]
        return plan_choices(choices).groups[0]


def groups_of(cases: Sequence[Case]) -> dict[str, HiddenGroup]:
    """Return the primary runs of dense decoders by group (`unseen.GROUPS`)."""
    runs = grouped(hidden_runs(cases), lambda entry: entry[0])
    return {title: HiddenGroup(runs=[run for _, run in members]) for title, members in runs.items()}


def components_of(errors: Array, jobs: Sequence[Hashable], layouts: Sequence[Hashable]) -> tuple[float, ...]:
    """Return the mean squares of the runs' common mean, of jobs about it, of layouts about their job, and of runs about their layout.

    They add up to the mean square of the errors.
    """
    levels: Sequence[Sequence[Hashable]] = ([()] * len(errors), jobs, list(zip(jobs, layouts, strict=True)), range(len(errors)))
    means = [np.zeros(len(errors))]
    for labels in levels:
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        index = np.array([numbers[label] for label in labels])
        means.append((np.bincount(index, errors) / np.bincount(index))[index])
    return tuple(float(((inner - outer) ** 2).mean()) for outer, inner in pairwise(means))


def expected_log_times(every: LogTimes, fit: UserFit, chosen: Sequence[int]) -> Array:
    """Return log(time) of some runs, expected over the posterior of a fit."""
    total = np.zeros(len(chosen))
    for weight, point in points_about(fit.posterior.covariance):
        values = {}
        for constant, spreads in zip(every.constants, point.tolist(), strict=True):
            moved = constant.value(constant.spreads(fit.values[constant.name]) + spreads)
            values[constant.name] = min(max(moved, constant.lower), constant.upper)
        total += weight * np.exp(every.at(values, chosen))
    return np.asarray(np.log(total))


def figures_of(name: str, group: HiddenGroup, base: ExecutionProfile, *, first: Array | None = None, draws: int, seed: int) -> GroupFigures:
    """Return the figures of one group, whose fits start from `base`.

    first   times by which plans are chosen before any fit; those of the base if left out [s]
    """
    runs = group.runs
    given_runs = [UserRun(id=run.id, planned=run.planned, measured=run.measured, settings=run.settings) for run in runs]
    every = LogTimes(runs=given_runs, base=base, behaviours=BEHAVIOURS)
    measured = np.log([run.measured for run in runs])
    at_base = every.at(every.start)
    start = at_base - measured
    first = np.exp(at_base) if first is None else first
    errors, coverages = {0: mean_error(start)}, {}
    layouts = [(run.planned.plan.layout, int(run.planned.plan.zero), run.planned.plan.recompute) for run in runs]
    jobs = group.jobs
    at_first = [group.judged(job, np.log(first[job])) for job in jobs]
    regrets: dict[str, dict[int, list[float]]] = {way: {given: [] for given in GIVEN} for way in WAYS}
    regrets[ANY][0] = [judged.regret for judged in at_first]
    choice_draws = min(draws, _CHOICE_DRAWS)

    def regret(job: Sequence[int], fit: UserFit, known: Sequence[int]) -> float:
        return group.judged(job, expected_log_times(every, fit, job), known).regret

    for given in GIVEN:
        random = np.random.default_rng((seed, given, len(GIVEN)))
        for job in jobs:
            if given >= len(job):
                continue
            drawn = [(OF_JOB, split.seen) for split in k_of_n(given, len(job), draws=choice_draws, random=random)]
            for way, seen in (*drawn, (FASTEST, np.argsort(first[job], kind="stable")[:given].tolist())):
                known = [job[index] for index in seen]
                regrets[way][given].append(regret(job, fit_some(every, known), known))
    for given in GIVEN:
        if given >= len(runs):
            continue
        random = np.random.default_rng((seed, given))
        means, shares = [], []
        for draw, split in enumerate(k_of_n(given, len(runs), draws=draws, random=random)):
            rest = split.held_out[:_MOST_PREDICTED]
            fit = fit_some(every, split.seen)
            left = every.at(fit.values, rest) - measured[rest]
            means.append(mean_error(left))
            shares.append(float((np.abs(left) < NORMAL * fit.spread(every.slopes(fit.values, rest))).mean()))
            regrets[ANY][given] += [regret(job, fit, split.seen) for job in jobs if draw < choice_draws]
        errors[given], coverages[given] = float(np.mean(means)), float(np.mean(shares))
    return GroupFigures(
        name=name,
        num_runs=len(runs),
        errors=errors,
        coverages=coverages,
        components=components_of(start, [run.choice.group for run in runs], layouts),
        common_known=mean_error(start - np.median(start)),
        regrets=regrets,
        first_three=[judged.best_of_three for judged in at_first],
    )


def few_runs_sections(figures: Sequence[GroupFigures], draws: int = DRAWS) -> Iterator[Section]:
    """Yield the sections of docs/accuracy.md: a line for each group, their mean, each group weighing one, and choices of plans."""
    counts = (0, *GIVEN)
    headers = (*(f"{count} given" for count in counts), *(f"coverage, {count}" for count in GIVEN), "common error known")
    rows = [_row(group.name, str(group.num_runs), group.errors, group.coverages, group.common_known) for group in figures]
    errors, coverages = (_means([getattr(group, name) for group in figures], counts) for name in ("errors", "coverages"))
    rows.append(_row("mean over groups", "", errors, coverages, float(np.mean([group.common_known for group in figures]))))
    parts = np.array([group.components for group in figures]).mean(axis=0)
    shares = zip(("few_common", "few_jobs", "few_layouts", "few_rest"), parts / parts.sum(), strict=True)
    yield (
        "few_runs",
        {
            "draws": draws,
            "table": table(("group", "runs", *headers), rows),
            **{name: f"{100 * share:.0f}" for name, share in shares},
        },
    )
    first = mean_regrets(figures).get(0)
    if first is None:
        yield "few_runs_without_choice", {}
        return
    choices = [(way, percent(first), *_cells(mean_regrets(figures, way), GIVEN)) for way in WAYS]
    best = float(np.mean([regret for group in figures for regret in group.first_three]))
    yield "few_runs_choice", {"choice_best_of_three": f"{100 * best:.1f}", "table": table(("runs given", *headers[: len(counts)]), choices)}


def _row(name: str, runs: str, errors: Mapping[int, float], coverages: Mapping[int, float], common: float) -> tuple[str, ...]:
    return name, runs, *_cells(errors, (0, *GIVEN)), *_cells(coverages, GIVEN), percent(common)


def _cells(figures: Mapping[int, float], counts: Sequence[int]) -> list[str]:
    return [percent(figures[count]) if count in figures else "" for count in counts]


def _means(figures: Sequence[Mapping[int, float]], counts: Sequence[int]) -> dict[int, float]:
    """Return the mean of each number of runs over the groups that have it."""
    known = {count: [values[count] for values in figures if count in values] for count in counts}
    return {count: float(np.mean(values)) for count, values in known.items() if values}


def mean_regrets(figures: Sequence[GroupFigures], way: str = ANY) -> dict[int, float]:
    """Return the mean regret by the number of given runs, each job weighing one."""
    by_count = {count: [regret for group in figures for regret in group.regrets[way].get(count, ())] for count in (0, *GIVEN)}
    return {count: float(np.mean(regrets)) for count, regrets in by_count.items() if regrets}


def few_runs_figures(cases: Sequence[Case], *, draws: int = DRAWS, seed: int = SEED) -> list[GroupFigures]:
    """Return the figures of every group of the published runs."""
    groups, frameworks = groups_of(cases), UnseenFrameworks()
    if not groups:
        raise InputError("cases: hold no primary training run of the groups; give the published ones")
    return [
        figures_of(
            name,
            group,
            frameworks.profile_without(group.runs[0].profile),
            first=frameworks.expected(group.runs[0].profile, group.runs),
            draws=draws,
            seed=seed,
        )
        for name, group in ((name, groups[name]) for name, _ in GROUPS if name in groups)
    ]


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("few_runs", __doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help="random draws of each number of given runs")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N")
    options = parser.parse_args(arguments)
    figures = few_runs_figures(list(read_cases(options.cases)), draws=options.draws, seed=options.seed)
    print(page("accuracy", few_runs_sections(figures, options.draws), wraps=True), end="")


if __name__ == "__main__":
    sys.exit(main())
