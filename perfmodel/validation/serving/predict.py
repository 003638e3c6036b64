"""Prediction of published serving runs; clusters, estimators and compiled programs are shared between runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.pools import predict_layout
from perfmodel.cost.serving.simulated import predict_served
from perfmodel.foundation.errors import one_line
from perfmodel.frameworks.engine import Engine, load_engine
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.validation.cases import Case
from perfmodel.validation.rows import CaseRow, ServingRow, attempted
from perfmodel.validation.run_labels import labels_of_serving
from perfmodel.validation.run_machine import calibration_of_run, cluster_of_run
from perfmodel.validation.serving.cases import PlannedServing, plan_of_serving


@dataclass(slots=True, kw_only=True)
class Estimators:
    """Predictor of planned runs. calibration: a name or path for `calibration_of_run`."""

    calibration: str | Path | None = None
    estimators: dict[Any, ServingEstimator] = field(default_factory=dict)

    def predict(self, planned: PlannedServing, engine: Engine | None = None) -> ServingPrediction:
        """Predict a run by the closed-form formulas, for repeated evaluation in fits. engine: replaces the run's engine."""
        return predict_layout(self.of(planned, engine), planned.job, planned.layout, distinct_experts=planned.distinct_experts)

    def as_served(self, planned: PlannedServing) -> ServingPrediction:
        """Predict a run by simulation, as `serve` does."""
        return predict_served(self.of(planned), planned.job, planned.layout, distinct_experts=planned.distinct_experts)

    def of(self, planned: PlannedServing, engine: Engine | None = None) -> ServingEstimator:
        """Return the estimator of a run, with its engine at its version."""
        job, engine = planned.job, (engine or load_engine(planned.engine)).at(planned.version)
        hashable = tuple(getattr(engine, entry.name) for entry in fields(engine) if entry.name != "notes")
        key = (job.model, job.quantization, job.kv_precision, planned.hardware, hashable)
        if key not in self.estimators:
            if len(self.estimators) > 4096:
                self.estimators.clear()
            self.estimators[key] = ServingEstimator(
                model=job.model,
                cluster=cluster_of_run(planned.hardware),
                calibration=calibration_of_run(planned.hardware, self.calibration),
                engine=engine,
                quantization=job.quantization,
                cache=job.kv_precision,
            )
        return self.estimators[key]


Predict = Callable[[PlannedServing], ServingPrediction]
"""Prediction of a planned run: by simulation, as `serve` does, or by formulas."""


def serving_row(case: Case, predict: Predict) -> ServingRow:
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
