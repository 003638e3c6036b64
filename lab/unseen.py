"""Errors of predictions for unseen frameworks: leave-one-framework-out over the published runs.

    python -m lab.unseen CASES.jsonl [OUT_OF_MEMORY.jsonl]

Each run is planned without the name of its framework and predicted with the `generic` profile, made from all other frameworks. Ten groups
of runs count, each weighing one. The interval of a group comes from the groups of other frameworks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from lab import accuracy_lines as rules
from lab.cases import PublishedRun, is_primary, published_runs
from lab.command import command_parser, exits_on_errors
from lab.memory_outcomes import MemoryOutcome, outcome_of, reliability, reliability_values
from lab.pages import Section, page, percent_number, table
from lab.splits import Split, cross_validated
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import Verdict
from perfmodel.frameworks.ensemble import family_weights
from perfmodel.uncertainty.open_defaults import open_variance
from perfmodel.uncertainty.priors import BEHAVIOURS
from perfmodel.uncertainty.residuals import UnseenResiduals, unseen_interval
from perfmodel.validation.assumed_framework import HiddenFrameworks, hidden
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.judgement import FitCounts, fit_counts
from perfmodel.validation.plan_choice import LEAST_PLANS, PlanChoices, plan_choices
from perfmodel.validation.statistics import ErrorStatistics, error_statistics
from perfmodel.validation.step_times import PlannedRun, StepTimes
from perfmodel.validation.validate import CasePredictor

Array = NDArray[np.float64]

Groups = Sequence[tuple[str, rules.Rule]]

#: Groups of one framework and one regime.
GROUPS: Groups = (
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


def hidden_runs(cases: Iterable[Case], groups: Groups = GROUPS) -> Iterator[tuple[str, PublishedRun]]:
    """Yield the primary runs of the groups, as read without their framework, with the title of the group."""
    for run in published_runs(cases, is_primary):
        title = next((title for title, holds in groups if holds(run.choice.labels)), "")
        if title:
            with suppress(InputError):
                read = hidden(run.case)
                yield title, replace(run, planned=read.planned, settings=read.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenRun:
    """A run as predicted with its framework left out.

    expected  time expected over the known frameworks [s]
    open      variance of log(step time), below and above, due to framework defaults that are not given
    """

    run: PublishedRun
    group: str
    predicted: float
    expected: float = math.nan
    open: tuple[float, float] = (0.0, 0.0)

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1.0


@dataclass(slots=True, kw_only=True)
class UnseenFrameworks(HiddenFrameworks):
    """Predicts runs with the names of their frameworks hidden."""

    predictor: CasePredictor = field(default_factory=lambda: CasePredictor(has_intervals=False))

    def expected(self, name: str, runs: Sequence[PlannedRun]) -> Array:
        """Return the time of each run, expected over the known frameworks except one: the criterion of a search. [s]"""
        total = np.zeros(len(runs))
        for member in family_weights(self.families_without(name), self.profile_without(name)):
            loaded = dict.fromkeys((run.profile for run in runs), member.profile)
            total += member.weight * StepTimes(runs=runs, load=loaded.__getitem__).predict(range(len(runs)), {})
        return total

    def times(self, cases: Iterable[Case], groups: Groups = GROUPS) -> Iterator[UnseenRun]:
        """Yield the primary runs of the groups."""
        predictions = []
        for group, run in hidden_runs(cases, groups):
            with suppress(InputError):
                predictions.append(UnseenRun(run=run, group=group, predicted=self.predictor.predict(self.planned(run)).step_time))
        runs = [prediction.run for prediction in predictions]
        profiles = [run.profile for run in runs]
        expected = cross_validated(profiles, lambda split: self.expected(split.label, [runs[index] for index in split.held_out]))
        variances = cross_validated(profiles, lambda split: self._open_variances(runs, split))
        for prediction, (below, above), time in zip(predictions, variances.tolist(), expected.tolist(), strict=True):
            yield replace(prediction, open=(below, above), expected=time)

    def _open_variances(self, runs: Sequence[PublishedRun], split: Split) -> Array:
        """Return the variances due to framework defaults that are not given  [runs, (below, above)]."""
        base = self.profile_without(split.label)
        times = StepTimes(runs=runs, load={split.label: base}.__getitem__)
        at_base = np.log(times.predict(split.held_out, {}))
        return np.stack(open_variance(base, BEHAVIOURS, lambda fields: np.log(times.predict(split.held_out, fields)) - at_base), axis=1)

    def outcomes(self, cases: Iterable[Case]) -> list[MemoryOutcome]:
        """Return the outcomes of nanotron's runs, the framework whose failures are published."""
        outcomes = []
        for case in cases:
            if case.ran is None or case.reason or case.is_apart:
                continue
            with suppress(InputError):
                run = hidden(case)
                if run.profile == SWEPT:
                    outcomes.append(outcome_of(case, self.planned(run), self.predictor))
        return outcomes


SWEPT = "nanotron"
"""Framework whose failures are published."""


def fits_of(outcomes: Iterable[MemoryOutcome]) -> FitCounts:
    """Return the counts of a fit check in which tight plans count as neither."""
    wrong = {True: Verdict.DOES_NOT_FIT, False: Verdict.FITS}
    return fit_counts("all", [(run.ran, run.ran == (run.verdict is not wrong[run.ran])) for run in outcomes])


def by_group(runs: Iterable[UnseenRun]) -> dict[str, list[UnseenRun]]:
    groups: dict[str, list[UnseenRun]] = {title: [] for title, _ in GROUPS}
    for run in runs:
        groups[run.group].append(run)
    return {title: members for title, members in groups.items() if members}


def unseen_residuals(runs: Iterable[UnseenRun]) -> tuple[UnseenResiduals, ...]:
    """Return the residuals that ship."""
    return tuple(
        UnseenResiduals(
            group=group,
            family=members[0].run.profile,
            num_runs=len(members),
            quantiles=quantiles_of([math.log(member.run.measured / member.predicted) for member in members]),
            open=(float(np.mean([run.open[0] for run in members])), float(np.mean([run.open[1] for run in members]))),
        )
        for group, members in by_group(runs).items()
    )


_MOST_QUANTILES = 20


def quantiles_of(values: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles at (i + 1/2) / n, linear between runs; n is the number of values, at most `_MOST_QUANTILES`."""
    count = min(len(values), _MOST_QUANTILES)
    return tuple(round(float(value), 4) for value in np.quantile(sorted(values), (np.arange(count) + 0.5) / count, method="hazen"))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenFigures:
    """Errors of one group, with the share of its runs in the 80 % interval of the groups of other frameworks. low, high: its median."""

    errors: ErrorStatistics
    low: float
    high: float


def figures_of(runs: Iterable[UnseenRun]) -> dict[str, UnseenFigures]:
    groups = by_group(runs)
    residuals = unseen_residuals(run for members in groups.values() for run in members)
    figures = {}
    for group, members in groups.items():
        profile = members[0].run.profile
        has_others = any(residual.family != profile for residual in residuals)
        unknown = (math.nan, math.nan)
        bounds = [unseen_interval(residuals, without=profile, open_behaviours=run.open) if has_others else unknown for run in members]
        held = [low <= member.run.measured / member.predicted <= high for member, (low, high) in zip(members, bounds, strict=True)]
        low, high = map(median, zip(*bounds, strict=True))
        figures[group] = UnseenFigures(errors=error_statistics([run.error for run in members], held), low=low, high=high)
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class OverGroups:
    """Means, each group weighing one. scatter: root mean square of the logarithms of their medians."""

    scatter: float
    mean: float
    coverage: float


def over_groups(figures: Mapping[str, UnseenFigures]) -> OverGroups:
    groups = [group.errors for group in figures.values()]
    return OverGroups(
        scatter=math.sqrt(float(np.mean([math.log1p(group.bias) ** 2 for group in groups]))),
        mean=float(np.mean([group.mean for group in groups])),
        coverage=float(np.mean([group.coverage for group in groups])),
    )


def choices_of(runs: Iterable[UnseenRun]) -> PlanChoices:
    """Return the regret of the plans chosen for an unseen framework."""
    return plan_choices([replace(item.run.choice, predicted=item.expected) for item in runs], skip_broken_nvlink=True)


def unseen_sections(known: Mapping[str, UnseenFigures], kin: Mapping[str, UnseenFigures], choices: PlanChoices | None) -> Iterator[Section]:
    """Yield the sections of docs/accuracy.md. known, kin: figures with the framework, and with its family left out."""
    headers = ("runs", "n", "bias", "mean", "in 80 %", "interval", "bias, without family", "mean, without family")
    rows = []
    for name, figures in known.items():
        errors, interval = figures.errors, f"{figures.low:.2f} to {figures.high:.2f}"
        further = (_signed(kin[name].errors.bias), percent_number(kin[name].errors.mean)) if name in kin else ("", "")
        numbers = (str(errors.count), _signed(errors.bias), percent_number(errors.mean), f"{errors.coverage:.0%}", interval)
        rows.append((name, *numbers, *further))
    every, family = over_groups(known), over_groups(kin) if kin else None
    last = (f"scatter {100 * family.scatter:.1f}", percent_number(family.mean)) if family else ("", "")
    mean = ("", f"scatter {100 * every.scatter:.1f}", percent_number(every.mean), f"{every.coverage:.0%}", "")
    rows.append(("**mean over groups**", *mean, *last))
    yield "unseen", {"table": table(headers, rows)}
    if choices is not None and choices.groups:
        overall = choices.overall
        yield (
            "unseen_choice",
            {
                "unseen_choice_mean": f"{100 * overall.mean_regret:.1f}",
                "unseen_choice_worst": f"{100 * overall.largest_regret:.0f}",
                "groups": overall.num_groups,
                "least_plans": LEAST_PLANS,
                "correlation": f"{overall.rank_correlation:.2f}",
            },
        )


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}"


def fit_check_sections(outcomes: Sequence[MemoryOutcome]) -> Iterator[Section]:
    """Yield the section of docs/accuracy.md on probabilities of fitting, if any outcome is known."""
    if outcomes:
        fits = fits_of(outcomes)
        out, ran = fits.out_but_predicted_fits, fits.ran_but_predicted_out
        yield (
            "fit_check",
            {
                "false_positives": out,
                "out_of_memory_runs": fits.num_out,
                "out_share": f"{out / max(1, fits.num_out):.1%}",
                "false_negatives": ran,
                "fitting_runs": fits.num_ran,
                "ran_share": f"{ran / max(1, fits.num_ran):.1%}",
                **reliability_values(reliability(outcomes)),
            },
        )


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("unseen", __doc__, cases=False)
    parser.add_argument("cases", type=Path, nargs="+", metavar="CASES.jsonl", help="published training runs, and those that failed")
    options = parser.parse_args(arguments)
    cases = [case for path in options.cases for case in read_cases(path)]
    for leaves_family, title in ((False, "Each framework left out"), (True, "Each framework left out with its family")):
        frameworks = UnseenFrameworks(leaves_family=leaves_family)
        runs = list(frameworks.times(cases))
        sections = [*unseen_sections(figures_of(runs), {}, choices_of(runs)), *fit_check_sections(frameworks.outcomes(cases))]
        print(f"{title}:\n\n{page('accuracy', sections, wraps=True)}")


if __name__ == "__main__":
    sys.exit(main())
