"""The estimators that published runs of serving share: one for each model, format, cluster and engine."""

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
    """Predicts planned runs. calibration: as `calibration_of_run` is asked."""

    calibration: str | Path | None = None
    made: dict[Any, ServingEstimator] = field(default_factory=dict)

    def predict(self, planned: PlannedServing, engine: Engine | None = None) -> ServingPrediction:
        """By the formulas, which fits need many times. engine: in place of the run's own."""
        return predict_plan(self.of(planned, engine), planned.job, planned.plan, distinct_experts=planned.distinct_experts)

    def as_served(self, planned: PlannedServing) -> ServingPrediction:
        """As `serve` prints it: simulated."""
        return predict_served(self.of(planned), planned.job, planned.plan, distinct_experts=planned.distinct_experts)

    def of(self, planned: PlannedServing, engine: Engine | None = None) -> ServingEstimator:
        """That of a run, with its engine at its version."""
        return self.estimator(planned, (engine or load_engine(planned.engine)).at(planned.version))

    def estimator(self, planned: PlannedServing, engine: Engine) -> ServingEstimator:
        job = planned.job
        key = (job.model, job.quantization, job.kv_precision, planned.hardware, _key(engine))
        if key not in self.made:
            if len(self.made) > 4096:
                self.made.clear()
            self.made[key] = ServingEstimator(
                model=job.model,
                cluster=cluster_of_run(planned.hardware),
                calibration=calibration_of_run(planned.hardware, self.calibration),
                engine=engine,
                quantization=job.quantization,
                cache=job.kv_precision,
            )
        return self.made[key]


def _key(engine: Engine) -> tuple[Any, ...]:
    """An engine's fields, but for its notes, which have no hash."""
    return tuple(getattr(engine, each.name) for each in fields(engine) if each.name != "notes")
