"""Prediction of published runs from their inputs, and the errors of these predictions (`perfmodel validate`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from perfmodel.cost.assemble import PlanColumns
from perfmodel.cost.estimate import Estimator, make_estimator, rank_memories, with_kept_programs
from perfmodel.cost.memory.plan import RankMemory
from perfmodel.cost.mixed import mixed_estimator
from perfmodel.cost.resolve import resolve_estimator, uncalibrated
from perfmodel.cost.serving.disaggregated import predict_layout
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.simulated import predict_served
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.memory_headroom import outcome_rule
from perfmodel.foundation.resources import check_can_be_written, write_atomically
from perfmodel.foundation.values import check_path
from perfmodel.frameworks.engine import Engine, load_engine
from perfmodel.frameworks.profile import uncertainty_of_memory
from perfmodel.hardware.calibration import PRIOR_NAME, SPEC_SHEET_NAME
from perfmodel.hardware.reader import load_calibration
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.report.document import csv_text
from perfmodel.uncertainty.account import open_in
from perfmodel.uncertainty.residuals import interval, load_residuals, shape_of, with_experts
from perfmodel.uncertainty.run_features import features_of
from perfmodel.validation.assumed_framework import PlanCase, plan_as_stated
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.judgement import ValidationResult, summarise
from perfmodel.validation.rows import AnyRow, CaseRow, ServingRow, TrainingRow, attempted, case_columns, case_rows
from perfmodel.validation.run_labels import FIELDS, SERVING_FIELDS, check_fields, labels_of, labels_of_serving
from perfmodel.validation.run_machine import calibration_of_run, cluster_of_run, machine_of_run
from perfmodel.validation.serving_cases import PlannedServing, plan_of_serving

SUMMED_BY = tuple(dict.fromkeys((*FIELDS, *SERVING_FIELDS)))
"""Fields that errors can be grouped by, for training and serving runs."""


def validate_cases(
    path: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    calibration: str | Path | None = None,
    by: Sequence[str] = (),
    tier: str = "",
    skip_broken_nvlink: bool = False,
    plots: str | Path | None = None,
    plan_case: PlanCase = plan_as_stated,
    progress: Callable[[int], None] | None = None,
) -> ValidationResult:
    """Predict every case of a file (or of several), one JSON object a line; write the table to `out` if given.

    calibration  a name or a path for every case; None: the default of each case's chip; "spec-sheet": none; "prior": the prior from the
                 vendor's other generations, without the chip's own calibration
    by           group errors by these fields too (`SUMMED_BY`)
    tier         only cases of this tier; "": all
    skip_broken_nvlink   leave runs whose notes indicate broken NVLink out of the judged choice of plans
    plots        a folder for the figures; it is created if its parent exists
    plan_case    planner of training runs: under the framework that each names, or another (`validation/assumed_framework.py`)
    progress     called with the number of finished cases, after each
    """
    fields = check_fields(by, SUMMED_BY) if by else ()
    folder = None if plots is None else Path(plots)
    if folder is not None and not os.path.isdir(folder):  # pathlib raises OSError for a long name, or for a folder without permission
        if os.path.exists(folder):
            raise InputError(f"plots={one_line(folder, 200)}: is a file; give a folder")
        check_can_be_written(folder, "plots")
    if calibration is not None and str(calibration) not in (SPEC_SHEET_NAME, PRIOR_NAME):
        load_calibration(calibration)  # a wrong name is an error of the call, not of each case
    predictor = CasePredictor(calibration=calibration, plan_case=plan_case)
    rows: list[AnyRow] = []
    files: Sequence[Any] = path if isinstance(path, (list, tuple)) else [path]
    for file in files:
        check_path(file, "cases")
        for case in _cases_of(file):
            if tier and case.tier != tier:
                continue
            rows.append(serving_row(case, predictor.as_served) if case.is_serving else predictor.row(case))
            if progress is not None:
                progress(len(rows))
    if tier and not rows:
        raise InputError(f"tier={one_line(tier)}: no case is of it; leave it out to see the tiers that there are (--by tier)")
    result = summarise(rows, by=fields, skip_broken_nvlink=skip_broken_nvlink)
    if folder is not None:
        from perfmodel.validation.figures import write_figures

        write_figures(result, folder)
    if out is not None:
        write_atomically(out, table_of(rows))
    return result


def _cases_of(path: str | Path) -> Iterator[Case]:
    """Yield the cases of a file. Raise InputError if no line is a JSON object, because the errors of no case are an empty table."""
    fault, has_case = "it is empty", False
    for case in read_cases(path):
        if not has_case and fault == "it is empty":
            fault = case.reason.rpartition(";")[0]
        has_case = has_case or bool(case.inputs) or not case.reason
        yield case
    if not has_case:
        raise InputError(f"cases={one_line(path, 80)}: holds no case ({one_line(fault, 90)}); give JSON lines, one run each")


def table_of(rows: Sequence[AnyRow]) -> str:
    """Return the rows as CSV, one for every case: seconds, bytes, empty cells for missing values; columns of the kinds that are present."""

    def cell(value: object) -> object:
        return f"{value:.9g}" if isinstance(value, float) and not math.isnan(value) else value

    return csv_text([{name: cell(value) for name, value in values.items()} for values in case_rows(rows)], case_columns(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePredictor:
    """Predictor of cases. calibration: a name or path for `calibration_of_run`; the other fields are of training runs."""

    calibration: str | Path | None = None
    has_intervals: bool = True
    plan_case: PlanCase = plan_as_stated

    def row(self, case: Case) -> TrainingRow:
        """Return the row of a training case; `serving_row` is that of a serving case."""
        kind = "out of memory" if case.ran is False else "training"
        return attempted(CaseRow(case=case, kind=kind, labels=labels_of(case, None), reason=case.reason), self._predicted)

    def _predicted(self, row: TrainingRow) -> TrainingRow:
        planned = self.plan_case(row.case)
        estimator = self.estimator(planned)
        prediction = outcome(estimator, planned)
        time = prediction.step_time
        intervals = {}
        if self.has_intervals:
            low, high = self.interval(estimator, planned)
            intervals["step_time"] = (time * low, time * high)
        return replace(
            row,
            planned=planned,
            labels=labels_of(row.case, planned),
            predicted={"step_time": time, "memory": memory_figure(estimator, planned)},
            intervals=intervals,
            predicted_fits=prediction.fits,
        )

    def interval(self, estimator: Estimator, planned: PlannedCase) -> tuple[float, float]:
        """Return factors of the prediction from runs of other models only: the interval that an unpublished run would get."""
        framework, chip = planned.framework, planned.hardware.chip
        step_interval = interval(
            load_residuals(),
            features_of(planned.plan, chip),
            family=framework.profile,
            borrows=framework.borrows,
            uncalibrated=uncalibrated(estimator.machine),
            is_usual=self.calibration is None,
            unseen=shape_of(planned.plan.job.transformer),
            open_behaviours=open_in(estimator, planned.plan) if framework.borrows else (0.0, 0.0),
        )
        if planned.plan.has_experts:
            experts = load_residuals().experts
            step_interval = with_experts(step_interval, [group for group in experts if group.family != framework.profile] or experts)
        return step_interval.low, step_interval.high

    def predict(self, planned: PlannedCase) -> Prediction:
        return outcome(self.estimator(planned), planned)

    def estimator(self, planned: PlannedCase) -> Estimator:
        """Return the estimator of the case's job on its cluster; estimators of equal jobs share their programs."""
        job, cluster = planned.plan.job, cluster_of_run(planned.hardware)
        if cluster.pools:
            calibration = calibration_of_run(planned.hardware, self.calibration)
            return resolve_estimator(job, cluster, calibration=calibration, profile=planned.profile)
        machine = machine_of_run(planned.hardware, planned.matmul_dtype, calibration=self.calibration)
        return with_kept_programs(make_estimator(job, cluster, machine, planned.profile))

    def served(self, planned: PlannedServing, engine: Engine | None = None) -> ServingPrediction:
        """Predict a serving run by the closed-form formulas, for repeated evaluation in fits. engine: replaces the run's engine."""
        estimator = self.serving_estimator(planned, engine)
        return predict_layout(estimator, planned.job, planned.layout, distinct_experts=planned.distinct_experts)

    def as_served(self, planned: PlannedServing) -> ServingPrediction:
        """Predict a serving run by simulation, as `serve` does."""
        return predict_served(self.serving_estimator(planned), planned.job, planned.layout, distinct_experts=planned.distinct_experts)

    def serving_estimator(self, planned: PlannedServing, engine: Engine | None = None) -> ServingEstimator:
        """Return the estimator of a serving run, with its engine at its version."""
        job = planned.job
        return ServingEstimator(
            model=job.model,
            cluster=cluster_of_run(planned.hardware),
            calibration=calibration_of_run(planned.hardware, self.calibration),
            engine=(engine or load_engine(planned.engine)).at(planned.version),
            quantization=job.quantization,
            cache=job.kv_precision,
        )


def outcome(estimator: Estimator, planned: PlannedCase) -> Prediction:
    """Return the prediction; whether it fits follows the rule for outcomes (`outcome_rule`), independent of a search's headroom."""
    rule = outcome_rule(uncertainty_of_memory(estimator.profile))
    return estimator.predict(planned.plan, memory_headroom=rule.headroom, risk=rule.risk)


def memory_figure(estimator: Estimator, planned: PlannedCase, columns: PlanColumns | None = None) -> float:
    """Return memory as the framework reports it: that of its allocator, without the driver's context and NCCL's buffers.

    For several kinds of chips, it is that of the first kind.
    """
    if estimator.cluster.pools:
        estimator = mixed_estimator(estimator).pools[0]
    ranks = rank_memories(estimator, planned.plan, columns)
    match planned.framework.figures.memory_rank:
        case "first":
            figures: tuple[RankMemory, ...] = ranks[:1]
        case "last":
            figures = ranks[-1:]
        case _:
            figures = ranks
    is_reserved = planned.framework.figures.memory_kind == "reserved"
    return max(figure.reserved if is_reserved else figure.allocated for figure in figures)


PredictService: TypeAlias = Callable[[PlannedServing], ServingPrediction]
"""Prediction of a planned run: by simulation, as `serve` does, or by formulas."""


def serving_row(case: Case, predict: PredictService) -> ServingRow:
    """Return the row of a serving case with its prediction, or with the reason why there is none."""
    kind = one_line(case.inputs.get("kind") or "", 40)
    row: ServingRow = CaseRow(case=case, kind=kind, labels=labels_of_serving(case, None), reason=case.reason)
    return attempted(attempted(row, _planned), lambda planned: with_prediction(planned, predict(planned.run)))


def _planned(row: ServingRow) -> ServingRow:
    planned = plan_of_serving(row.case.inputs)
    return replace(row, kind=planned.kind, planned=planned, labels=labels_of_serving(row.case, planned))


def with_prediction(row: ServingRow, prediction: ServingPrediction) -> ServingRow:
    """Return the row with the predicted metrics that are compared for this kind of run."""
    planned = row.run
    predicted = metrics_of(planned, prediction)
    all_intervals = dict(prediction.intervals)
    if "tokens_per_second" in all_intervals:  # these are of one chip
        low, high = all_intervals["tokens_per_second"]
        all_intervals["tokens_per_second"] = low * planned.layout.num_chips, high * planned.layout.num_chips
    return replace(
        row,
        predicted=predicted,
        intervals={metric: all_intervals[metric] for metric in predicted if metric in all_intervals},
        predicted_fits=prediction.fits,
        max_sequences=prediction.max_sequences,
    )


def metrics_of(planned: PlannedServing, prediction: ServingPrediction) -> dict[str, float]:
    """Return the predicted metrics that a run of this kind is compared with."""
    rate = prediction.tokens_per_second_per_chip * planned.layout.num_chips
    latency = prediction.request_latency.mean
    match planned.kind:
        case "ttft_only":
            return {"ttft": prediction.ttft.mean}
        case "max_throughput":
            return {"tokens_per_second": rate}
        case "decode_step":
            return {"ttft": prediction.prefill_time, "tpot": prediction.decode_step}
        case "static_batch":
            batch = planned.job.concurrency or 1
            return {
                "ttft": prediction.ttft.mean,
                "tpot": prediction.tpot.mean,
                "request_latency": latency,
                "tokens_per_second": batch * planned.job.output_len.mean / latency,
            }
        case _:
            return {"ttft": prediction.ttft.mean, "tpot": prediction.tpot.mean, "request_latency": latency, "tokens_per_second": rate}
