"""Prediction intervals: of a step time (`uncertainty/` computes it), and of the metrics of a service.

Factors of a service are quantiles of measured / predicted over published runs of models that were left out of the fit. They depend on
whether the engine was fitted, whether kernels of the chip were measured, and whether the model has experts
(`strategies/serving_residuals.yaml`, written by `python -m lab.serving.residuals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from perfmodel.foundation.resources import resource_dir

COVERAGE = 0.8
"""Nominal coverage: share of measured values inside the interval."""

TAIL = (1.0 - COVERAGE) / 2.0
"""Share of measured times on either side of the interval."""

NORMAL = 1.2816
"""That quantile of the standard normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """Prediction interval of a step time, as factors of the prediction.

    rests_on   basis of the interval, in words
    num_runs   measured runs of that basis
    trust      grade of the distance between the prediction and the measured runs (`uncertainty/grade.py`)
    """

    low: float
    high: float
    rests_on: str
    num_runs: int
    trust: str = ""


METRICS = ("ttft", "tpot", "request_latency", "tokens_per_second")
"""Metrics of a service that have an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBasis:
    """Basis of a serving prediction: whether the engine is fitted and the chip measured, and the kind of model."""

    engine_known: bool
    chip_measured: bool
    has_experts: bool

    @property
    def key(self) -> str:
        """Key of the factors in the file."""
        engine, chip = "known" if self.engine_known else "unknown", "measured" if self.chip_measured else "prior"
        return f"{engine} engine, {chip} chip, {'experts' if self.has_experts else 'dense'}"


@lru_cache(maxsize=16)
def interval_factors(basis: ServingBasis) -> Mapping[str, tuple[float, float]]:
    """Return metric -> factors of its prediction; empty if the file has none."""
    from perfmodel.foundation.files import read_yaml

    path = resource_dir("strategies") / "serving_residuals.yaml"
    factors: Any = read_yaml(path).get("factors", {}) if path.is_file() else {}
    return {metric: (float(bounds["low"]), float(bounds["high"])) for metric, bounds in factors.get(basis.key, {}).items()}


def intervals_of(basis: ServingBasis, predicted: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return metric -> 80 % prediction interval."""
    factors = interval_factors(basis)
    return {metric: (value * factors[metric][0], value * factors[metric][1]) for metric, value in predicted.items() if metric in factors}
