"""The estimators that published runs of serving share: one for each model, format, cluster and engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.lab.serving.cases import PlannedServing
from perfmodel.parallel.serving.prediction import ServingPrediction


@dataclass(slots=True, kw_only=True)
class Estimators:
    calibration: str | Path | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    def predict(self, planned: PlannedServing) -> ServingPrediction:
        raise InputError("serving: is not predicted yet; only training steps are")
