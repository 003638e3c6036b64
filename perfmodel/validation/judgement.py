"""Errors of predictions: time and memory by label, fit verdicts, choice of plans, and reasons of rows without a prediction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perfmodel.foundation.frames import data_frame
from perfmodel.foundation.grouping import grouped
from perfmodel.uncertainty.residuals import RunFeatures
from perfmodel.validation.fields import UNKNOWN
from perfmodel.validation.plan_choice import Choice, PlanChoices, plan_choices
from perfmodel.validation.rows import case_columns, case_rows
from perfmodel.validation.run_labels import RunLabels, by_label
from perfmodel.validation.serving.judgement import ServingResult
from perfmodel.validation.statistics import error_statistics, share_of

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame
    from perfmodel.validation.serving.rows import ServingRow

NO_TIMES = ("mcore",)
"""Sources whose step times are meaningless: continuous integration of toy models in deterministic mode, launch-bound. Memory counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """Prediction and measurement of one case, in seconds and bytes; nan and None without a prediction, with the reason.

    kind                  training or out of memory, by the case's fields
    labels                labels that errors are grouped by
    framework             profile of the framework
    memory_kind, memory_rank   meaning of the framework's memory figures, and their rank
    step_time_low, step_time_high   80 % interval
    trains_adapters       the run trains adapters only
    has_experts           its model has experts
    setting               equal for runs that differ in the release of the framework alone
    shape, features       sizes of the model; features by which errors differ
    is_framework_known    the framework has a profile of its own
    passed_over           stated settings that are not read
    choice                the run in its group of runs that differ in the plan only; None: not predicted
    """

    id: str
    group: str
    tier: str
    kind: str = "training"
    labels: RunLabels = field(default_factory=lambda: RunLabels(source=UNKNOWN))
    framework: str = ""
    memory_kind: str = ""
    memory_rank: str = ""
    predicted_step_time: float = math.nan
    step_time_low: float = math.nan
    step_time_high: float = math.nan
    measured_step_time: float = math.nan
    predicted_memory: float = math.nan
    measured_memory: float = math.nan
    predicted_fits: bool | None = None
    ran: bool | None = None
    reason: str = ""
    assumed: tuple[str, ...] = ()
    shape: str = ""
    features: RunFeatures | None = None
    is_framework_known: bool = True
    choice: Choice | None = None
    noted_all_reduce: float = math.nan
    trains_adapters: bool = False
    has_experts: bool = False
    setting: str = ""
    passed_over: tuple[str, ...] = ()

    @property
    def is_predicted(self) -> bool:
        return not math.isnan(self.predicted_step_time)

    @property
    def is_apart(self) -> bool:
        """The row has separate figures: those of the other rows leave it out."""
        return self.trains_adapters or self.has_experts

    @property
    def is_scored(self) -> bool:
        """The row is a predicted step of a primary source, with a meaningful time, that trains all weights."""
        counts = self.tier == "primary" and self.group not in NO_TIMES and not self.is_apart
        return counts and not math.isnan(self.time_error)

    @property
    def is_judged(self) -> bool:
        """The run is of a dense model, and its outcome (fitted or not) and its recomputation are known."""
        return not self.has_experts and self.is_predicted and self.ran is not None and "recompute" not in self.assumed

    @property
    def time_error(self) -> float:
        """predicted / measured - 1; nan where one is missing."""
        return self.predicted_step_time / self.measured_step_time - 1.0

    @property
    def is_covered(self) -> bool | None:
        """The measured time is in the interval; None without an interval or a time."""
        if math.isnan(self.step_time_low) or math.isnan(self.measured_step_time):
            return None
        return self.step_time_low <= self.measured_step_time <= self.step_time_high

    @property
    def memory_error(self) -> float:
        return self.predicted_memory / self.measured_memory - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Errors of the predictions of one source, chip or other label (or of all): shares, not percent.

    mean, median, p90   of the absolute error |predicted / measured - 1|
    bias                median of predicted / measured - 1
    coverage            share of the `num_intervals` measured times inside their 80 % interval
    """

    name: str
    num_rows: int
    num_predicted: int
    num_times: int
    mean: float
    median: float
    p90: float
    bias: float
    num_memories: int
    memory_mean: float
    memory_median: float
    memory_p90: float
    memory_bias: float
    num_intervals: int
    coverage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Errors of the predicted memory of one source: shares, not percent.

    kind, rank          meaning of the source's figures (allocated, reserved), and their pipeline rank (first, last, fullest)
    mean, median, p90   of |predicted / measured - 1|
    bias                median of predicted / measured - 1
    """

    name: str
    framework: str
    kind: str
    rank: str
    num_rows: int
    mean: float
    median: float
    p90: float
    bias: float


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
        return self.overall.num_times


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

    rows: tuple[ValidationRow, ...]
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
    def num_rows(self) -> int:
        return len(self.rows) + (self.serving.num_rows if self.serving is not None else 0)

    @property
    def num_predicted(self) -> int:
        return sum(row.is_predicted for row in self.rows) + (self.serving.num_predicted if self.serving is not None else 0)

    def to_frame(self) -> DataFrame:
        """Return the table of `validate --out`, in seconds and bytes: a row for each training run, then one for each serving run."""
        served = self.serving.rows if self.serving is not None else ()
        rows: list[ValidationRow | ServingRow] = [*self.rows, *served]
        return data_frame(case_rows(rows), case_columns(rows)).astype({"predicted_fits": "boolean"})


def summarise(rows: Iterable[ValidationRow], *, by: Sequence[str] = (), skip_broken_nvlink: bool = False) -> ValidationResult:
    """Summarise the rows. by: fields of `RunLabels`; skip_broken_nvlink: see `plan_choices`."""
    rows = tuple(rows)
    dense = [row for row in rows if not row.has_experts]
    judged = [row for row in rows if row.is_judged]
    frameworks, groups = sorted({row.framework for row in judged}), sorted({row.group for row in judged})
    scored = [row for row in rows if row.is_scored]
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
        kinds=dict(Counter(row.kind for row in rows)),
        memories=memory_summaries(dense),
        experts=expert_figures(rows, by),
        fits=fit_counts("all", judged),
        framework_fits=tuple(fit_counts(name, [row for row in judged if row.framework == name]) for name in frameworks),
        source_fits=tuple(fit_counts(name, [row for row in judged if row.group == name]) for name in groups),
        reasons=dict(Counter(_kind_of(row.reason) for row in rows if not row.is_predicted).most_common()),
        passed_over=dict(Counter(name for row in rows for name in row.passed_over).most_common()),
    )


EXPERT_FIELDS = ("source", "chip", "precision", "dispatcher")
"""Fields by which errors of mixture-of-experts models are always grouped."""


def expert_figures(rows: Sequence[ValidationRow], by: Sequence[str] = ()) -> ExpertFigures:
    """Return errors of runs of mixture-of-experts models. by: fields in addition to `EXPERT_FIELDS`."""
    expert_rows = [replace(row, measured_step_time=math.nan) if row.group in NO_TIMES else row for row in rows if row.has_experts]
    best = best_releases(expert_rows)
    return ExpertFigures(
        num_releases=sum(not math.isnan(row.time_error) for row in expert_rows),
        overall=error_summary("all", best),
        by={field: errors_by(best, field) for field in dict.fromkeys((*EXPERT_FIELDS, *by))},
        memories=memory_summaries(expert_rows),
    )


def best_releases(rows: Sequence[ValidationRow]) -> list[ValidationRow]:
    """Return the fastest of the runs that differ in the framework's release only, in the order of their first; keep runs without a time."""
    best: dict[str, ValidationRow] = {}
    for row in rows:
        key = row.id if math.isnan(row.measured_step_time) or not row.setting else row.setting
        if key not in best or row.measured_step_time < best[key].measured_step_time:
            best[key] = row
    return list(best.values())


def errors_by(rows: Sequence[ValidationRow], field: str) -> tuple[ErrorSummary, ...]:
    """Return errors by one field of `RunLabels`, in the order of its labels."""
    return tuple(error_summary(*group) for group in by_label(rows, field).items())


def _choices(rows: Iterable[ValidationRow]) -> list[Choice]:
    """Return the predicted runs with a measured time as choices of plan."""
    return [
        replace(row.choice, predicted=row.predicted_step_time, measured=row.measured_step_time, fits=bool(row.predicted_fits))
        for row in rows
        if row.choice is not None and row.is_predicted and not math.isnan(row.measured_step_time)
    ]


def fit_counts(name: str, judged: Iterable[ValidationRow]) -> FitCounts:
    """Count the predicted verdicts of runs with a known outcome."""
    pairs = [(bool(row.ran), bool(row.predicted_fits)) for row in judged]
    return FitCounts(
        name=name,
        ran_and_fits=pairs.count((True, True)),
        ran_but_predicted_out=pairs.count((True, False)),
        out_and_predicted_out=pairs.count((False, False)),
        out_but_predicted_fits=pairs.count((False, True)),
    )


def memory_summaries(rows: Iterable[ValidationRow]) -> tuple[MemorySummary, ...]:
    """Return errors of every predicted row with a measured memory, by source and by meaning of its figures."""
    measured = [row for row in rows if not math.isnan(row.memory_error)]
    groups = grouped(measured, lambda row: (row.group, row.framework, row.memory_kind, row.memory_rank))
    summaries = []
    for (name, framework, kind, rank), members in sorted(groups.items(), key=lambda item: item[0]):
        statistics = error_statistics([row.memory_error for row in members])
        figures = {"mean": statistics.mean, "median": statistics.median, "p90": statistics.p90, "bias": statistics.bias}
        summaries.append(MemorySummary(name=name, framework=framework, kind=kind, rank=rank, num_rows=statistics.count, **figures))
    return tuple(summaries)


def error_summary(name: str, rows: Iterable[ValidationRow]) -> ErrorSummary:
    rows = list(rows)
    covered = [row.is_covered for row in rows if row.is_covered is not None]
    time, memory = error_statistics([row.time_error for row in rows], covered), error_statistics([row.memory_error for row in rows])
    return ErrorSummary(
        name=name,
        num_rows=len(rows),
        num_predicted=sum(row.is_predicted for row in rows),
        num_times=time.count,
        mean=time.mean,
        median=time.median,
        p90=time.p90,
        bias=time.bias,
        num_memories=memory.count,
        memory_mean=memory.mean,
        memory_median=memory.median,
        memory_p90=memory.p90,
        memory_bias=memory.bias,
        num_intervals=len(covered),
        coverage=time.coverage,
    )


def _kind_of(reason: str) -> str:
    """Return a reason without the values of its row."""
    field, _, rule = reason.partition(": ")
    return f"{field.partition('=')[0]}: {rule.partition(';')[0]}" if rule else reason
