"""Errors of predictions: metrics by label, fit verdicts, choice of plans, and reasons of rows without a prediction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from perfmodel.foundation.errors import RunError
from perfmodel.foundation.frames import data_frame
from perfmodel.foundation.grouping import grouped
from perfmodel.parallel.interval import METRICS
from perfmodel.validation.case_settings import settings_passed_over
from perfmodel.validation.cases import STEP_METRICS
from perfmodel.validation.plan_choice import Choice, PlanChoices, choice_of, plan_choices
from perfmodel.validation.rows import NO_TIMES, AnyRow, ServingRow, TrainingRow, case_columns, case_rows
from perfmodel.validation.run_labels import FIELDS, SERVING_FIELDS, by_label, text_without
from perfmodel.validation.statistics import ErrorStatistics, error_statistics, share_of

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Errors of the predictions of one source, chip or other label (or of all): shares, not percent.

    metrics   errors by metric
    num_out   runs that are predicted not to fit
    """

    name: str
    num_rows: int
    num_predicted: int
    metrics: Mapping[str, ErrorStatistics]
    num_out: int

    @property
    def times(self) -> ErrorStatistics:
        """Errors of step times."""
        return self.metrics["step_time"]

    @property
    def memories(self) -> ErrorStatistics:
        return self.metrics["memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Errors of the predicted memory of one source: shares, not percent.

    kind, rank   meaning of the source's figures (allocated, reserved), and their pipeline rank (first, last, fullest)
    """

    name: str
    framework: str
    kind: str
    rank: str
    errors: ErrorStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCounts:
    """Confusion matrix of the fit check: runs known to have fitted or to have run out of memory, of one framework or of all.

    Runs that do not state their recomputation are not judged: their memory depends on it.
    """

    name: str = "all"
    ran_and_fits: int
    ran_but_predicted_out: int
    out_and_predicted_out: int
    out_but_predicted_fits: int

    @property
    def num_ran(self) -> int:
        return self.ran_and_fits + self.ran_but_predicted_out

    @property
    def num_out(self) -> int:
        return self.out_and_predicted_out + self.out_but_predicted_fits

    @property
    def accuracy(self) -> float:
        """Share of the runs with a correct prediction; nan without runs."""
        return share_of(self.ran_and_fits + self.out_and_predicted_out, self.num_ran + self.num_out)

    @property
    def false_fit_fraction(self) -> float:
        """Share of the runs out of memory that were predicted to fit."""
        return share_of(self.out_but_predicted_fits, self.num_out)

    @property
    def false_out_fraction(self) -> float:
        """Share of the completed runs that were predicted not to fit."""
        return share_of(self.ran_but_predicted_out, self.num_ran)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Scored runs: errors over all and by each requested field, and the choice of plans without runs on broken NVLink."""

    overall: ErrorSummary
    by: Mapping[str, tuple[ErrorSummary, ...]]
    choices: PlanChoices

    @property
    def num_runs(self) -> int:
        return self.overall.times.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFigures:
    """Errors of runs of mixture-of-experts models, which no other figure contains.

    Of each setting the fastest release counts; times of `NO_TIMES` do not.

    num_releases   runs with a time, over all releases of all settings
    overall, by    errors over all settings, and by field
    """

    num_releases: int
    overall: ErrorSummary
    by: Mapping[str, tuple[ErrorSummary, ...]]
    memories: tuple[MemorySummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """Result of the validation of serving: every case in file order, and the reasons of cases without a prediction (reason -> count).

    overall, by   errors of the scored rows (primary, not suspect) over all, and by field
    secondary     errors of the other rows that are not suspect
    second_hand   errors of figures that were not published by their author
    """

    rows: tuple[ServingRow, ...]
    overall: ErrorSummary
    by: Mapping[str, tuple[ErrorSummary, ...]]
    secondary: ErrorSummary
    second_hand: ErrorSummary
    num_suspect: int
    reasons: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_predicted(self) -> int:
        return sum(row.is_predicted for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Result of a validation: every case in file order, errors, and the reasons of cases without a prediction (reason -> count).

    Figures are of dense models, except `experts`.

    by              errors by each requested field
    scored          figures of the scored runs alone
    choices         regret of the plans that are predicted to be fastest, in groups of runs that differ in their plan only
    kinds           number of cases of each kind
    memories        errors of the memory by source, kind and rank
    framework_fits, source_fits   confusion matrices of the fit check by framework, and by source
    serving         result of the serving runs, which are not in `rows` and all other figures; None without any
    """

    rows: tuple[TrainingRow, ...]
    overall: ErrorSummary
    sources: tuple[ErrorSummary, ...]
    by: Mapping[str, tuple[ErrorSummary, ...]]
    scored: Scored
    choices: PlanChoices
    kinds: Mapping[str, int]
    memories: tuple[MemorySummary, ...]
    fits: FitCounts
    framework_fits: tuple[FitCounts, ...]
    source_fits: tuple[FitCounts, ...]
    experts: ExpertFigures
    reasons: Mapping[str, int]
    passed_over: Mapping[str, int]
    serving: ServingResult | None = None

    @property
    def every_row(self) -> list[AnyRow]:
        """Training runs, then serving runs."""
        return [*self.rows, *(self.serving.rows if self.serving is not None else ())]

    @property
    def num_rows(self) -> int:
        return len(self.every_row)

    @property
    def num_predicted(self) -> int:
        return sum(row.is_predicted for row in self.every_row)

    @property
    def failures(self) -> list[AnyRow]:
        """Rows whose prediction raised an error that is a bug of perfmodel."""
        return [row for row in self.every_row if row.has_failed]

    def check(self) -> None:
        """Raise RunError that names the first of the `failures`, if there are any."""
        if self.failures:
            first, *others = self.failures
            more = f" (and {len(others):,} more such cases)" if others else ""
            raise RunError(f"case={first.id}: {first.reason}{more}")

    def to_frame(self) -> DataFrame:
        """Return the table of `validate --out`, in seconds and bytes: a row for each training run, then one for each serving run."""
        return data_frame(case_rows(self.every_row), case_columns(self.every_row)).astype({"predicted_fits": "boolean"})


def summarise(every_row: Iterable[AnyRow], *, by: Sequence[str] = (), skip_broken_nvlink: bool = False) -> ValidationResult:
    """Summarise training and serving runs.

    by   fields of `RunLabels`, which group the runs of each kind that has them
    skip_broken_nvlink   see `plan_choices`
    """
    every_row = tuple(every_row)
    rows = cast("tuple[TrainingRow, ...]", tuple(row for row in every_row if not row.case.is_serving))
    served = cast("tuple[ServingRow, ...]", tuple(row for row in every_row if row.case.is_serving))
    serving = summarise_serving(served, by=[field for field in by if field in SERVING_FIELDS]) if served else None
    by = [field for field in by if field in FIELDS]
    dense = [row for row in rows if not row.case.has_experts]
    reasons = Counter[str]()  # without the values of the row
    for row in rows:
        if not row.is_predicted:
            name, _, rule = row.reason.partition(": ")
            reasons[f"{name.partition('=')[0]}: {rule.partition(';')[0]}" if rule else row.reason] += 1
    judged = [(row, (bool(row.case.ran), bool(row.predicted_fits))) for row in rows if is_judged(row)]
    scored = [row for row in rows if row.is_scored]

    def fits_by(name_of: Callable[[TrainingRow], str]) -> tuple[FitCounts, ...]:
        groups = grouped(judged, lambda entry: name_of(entry[0]))
        return tuple(fit_counts(name, [outcome for _, outcome in members]) for name, members in sorted(groups.items()))

    return ValidationResult(
        rows=rows,
        overall=error_summary("all", dense),
        sources=errors_by(dense, "source"),
        by={field: errors_by(dense, field) for field in by},
        scored=Scored(
            overall=error_summary("all", scored),
            by={field: errors_by(scored, field) for field in by},
            choices=plan_choices(_choices(scored), skip_broken_nvlink=True),
        ),
        choices=plan_choices(_choices(dense), skip_broken_nvlink=skip_broken_nvlink),
        kinds=dict(Counter([row.kind for row in rows] + ["inference"] * len(served))),
        memories=memory_summaries(dense),
        experts=expert_figures(rows, by),
        fits=fit_counts("all", [outcome for _, outcome in judged]),
        framework_fits=fits_by(lambda row: row.run.framework.profile),
        source_fits=fits_by(lambda row: row.group),
        reasons=dict(reasons.most_common()),
        passed_over=dict(Counter(name for row in rows for name in settings_passed_over(row.case.inputs)).most_common()),
        serving=serving,
    )


def summarise_serving(rows: Iterable[ServingRow], *, by: Sequence[str] = ()) -> ServingResult:
    rows = tuple(rows)
    scored = [row for row in rows if row.is_scored]
    others = [row for row in rows if row.tier != "primary" and not row.case.suspect and not row.is_second_hand]
    return ServingResult(
        rows=rows,
        overall=error_summary("all", scored, METRICS),
        by={field: errors_by(scored, field, METRICS) for field in by},
        secondary=error_summary("secondary", others, METRICS),
        second_hand=error_summary("second-hand", [row for row in rows if row.is_second_hand], METRICS),
        num_suspect=sum(bool(row.case.suspect) and not row.is_second_hand for row in rows),
        reasons=dict(Counter(row.reason for row in rows if not row.is_predicted).most_common()),
    )


def is_judged(row: TrainingRow) -> bool:
    """Return whether the run is of a dense model, and its outcome (fitted or not) and its recomputation are known."""
    case = row.case
    return row.is_predicted and not case.has_experts and case.ran is not None and "recompute" not in row.run.assumed


EXPERT_FIELDS = ("source", "chip", "precision", "dispatcher")
"""Fields by which errors of mixture-of-experts models are always grouped."""


def expert_figures(rows: Sequence[TrainingRow], by: Sequence[str] = ()) -> ExpertFigures:
    """Return errors of runs of mixture-of-experts models. by: fields in addition to `EXPERT_FIELDS`."""
    expert_rows = [
        replace(row, case=replace(row.case, measurements={"memory": row.case.measured("memory")})) if row.group in NO_TIMES else row
        for row in rows
        if row.case.has_experts
    ]
    best = best_releases(expert_rows)
    return ExpertFigures(
        num_releases=sum(row.has_time for row in expert_rows),
        overall=error_summary("all", best),
        by={field: errors_by(best, field) for field in dict.fromkeys((*EXPERT_FIELDS, *by))},
        memories=memory_summaries(expert_rows),
    )


def best_releases(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Return the fastest of the runs that differ in the framework's release only, in the order of their first; keep runs without a time."""
    best: dict[str, TrainingRow] = {}
    for row in rows:
        key = row.id if math.isnan(row.measured_step_time) else text_without(row.case, {"framework"})
        if key not in best or row.measured_step_time < best[key].measured_step_time:
            best[key] = row
    return list(best.values())


def _choices(rows: Iterable[TrainingRow]) -> list[Choice]:
    """Return the predicted runs with a measured time as choices of plan."""
    return [
        replace(choice_of(row.case, row.run), predicted=row.predicted_step_time, fits=bool(row.predicted_fits))
        for row in rows
        if row.has_time
    ]


def fit_counts(name: str, outcomes: Iterable[tuple[bool, bool]]) -> FitCounts:
    """Count runs by whether they ran, and whether they were predicted to fit."""
    counts = Counter(outcomes)
    return FitCounts(
        name=name,
        ran_and_fits=counts[True, True],
        ran_but_predicted_out=counts[True, False],
        out_and_predicted_out=counts[False, False],
        out_but_predicted_fits=counts[False, True],
    )


def memory_summaries(rows: Iterable[TrainingRow]) -> tuple[MemorySummary, ...]:
    """Return errors of every predicted row with a measured memory, by source and by meaning of its figures."""

    def meaning(row: TrainingRow) -> tuple[str, str, str, str]:
        framework = row.run.framework
        return row.group, framework.profile, framework.figures.memory_kind, framework.figures.memory_rank

    groups = grouped([row for row in rows if row.counts("memory")], meaning)
    return tuple(
        MemorySummary(name=name, framework=framework, kind=kind, rank=rank, errors=metric_errors(members, "memory"))
        for (name, framework, kind, rank), members in sorted(groups.items(), key=lambda item: item[0])
    )


def errors_by(rows: Sequence[AnyRow], field: str, metrics: Sequence[str] = STEP_METRICS) -> tuple[ErrorSummary, ...]:
    """Return errors by one field of `RunLabels`, in the order of its labels."""
    return tuple(error_summary(name, members, metrics) for name, members in by_label(rows, field).items())


def error_summary(name: str, rows: Iterable[AnyRow], metrics: Sequence[str] = STEP_METRICS) -> ErrorSummary:
    rows = list(rows)
    return ErrorSummary(
        name=name,
        num_rows=len(rows),
        num_predicted=sum(row.is_predicted for row in rows),
        metrics={metric: metric_errors(rows, metric) for metric in metrics},
        num_out=sum(row.predicted_fits is False for row in rows),
    )


def metric_errors(rows: Iterable[AnyRow], metric: str) -> ErrorStatistics:
    """Return the statistics of the errors that count, and the coverage of the intervals around them."""
    counted = [row for row in rows if row.counts(metric)]
    intervals = [(row, *row.intervals[metric]) for row in counted if metric in row.intervals]
    covered = [low <= row.case.measured(metric) <= high for row, low, high in intervals if low <= high]
    return error_statistics([row.error(metric) for row in counted], covered)
