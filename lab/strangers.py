"""Errors of predictions for unseen frameworks: leave-one-framework-out over the published runs.

    python -m lab.strangers CASES.jsonl [OUT_OF_MEMORY.jsonl]

Each run is planned without the name of its framework (`frameworks.py`, last line) and predicted with the `generic` profile as it is made
from all other frameworks. Ten groups of runs, each weighing one. The interval around a group is that of the groups of other frameworks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from lab import accuracy_lines as rules
from lab.command import command_parser, exits_on_errors
from lab.memory_outcomes import MemoryOutcome, outcome_of, reliability, reliability_line, reliability_rows
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_room import Verdict
from perfmodel.foundation.text import columns_text
from perfmodel.frameworks.ensemble import family_weights
from perfmodel.uncertainty.open_defaults import open_variance
from perfmodel.uncertainty.priors import HABITS
from perfmodel.uncertainty.residuals import StrangerResiduals, stranger_interval
from perfmodel.validation.case_plan import plan_of_case
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.hidden_framework import HiddenFrameworks, HiddenRun, hidden
from perfmodel.validation.plan_choice import BROKEN_NVLINK, LEAST_PLANS, Choice, PlanChoices, choice_of, plan_choices
from perfmodel.validation.step_times import PlannedRun, StepTimes
from perfmodel.validation.validate import CasePredictor

Array = NDArray[np.float64]

#: Groups of one framework and one regime.
GROUPS: Sequence[tuple[str, rules.Rule]] = (
    ("Megatron-LM 2022, A100", lambda labels: rules.is_korthikanti(labels) or rules.is_korthikanti_replicated(labels)),
    ("Megatron-LM 2020, V100 and A100", rules.is_megatron_2020),
    ("Megatron-Core, B200", rules.is_simumax),
    ("Megatron-DeepSpeed, one node", rules.is_vtrain_node),
    ("Megatron-DeepSpeed, many nodes", rules.is_vtrain_nodes),
    ("nanotron, H100", rules.is_nanotron),
    ("Composer, A100", rules.is_mpt_a100),
    ("Composer, H100", rules.is_mpt_h100),
    ("torchtitan and IBM FSDP, bf16", rules.is_torch_fsdp),
    ("torchtitan, fp8", rules.is_torch_fsdp_narrow),
)


def judged_group(case: Case, groups: Sequence[tuple[str, rules.Rule]] = GROUPS) -> tuple[Choice | None, str]:
    """A run as a choice of plan, and the title of its group, empty for none. Raises InputError where it cannot be predicted."""
    choice = _judged(case)
    return choice, _title(choice, groups)


def _judged(case: Case) -> Choice | None:
    """Of a primary run with a time that means something; None for all others."""
    if case.tier != "primary" or case.reason or case.is_apart:
        return None
    if math.isnan(case.measured_time) or case.noted_all_reduce < BROKEN_NVLINK:
        return None
    return choice_of(case, plan_of_case(case.inputs))


def _title(choice: Choice | None, groups: Sequence[tuple[str, rules.Rule]]) -> str:
    return "" if choice is None else next((title for title, holds in groups if holds(choice.labels)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A run as predicted with its framework left out.

    profile   what was left out
    choice    the same among the runs that differ from it in their plan only, by the time that is expected over the known frameworks;
              None: not among any
    open      variance of log(step time), below and above, due to framework defaults that are not given
    """

    id: str
    group: str
    profile: str
    predicted: float
    measured: float
    choice: Choice | None = None
    open: tuple[float, float] = (0.0, 0.0)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def residual(self) -> float:
        return math.log(self.measured / self.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangerFits:
    """Counts of runs out of memory that are predicted to fit, and of runs that ran but are predicted not to."""

    num_failed: int
    failed_but_fit: int
    num_ran: int
    ran_but_not: int


@dataclass(slots=True, kw_only=True)
class Strangers(HiddenFrameworks):
    """Predicts runs with the names of their frameworks hidden."""

    predictor: CasePredictor = field(default_factory=lambda: CasePredictor(has_intervals=False))

    def expected(self, name: str, runs: Sequence[PlannedRun]) -> Array:
        """[s] of each run, over the frameworks that are known but that one: what a search of an unknown framework chooses by."""
        total = np.zeros(len(runs))
        for each in family_weights(self.families_without(name), self.profile_without(name)):
            loaded = dict.fromkeys((run.profile for run in runs), each.profile)
            total += each.weight * StepTimes(runs=runs, load=loaded.__getitem__).predict(range(len(runs)), {})
        return total

    def times(self, cases: Iterable[Case], groups: Sequence[tuple[str, rules.Rule]] = GROUPS) -> Iterator[Stranger]:
        """Primary runs of the groups."""
        found: list[Stranger] = []
        runs: list[HiddenRun] = []
        for case in cases:
            try:
                choice, group = judged_group(case, groups)
                if choice is None or not group:
                    continue
                run = hidden(case)
                name, planned = self.planned(case)
                time = self.predictor.predict(planned).step_time
            except InputError:
                continue
            found.append(Stranger(id=case.id, group=group, profile=name, predicted=time, measured=case.measured_time, choice=choice))
            runs.append(run)
        for each, left_open, expected in zip(found, self._open(runs), self._expected(runs), strict=True):
            assert each.choice is not None
            yield replace(each, open=left_open, choice=replace(each.choice, predicted=expected))

    def _expected(self, runs: Sequence[HiddenRun]) -> list[float]:
        every = [0.0] * len(runs)
        for name in dict.fromkeys(run.profile for run in runs):
            chosen = [index for index, run in enumerate(runs) if run.profile == name]
            for index, time in zip(chosen, self.expected(name, [runs[index] for index in chosen]).tolist(), strict=True):
                every[index] = time
        return every

    def _open(self, runs: Sequence[HiddenRun]) -> list[tuple[float, float]]:
        """Return the variance of each run due to framework defaults that are not given."""
        every = [(0.0, 0.0)] * len(runs)
        for name in dict.fromkeys(run.profile for run in runs):
            chosen, base = [index for index, run in enumerate(runs) if run.profile == name], self.profile_without(name)
            times = StepTimes(runs=runs, load={name: base}.__getitem__)
            here = np.log(times.predict(chosen, {}))
            sides = open_variance(base, HABITS, lambda fields: np.log(times.predict(chosen, fields)) - here)  # noqa: B023
            for index, below, above in zip(chosen, *sides, strict=True):
                every[index] = float(below), float(above)
        return every

    def outcomes(self, cases: Iterable[Case]) -> list[MemoryOutcome]:
        """Of nanotron's runs, the framework whose failures are published."""
        found = []
        for case in cases:
            if case.ran is None or case.reason or case.is_apart:
                continue
            try:
                name, planned = self.planned(case)
                if name == SWEPT:
                    found.append(outcome_of(case, planned, self.predictor))
            except InputError:
                continue
        return found


SWEPT = "nanotron"
"""Whose failures are published."""


def fits_of(outcomes: Iterable[MemoryOutcome]) -> StrangerFits:
    found = list(outcomes)
    failed, ran = [each for each in found if not each.ran], [each for each in found if each.ran]
    return StrangerFits(
        num_failed=len(failed),
        failed_but_fit=sum(each.verdict is Verdict.FITS for each in failed),
        num_ran=len(ran),
        ran_but_not=sum(each.verdict is Verdict.DOES_NOT_FIT for each in ran),
    )


def by_group(strangers: Iterable[Stranger]) -> dict[str, list[Stranger]]:
    found: dict[str, list[Stranger]] = {title: [] for title, _ in GROUPS}
    for each in strangers:
        found[each.group].append(each)
    return {title: runs for title, runs in found.items() if runs}


def residuals_of_strangers(strangers: Iterable[Stranger]) -> tuple[StrangerResiduals, ...]:
    """What ships of them."""
    return tuple(
        StrangerResiduals(
            group=group,
            family=runs[0].profile,
            num_runs=len(runs),
            quantiles=quantiles_of([run.residual for run in runs]),
            open=(float(np.mean([run.open[0] for run in runs])), float(np.mean([run.open[1] for run in runs]))),
        )
        for group, runs in by_group(strangers).items()
    )


_MOST_QUANTILES = 20


def quantiles_of(values: Sequence[float]) -> tuple[float, ...]:
    """At (i + 1/2) / n, linear between runs; as many as there are values where those are few."""
    count = min(len(values), _MOST_QUANTILES)
    return tuple(round(float(value), 4) for value in np.quantile(sorted(values), (np.arange(count) + 0.5) / count, method="hazen"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangerFigures:
    """Of one group. coverage: share of its runs in the 80 % interval that the groups of other frameworks give; low, high: in the middle."""

    num_runs: int
    bias: float
    mean: float
    coverage: float
    low: float
    high: float


def figures_of(strangers: Iterable[Stranger]) -> dict[str, StrangerFigures]:
    groups = by_group(strangers)
    residuals = residuals_of_strangers(run for runs in groups.values() for run in runs)
    found = {}
    for group, runs in groups.items():
        has_others = any(each.family != runs[0].profile for each in residuals)
        bounds = [
            stranger_interval(residuals, without=runs[0].profile, open_habits=run.open) if has_others else (math.nan, math.nan)
            for run in runs
        ]
        errors = [run.error for run in runs]
        inside = [low <= run.measured / run.predicted <= high for run, (low, high) in zip(runs, bounds, strict=True)]
        found[group] = StrangerFigures(
            num_runs=len(runs),
            bias=median(errors),
            mean=float(np.mean(np.abs(errors))),
            coverage=float(np.mean(inside)),
            low=median(low for low, _ in bounds),
            high=median(high for _, high in bounds),
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OverGroups:
    """Means, every group weighing one. scatter: root mean square of the logarithms of their medians."""

    scatter: float
    mean: float
    coverage: float


def over_groups(figures: Mapping[str, StrangerFigures]) -> OverGroups:
    groups = figures.values()
    return OverGroups(
        scatter=math.sqrt(float(np.mean([math.log1p(each.bias) ** 2 for each in groups]))),
        mean=float(np.mean([each.mean for each in groups])),
        coverage=float(np.mean([each.coverage for each in groups])),
    )


def choices_of(strangers: Iterable[Stranger]) -> PlanChoices:
    """Return the regret of the plans chosen for an unseen framework."""
    return plan_choices([each.choice for each in strangers if each.choice is not None], skip_broken_nvlink=True)


def choices_text(choices: PlanChoices) -> str:
    overall = choices.overall
    return (
        "The plan with the least expected time over the known frameworks (each family weighs one, as in a search) "
        f"is {overall.mean_regret:.1%} slower than the best on average over {overall.num_groups} groups of at least {LEAST_PLANS} plans, "
        f"{overall.largest_regret:.0%} at most. Rank correlation: {overall.rank_correlation:.2f}"
    )


def table_text(figures: Mapping[str, StrangerFigures]) -> str:
    rows = [("group", "runs", "bias", "mean", "in 80 %", "interval")]
    rows += [
        (
            group,
            str(each.num_runs),
            f"{each.bias:+.1%}",
            f"{each.mean:.1%}",
            f"{each.coverage:.0%}",
            f"{each.low:.2f} to {each.high:.2f}",
        )
        for group, each in figures.items()
    ]
    every = over_groups(figures)
    rows.append(("mean over groups; scatter of medians", "", f"{every.scatter:.1%}", f"{every.mean:.1%}", f"{every.coverage:.0%}", ""))
    return columns_text(rows)


def fits_text(fits: StrangerFits) -> str:
    return (
        f"With default settings, {fits.failed_but_fit} of {fits.num_failed} nanotron runs that ran out of memory are predicted to fit "
        f"({fits.failed_but_fit / max(1, fits.num_failed):.1%}), and {fits.ran_but_not} of {fits.num_ran} that ran are predicted not to "
        f"fit ({fits.ran_but_not / max(1, fits.num_ran):.1%})"
    )


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("strangers", __doc__, cases=False)
    parser.add_argument("cases", type=Path, nargs="+", metavar="CASES.jsonl", help="published training runs, and those that failed")
    options = parser.parse_args(arguments)
    cases = [case for path in options.cases for case in read_cases(path)]
    for leaves_family, title in ((False, "each framework left out"), (True, "each framework left out with its family")):
        strangers = Strangers(leaves_family=leaves_family)
        found = list(strangers.times(cases))
        print(f"unseen framework, {title}:\n{table_text(figures_of(found))}")
        print(choices_text(choices_of(found)))
        outcomes = strangers.outcomes(cases)
        print(fits_text(fits_of(outcomes)))
        if outcomes:
            bins = reliability(outcomes)
            print(f"predicted probability of fitting and observed share:\n{columns_text(reliability_rows(bins))}\n{reliability_line(bins)}")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
