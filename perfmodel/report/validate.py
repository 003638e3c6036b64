"""Published runs predicted from their inputs, and how far off the predictions are (DESIGN.md section 7, `perfmodel validate`)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.cost.estimate import Estimator, RankMemory, make_estimator, rank_memories
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.dtypes import Dtype
from perfmodel.errors import InputError, one_line
from perfmodel.hardware.calibration import SPEC_SHEET, Calibration, default_calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import calibrations_for, cluster_of, load_calibration
from perfmodel.parallel.prediction import Prediction
from perfmodel.report.case_plan import HardwareOfCase, PlannedCase, plan_of_case
from perfmodel.report.cases import Case, read_cases
from perfmodel.resources import write_atomically

COLUMNS = (
    "id",
    "predicted_step_time",
    "measured_step_time",
    "predicted_memory",
    "measured_memory",
    "predicted_fits",
    "reason",
)

#: Matrix multiplies in these run beside attention, activations and everything else in bf16.
_NARROW = (Dtype.FP8, Dtype.FP4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """One case: what was predicted (nan and None where it was not, with the reason) and what was measured. Seconds and bytes.

    framework, memory_kind, memory_rank   the framework's, where the case could be read: what its memory figures count, and of which rank
    """

    id: str
    group: str
    tier: str
    framework: str = ""
    memory_kind: str = ""
    memory_rank: str = ""
    predicted_step_time: float = math.nan
    measured_step_time: float = math.nan
    predicted_memory: float = math.nan
    measured_memory: float = math.nan
    predicted_fits: bool | None = None
    ran: bool | None = None
    reason: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def is_predicted(self) -> bool:
        return not math.isnan(self.predicted_step_time)

    @property
    def is_judged(self) -> bool:
        """Whether it is known that the run fitted or did not, and with what recomputation."""
        return self.is_predicted and self.ran is not None and "recompute" not in self.assumed

    @property
    def time_error(self) -> float:
        """predicted / measured - 1; nan where one is missing."""
        return self.predicted_step_time / self.measured_step_time - 1.0

    @property
    def memory_error(self) -> float:
        return self.predicted_memory / self.measured_memory - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Errors of the predictions of one source (or of all): shares, not percent.

    mean, median, p90   of the absolute error |predicted / measured - 1|
    bias                median of predicted / measured - 1
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
        return _share_of(self.ran_and_fits + self.out_and_predicted_out, self.num_ran + self.num_out)

    @property
    def false_fit_fraction(self) -> float:
        """Of the runs that ran out of memory, the share that was predicted to fit."""
        return _share_of(self.out_but_predicted_fits, self.num_out)

    @property
    def false_out_fraction(self) -> float:
        """Of the runs that ran, the share that was predicted not to fit."""
        return _share_of(self.ran_but_predicted_out, self.num_ran)


def _share_of(count: int, total: int) -> float:
    return count / total if total else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Every case in the order of the files, the errors over all and by source, and why cases were not predicted (reason -> count).

    memories        errors of the memory by source, kind and rank
    framework_fits  fit or not by framework
    """

    rows: tuple[ValidationRow, ...]
    overall: ErrorSummary
    sources: tuple[ErrorSummary, ...]
    memories: tuple[MemorySummary, ...]
    fits: FitCounts
    framework_fits: tuple[FitCounts, ...]
    reasons: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_predicted(self) -> int:
        return sum(row.is_predicted for row in self.rows)

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in self.rows:
            fits = "" if row.predicted_fits is None else str(row.predicted_fits).lower()
            numbers = (row.predicted_step_time, row.measured_step_time, row.predicted_memory, row.measured_memory)
            writer.writerow((row.id, *map(_cell, numbers), fits, row.reason))
        return text.getvalue()


def _cell(number: float) -> str:
    return "" if math.isnan(number) else f"{number:.9g}"


def validate_cases(
    path: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    calibration: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> ValidationResult:
    """Predict every case of a file (or of several, one after the other), one JSON object a line; write the table to `out` if given.

    calibration  a name or a path for every case; None: the default of each case's chip; "spec-sheet": none
    progress     called with the number of cases done, after each
    """
    predictor = CasePredictor(calibration=calibration)
    rows = []
    for each in [path] if isinstance(path, (str, Path)) else path:
        for case in read_cases(each):
            rows.append(predictor.row(case))
            if progress is not None:
                progress(len(rows))
    result = summarise(rows)
    if out is not None:
        write_atomically(out, result.to_csv())
    return result


@dataclass(slots=True, kw_only=True)
class CasePredictor:
    """Predicts cases one after the other; what they share (clusters, machines, compiled programs) is made once."""

    calibration: str | Path | None = None
    estimators: dict[Any, Estimator] = field(default_factory=dict)

    def row(self, case: Case) -> ValidationRow:
        row = ValidationRow(
            id=case.id,
            group=case.group,
            tier=case.tier,
            measured_step_time=case.measured_time,
            measured_memory=case.measured_memory,
            ran=case.ran,
            reason=case.reason,
        )
        if case.reason:
            return row
        try:
            planned = plan_of_case(case.inputs)
            prediction = self.predict(planned)
            memory = self.measured_memory(planned)
        except InputError as error:
            return replace(row, reason=one_line(error, 400))
        except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError, RecursionError) as error:
            # a case that breaks the predictor is a fault of ours: it is reported, and the other cases still count
            return replace(row, reason=f"the prediction failed ({type(error).__name__}: {one_line(error, 200)}); please report this case")
        time = prediction.step_time
        if not (math.isfinite(time) and math.isfinite(memory)):
            return replace(row, reason="the prediction is not a finite number; please report this case")
        return replace(
            row,
            framework=planned.framework.profile,
            memory_kind=planned.framework.memory_kind,
            memory_rank=planned.framework.memory_rank,
            predicted_step_time=time,
            predicted_memory=memory,
            predicted_fits=prediction.fits,
            assumed=planned.assumed,
        )

    def measured_memory(self, planned: PlannedCase) -> float:
        """What the framework's own figure would be: it counts its allocator's memory, neither the driver's context nor NCCL's buffers."""
        ranks = rank_memories(self.estimator(planned), planned.plan)
        match planned.framework.memory_rank:
            case "first":
                figures: tuple[RankMemory, ...] = ranks[:1]
            case "last":
                figures = ranks[-1:]
            case _:
                figures = ranks
        is_reserved = planned.framework.memory_kind == "reserved"
        return max(figure.reserved if is_reserved else figure.allocated for figure in figures)

    def predict(self, planned: PlannedCase) -> Prediction:
        return self.estimator(planned).predict(planned.plan)

    def estimator(self, planned: PlannedCase) -> Estimator:
        """The estimator of the case's job, whatever its batch, on its cluster; compiled programs are shared across clusters."""
        job = planned.plan.job
        software = (job.model, job.seq_len, job.precision, job.optimizer, planned.profile)
        key = (*software, planned.hardware, planned.matmul_dtype)
        if key not in self.estimators:
            cluster = _cluster(planned.hardware)
            machine = _machine(planned.hardware, self.calibration, planned.matmul_dtype)
            estimator = make_estimator(job, cluster, machine, planned.profile)
            if software in self.estimators:
                twin = self.estimators[software]
                estimator.programs, estimator.parameter_programs = twin.programs, twin.parameter_programs
                estimator.graphs, estimator.rule_sets = twin.graphs, twin.rule_sets
            else:
                self.estimators[software] = estimator
            self.estimators[key] = estimator
        return self.estimators[key]


@lru_cache(maxsize=4096)
def _cluster(hardware: HardwareOfCase) -> Cluster:
    return cluster_of(hardware.chip, hardware.chips_per_node, hardware.num_chips, hardware.inter_node_bandwidth_per_chip)


@lru_cache(maxsize=4096)
def _machine(hardware: HardwareOfCase, calibration: str | Path | None, dtype: Dtype) -> Machine:
    cluster = _cluster(hardware)
    overlay = _calibration(cluster.chip.name, calibration)
    machine = resolve_machine(cluster, overlay, dtype=dtype)
    if dtype in _NARROW:
        machine = replace(machine, attention=resolve_machine(cluster, overlay, dtype=Dtype.BF16).attention)
    return machine


@lru_cache(maxsize=256)
def _calibration(chip: str, calibration: str | Path | None) -> Calibration:
    if calibration is None:
        return default_calibration(chip, calibrations_for(chip))
    if str(calibration) == "spec-sheet":
        return SPEC_SHEET
    return load_calibration(calibration)


# --- summary ----------------------------------------------------------------------------------------------------


def summarise(rows: Iterable[ValidationRow]) -> ValidationResult:
    rows = tuple(rows)
    groups: dict[str, list[ValidationRow]] = {}
    reasons: dict[str, int] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
        if not row.is_predicted:
            kind = _kind_of(row.reason)
            reasons[kind] = reasons.get(kind, 0) + 1
    judged = [row for row in rows if row.is_judged]
    frameworks = sorted({row.framework for row in judged})
    return ValidationResult(
        rows=rows,
        overall=error_summary("all", rows),
        sources=tuple(error_summary(name, groups[name]) for name in sorted(groups)),
        memories=memory_summaries(rows),
        fits=fit_counts("all", judged),
        framework_fits=tuple(fit_counts(name, [row for row in judged if row.framework == name]) for name in frameworks),
        reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])),
    )


def fit_counts(name: str, judged: Iterable[ValidationRow]) -> FitCounts:
    """Of rows that were predicted and of which it is known whether they ran."""
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
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        if not math.isnan(row.memory_error):
            groups.setdefault((row.group, row.framework, row.memory_kind, row.memory_rank), []).append(row.memory_error)
    summaries = []
    for (name, framework, kind, rank), errors in sorted(groups.items()):
        mean, median, p90, bias = _statistics(sorted(errors))
        summaries.append(
            MemorySummary(
                name=name, framework=framework, kind=kind, rank=rank, num_rows=len(errors), mean=mean, median=median, p90=p90, bias=bias
            )
        )
    return tuple(summaries)


def error_summary(name: str, rows: Iterable[ValidationRow]) -> ErrorSummary:
    rows = list(rows)
    time = sorted(row.time_error for row in rows if not math.isnan(row.time_error))
    memory = sorted(row.memory_error for row in rows if not math.isnan(row.memory_error))
    mean, median, p90, bias = _statistics(time)
    memory_mean, memory_median, memory_p90, memory_bias = _statistics(memory)
    return ErrorSummary(
        name=name,
        num_rows=len(rows),
        num_predicted=sum(row.is_predicted for row in rows),
        num_times=len(time),
        mean=mean,
        median=median,
        p90=p90,
        bias=bias,
        num_memories=len(memory),
        memory_mean=memory_mean,
        memory_median=memory_median,
        memory_p90=memory_p90,
        memory_bias=memory_bias,
    )


def _statistics(errors: list[float]) -> tuple[float, float, float, float]:
    if not errors:
        return (math.nan,) * 4
    absolute = sorted(abs(error) for error in errors)
    return sum(absolute) / len(absolute), _quantile(absolute, 0.5), _quantile(absolute, 0.9), _quantile(errors, 0.5)


def _quantile(ordered: list[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _kind_of(reason: str) -> str:
    """A reason without what is particular to its row: the rule, not the value."""
    field, _, rule = reason.partition(": ")
    return f"{field.partition('=')[0]}: {rule.partition(';')[0]}" if rule else reason
