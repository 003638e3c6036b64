"""Errors of predictions: time and memory by label, verdicts, choice of plans, reasons of rows without a prediction."""

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
from perfmodel.validation.run_labels import RunLabels, order_of_labels
from perfmodel.validation.serving.judgement import ServingResult
from perfmodel.validation.statistics import error_statistics, share_of

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame
    from perfmodel.validation.serving.rows import ServingRow

NO_TIMES = ("mcore",)
"""Sources whose step times mean nothing: continuous integration of toy models in deterministic mode, bound by launches. Memory counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """One case: what was predicted (nan and None where it was not, with the reason) and what was measured. Seconds and bytes.

    kind            training or out of memory, as the case is shaped
    labels          what the row is counted under
    framework, memory_kind, memory_rank   the framework's, where the case could be read: what its memory figures count, and of which rank
    step_time_low, step_time_high         80 % interval
    trains_adapters the run trains adapters only
    has_experts     its model has experts; setting: the same for runs that differ in the release of the framework alone
    shape, features, is_framework_known   the model's sizes; by what errors differ; whether the framework is one with a profile of its own
    passed_over     what it states of its setup that is not read
    choice          the run among those that differ from it in their plan only; None: not predicted
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
        """No figure of the others holds it."""
        return self.trains_adapters or self.has_experts

    @property
    def is_scored(self) -> bool:
        """A predicted step of a primary source, whose time means something, and which trains all of a model."""
        counts = self.tier == "primary" and self.group not in NO_TIMES and not self.is_apart
        return counts and not math.isnan(self.time_error)

    @property
    def is_judged(self) -> bool:
        """Whether it is known that the run, of a dense model, fitted or did not, and with what recomputation."""
        return not self.has_experts and self.is_predicted and self.ran is not None and "recompute" not in self.assumed

    @property
    def time_error(self) -> float:
        """predicted / measured - 1; nan where one is missing."""
        return self.predicted_step_time / self.measured_step_time - 1.0

    @property
    def is_covered(self) -> bool | None:
        """Whether the interval holds the measured time; None where there is no interval or no time."""
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
    coverage            share of the `num_intervals` measured times that lie in their 80 % interval
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

    kind, rank          what the source's figures count (allocated, reserved), and of which pipeline rank (first, last, fullest)
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
    """Runs known to have fitted, or to have run out of memory, by what was predicted; of one framework or of all.

    Runs that do not state their recomputation are not judged: it decides their memory.
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
        """Share of the runs of which the prediction is right; nan where there are none."""
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
    """The runs by which accuracy is judged: errors over all and by each field that was asked for, and the choice of plans without runs on
    broken NVLink."""

    overall: ErrorSummary
    by: Mapping[str, tuple[ErrorSummary, ...]]
    choices: PlanChoices

    @property
    def num_runs(self) -> int:
        return self.overall.num_times


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFigures:
    """Runs of models with experts, which no other figure holds. Of each setting the release counts in which it ran fastest; times of
    `NO_TIMES` do not.

    num_releases   runs with a time that are one release of a setting or another
    overall, by    errors over all settings, and by field
    """

    num_releases: int
    overall: ErrorSummary
    by: Mapping[str, tuple[ErrorSummary, ...]]
    memories: tuple[MemorySummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Every case in the order of the files, the errors over all and by source, and why cases were not predicted (reason -> count).
    Figures are of dense models, but for `experts`.

    by              errors by each field that was asked for
    scored          the runs by which accuracy is judged; of them alone
    choices         how good the plans are that are predicted to be fastest, in groups of runs that differ in their plan only
    kinds           how many cases of each kind
    memories        errors of the memory by source, kind and rank
    framework_fits, source_fits   fit or not by framework, and by source
    serving         runs of serving, which `rows` and all other figures leave out; None where there are none
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
        """Return the table of `validate --out`, in seconds and bytes: a row for each training run, then one for each run of serving."""
        served = self.serving.rows if self.serving is not None else ()
        rows: list[ValidationRow | ServingRow] = [*self.rows, *served]
        return data_frame(case_rows(rows), case_columns(rows)).astype({"predicted_fits": "boolean"})


def summarise(rows: Iterable[ValidationRow], *, by: Sequence[str] = (), skip_broken_nvlink: bool = False) -> ValidationResult:
    """The result of these rows. by: fields of `RunLabels`; skip_broken_nvlink: see `plan_choices`."""
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
"""By which errors of models with experts are summed, whatever is asked for."""


def expert_figures(rows: Sequence[ValidationRow], by: Sequence[str] = ()) -> ExpertFigures:
    """Errors of runs of mixture-of-experts models. by: fields in addition to `EXPERT_FIELDS`."""
    found = [replace(row, measured_step_time=math.nan) if row.group in NO_TIMES else row for row in rows if row.has_experts]
    best = best_releases(found)
    return ExpertFigures(
        num_releases=sum(not math.isnan(row.time_error) for row in found),
        overall=error_summary("all", best),
        by={field: errors_by(best, field) for field in dict.fromkeys((*EXPERT_FIELDS, *by))},
        memories=memory_summaries(found),
    )


def best_releases(rows: Sequence[ValidationRow]) -> list[ValidationRow]:
    """The fastest of runs that differ only in their framework's release, in the order of the first of them. A run without a time is
    kept."""
    best: dict[str, ValidationRow] = {}
    for row in rows:
        key = row.id if math.isnan(row.measured_step_time) or not row.setting else row.setting
        if key not in best or row.measured_step_time < best[key].measured_step_time:
            best[key] = row
    return list(best.values())


def errors_by(rows: Sequence[ValidationRow], field: str) -> tuple[ErrorSummary, ...]:
    """Errors by one field of `RunLabels`, in the order of its labels."""
    groups: dict[str, list[ValidationRow]] = grouped(rows, lambda row: getattr(row.labels, field))
    order = order_of_labels(field)
    names = sorted(groups, key=lambda name: (order.index(name) if name in order else len(order), name))
    return tuple(error_summary(name, groups[name]) for name in names)


def _choices(rows: Iterable[ValidationRow]) -> list[Choice]:
    """Return the predicted runs with a measured time as choices of plan."""
    return [
        replace(row.choice, predicted=row.predicted_step_time, measured=row.measured_step_time, fits=bool(row.predicted_fits))
        for row in rows
        if row.choice is not None and row.is_predicted and not math.isnan(row.measured_step_time)
    ]


def fit_counts(name: str, judged: Iterable[ValidationRow]) -> FitCounts:
    """Counts of predicted verdicts of rows of which it is known whether they ran."""
    pairs = [(bool(row.ran), bool(row.predicted_fits)) for row in judged]
    return FitCounts(
        name=name,
        ran_and_fits=pairs.count((True, True)),
        ran_but_predicted_out=pairs.count((True, False)),
        out_and_predicted_out=pairs.count((False, False)),
        out_but_predicted_fits=pairs.count((False, True)),
    )


def memory_summaries(rows: Iterable[ValidationRow]) -> tuple[MemorySummary, ...]:
    """Errors of every predicted row with a measured memory, by source and by what its figures count."""
    measured = [row for row in rows if not math.isnan(row.memory_error)]
    groups = grouped(measured, lambda row: (row.group, row.framework, row.memory_kind, row.memory_rank))
    summaries = []
    for (name, framework, kind, rank), members in sorted(groups.items(), key=lambda item: item[0]):
        of = error_statistics([row.memory_error for row in members])
        figures = {"mean": of.mean, "median": of.median, "p90": of.p90, "bias": of.bias}
        summaries.append(MemorySummary(name=name, framework=framework, kind=kind, rank=rank, num_rows=of.count, **figures))
    return tuple(summaries)


def error_summary(name: str, rows: Iterable[ValidationRow]) -> ErrorSummary:
    rows = list(rows)
    held = [row.is_covered for row in rows if row.is_covered is not None]
    time, memory = error_statistics([row.time_error for row in rows], held), error_statistics([row.memory_error for row in rows])
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
        num_intervals=len(held),
        coverage=time.coverage,
    )


def _kind_of(reason: str) -> str:
    """A reason without what is particular to its row: the rule, not the value."""
    field, _, rule = reason.partition(": ")
    return f"{field.partition('=')[0]}: {rule.partition(';')[0]}" if rule else reason
