"""Plan choice: slowdown of the plan that is predicted to be fastest against the best measured plan.

It is judged within groups of published runs that differ in their plan only. An error common to all plans of a group does not matter; one
that changes their order does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from perfmodel.foundation.grouping import grouped
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import Case
from perfmodel.validation.run_labels import RunLabels, labels_of, plan_group, plan_of

LEAST_PLANS = 4
"""Minimum number of plans in a judged group: a choice between two or three is hardly informative."""

NEAR_BEST = 0.03
"""Tolerance of a near-best plan: the size of measured gaps between the first plans of a group."""

BROKEN_NVLINK = 100e9
"""[byte/s] A noted all-reduce in a node of NVLink slower than this did not use NVLink; healthy nodes note 4 times this bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One run of a group: its plan, predicted and measured time [s], and whether it is predicted to fit."""

    group: str
    plan: str
    labels: RunLabels
    predicted: float
    measured: float
    fits: bool
    noted_all_reduce: float = math.nan


def choice_of(case: Case, planned: PlannedCase) -> Choice:
    """Return the choice of a published run, without its prediction."""
    return Choice(
        group=plan_group(case),
        plan=plan_of(case, planned),
        labels=labels_of(case, planned),
        predicted=math.nan,
        measured=case.measured("step_time"),
        fits=True,
        noted_all_reduce=case.noted_all_reduce,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGroup:
    """Runs that differ in their plan only; times over the measured best, minus 1.

    regret           of the plan that is predicted to be fastest
    fitting_regret   the same among the plans that are predicted to fit: the result of a search
    best_of_three    of the best measured among the three predicted to be fastest
    median_plan      of the median plan: the potential gain of a choice
    rank_correlation Spearman's
    """

    source: str
    model: str
    chip: str
    num_chips: float
    num_plans: int
    regret: float
    fitting_regret: float
    best_of_three: float
    median_plan: float
    rank_correlation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSummary:
    """The groups of one source, or of all. Means over groups; nan without any."""

    name: str
    num_groups: int
    num_plans: int
    mean_regret: float
    largest_regret: float
    mean_fitting_regret: float
    near_best_fraction: float
    rank_correlation: float
    median_plan: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoices:
    """Every judged group, by source and over all.

    num_small_groups      groups of two or three plans, which are not judged
    num_broken_nvlink     runs whose notes give an all-reduce in the node of under 100 GB/s: broken NVLink
    skips_broken_nvlink   whether those were left out
    """

    groups: tuple[PlanGroup, ...]
    sources: tuple[ChoiceSummary, ...]
    overall: ChoiceSummary
    num_small_groups: int
    num_broken_nvlink: int
    skips_broken_nvlink: bool


def plan_choices(choices: Iterable[Choice], *, skip_broken_nvlink: bool = False) -> PlanChoices:
    """Judge the groups with at least `LEAST_PLANS` plans. A plan with several runs counts once, with its median time.

    skip_broken_nvlink   leave out runs on nodes with broken NVLink, by their notes. It selects the judged runs and nothing else: no
                         prediction depends on it.
    """
    choices = list(choices)
    broken = [choice for choice in choices if choice.noted_all_reduce < BROKEN_NVLINK]
    if skip_broken_nvlink:
        choices = [choice for choice in choices if not choice.noted_all_reduce < BROKEN_NVLINK]
    merged = []
    for runs in grouped(choices, lambda choice: choice.group).values():
        plans = grouped(runs, lambda choice: choice.plan).values()  # repeats of a plan count once
        merged.append([replace(same[0], measured=median(run.measured for run in same), noted_all_reduce=math.nan) for same in plans])
    groups = tuple(judge_group(runs) for runs in merged if len(runs) >= LEAST_PLANS)
    names = sorted({group.source for group in groups})
    return PlanChoices(
        groups=groups,
        sources=tuple(choice_summary(name, [group for group in groups if group.source == name]) for name in names),
        overall=choice_summary("all", groups),
        num_small_groups=sum(1 < len(runs) < LEAST_PLANS for runs in merged),
        num_broken_nvlink=len(broken),
        skips_broken_nvlink=skip_broken_nvlink,
    )


def judge_group(runs: Sequence[Choice]) -> PlanGroup:
    """Return the errors of one group, of two plans or more."""
    ordered = sorted(runs, key=lambda run: run.predicted)
    best = min(run.measured for run in runs)
    fitting = [run for run in ordered if run.fits] or ordered
    labels = runs[0].labels
    return PlanGroup(
        source=labels.source,
        model=labels.model,
        chip=labels.chip,
        num_chips=labels.num_chips,
        num_plans=len(runs),
        regret=ordered[0].measured / best - 1.0,
        fitting_regret=fitting[0].measured / best - 1.0,
        best_of_three=min(run.measured for run in ordered[:3]) / best - 1.0,
        median_plan=median(run.measured for run in runs) / best - 1.0,
        rank_correlation=spearman([run.predicted for run in runs], [run.measured for run in runs]),
    )


def choice_summary(name: str, groups: Sequence[PlanGroup]) -> ChoiceSummary:
    regrets = [group.regret for group in groups]
    return ChoiceSummary(
        name=name,
        num_groups=len(groups),
        num_plans=sum(group.num_plans for group in groups),
        mean_regret=_mean(regrets),
        largest_regret=max(regrets, default=math.nan),
        mean_fitting_regret=_mean([group.fitting_regret for group in groups]),
        near_best_fraction=_mean([float(group.best_of_three <= NEAR_BEST) for group in groups]),
        rank_correlation=_mean([group.rank_correlation for group in groups if not math.isnan(group.rank_correlation)]),
        median_plan=_mean([group.median_plan for group in groups]),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation: Pearson's of the ranks, ties sharing their mean rank. nan where one side does not vary.

    Source: Spearman, American Journal of Psychology 15, 1904.
    """
    x, y = _ranks(first), _ranks(second)
    centre = (len(x) - 1) / 2.0
    products = sum((a - centre) * (b - centre) for a, b in zip(x, y, strict=True))
    squares = sum((a - centre) ** 2 for a in x) * sum((b - centre) ** 2 for b in y)
    return products / math.sqrt(squares) if squares > 0 else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: list[float] = (np.cumsum(counts) - (counts + 1) / 2.0)[inverse].tolist()
    return ranks


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
