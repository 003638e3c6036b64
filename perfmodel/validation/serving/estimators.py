"""Shared estimators of published serving runs: one for each model, format, cluster and engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.pools import predict_plan
from perfmodel.cost.serving.simulated import predict_served
from perfmodel.frameworks.engine import Engine, load_engine
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.validation.run_machine import calibration_of_run, cluster_of_run
from perfmodel.validation.serving.cases import PlannedServing


@dataclass(slots=True, kw_only=True)
class Estimators:
    """Predictor of planned runs. calibration: a name or path for `calibration_of_run`."""

    calibration: str | Path | None = None
    estimators: dict[Any, ServingEstimator] = field(default_factory=dict)

    def predict(self, planned: PlannedServing, engine: Engine | None = None) -> ServingPrediction:
        """Predict a run by the closed-form formulas, for repeated evaluation in fits. engine: replaces the run's engine."""
        return predict_plan(self.of(planned, engine), planned.job, planned.plan, distinct_experts=planned.distinct_experts)

    def as_served(self, planned: PlannedServing) -> ServingPrediction:
        """Predict a run by simulation, as `serve` does."""
        return predict_served(self.of(planned), planned.job, planned.plan, distinct_experts=planned.distinct_experts)

    def of(self, planned: PlannedServing, engine: Engine | None = None) -> ServingEstimator:
        """Return the estimator of a run, with its engine at its version."""
        return self.estimator(planned, (engine or load_engine(planned.engine)).at(planned.version))

    def estimator(self, planned: PlannedServing, engine: Engine) -> ServingEstimator:
        job = planned.job
        key = (job.model, job.quantization, job.kv_precision, planned.hardware, _key(engine))
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


def _key(engine: Engine) -> tuple[Any, ...]:
    """Return the fields of an engine except its notes, which are not hashable."""
    return tuple(getattr(engine, engine_field.name) for engine_field in fields(engine) if engine_field.name != "notes")
