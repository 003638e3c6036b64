"""Prediction and measurement of one published serving run, the labels that errors are grouped by, and its line in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perfmodel.parallel.interval import METRICS
from perfmodel.validation.fields import UNKNOWN, known_label, label
from perfmodel.validation.serving.cases import PlannedServing
from perfmodel.validation.serving.measured import KUNDU, Served

SERVING_BY = ("source", "engine", "chip", "model", "precision", "concurrency", "framework", "kind", "tier", "experts")
"""Fields of `--by` for serving runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """Prediction and measurement of one serving run.

    predicted     metric -> seconds (tokens_per_second: output tokens of all chips); empty without a prediction, with the reason
    intervals     metric -> its 80 % interval
    labels        a label for each of `SERVING_BY`
    max_sequences   predicted, of a replica
    """

    id: str
    group: str
    tier: str
    kind: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    served: Served = field(default_factory=Served)
    predicted: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    predicted_fits: bool | None = None
    max_sequences: float = math.nan
    planned: PlannedServing | None = None
    reason: str = ""

    @property
    def is_predicted(self) -> bool:
        return bool(self.predicted)

    @property
    def is_second_hand(self) -> bool:
        return self.group == KUNDU

    @property
    def is_scored(self) -> bool:
        """The run is primary, not suspect, and predicted."""
        return self.is_predicted and self.tier == "primary" and not self.served.suspect

    def measured(self, metric: str) -> float:
        return float(getattr(self.served, metric))

    def error(self, metric: str) -> float:
        """Return predicted / measured - 1; nan where one is missing."""
        return self.predicted.get(metric, math.nan) / self.measured(metric) - 1.0

    def counts(self, metric: str) -> bool:
        """Return whether the error of a metric counts: it does not include queueing or start-up that the source mentions."""
        return not math.isnan(self.error(metric)) and not (metric == "ttft" and self.served.ttft_note)


def labels_of_serving(inputs: Mapping[str, Any], *, group: str, tier: str, planned: PlannedServing | None) -> dict[str, str]:
    model = inputs.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    moe = model.get("moe") if isinstance(model, Mapping) else None
    batch = inputs.get("batch")
    return {
        "source": group or UNKNOWN,
        "engine": UNKNOWN if planned is None else planned.engine,
        "chip": UNKNOWN if planned is None else planned.hardware.chip,
        "model": label(name),
        "precision": label(inputs.get("precision")),
        "concurrency": str(batch) if isinstance(batch, int) and not isinstance(batch, bool) else UNKNOWN,
        "framework": label(inputs.get("framework")),
        "kind": label(inputs.get("kind")),
        "tier": tier or UNKNOWN,
        "experts": "experts" if isinstance(moe, Mapping) and moe.get("experts") else "dense",
    }


def label_order(label: str) -> tuple[float, str]:
    """Return a sort key: numbers by size, before names."""
    return (float(label), "") if label.isdigit() else (math.inf, label)


SERVING_COLUMNS = (
    "id",
    "predicted_ttft",
    "measured_ttft",
    "predicted_tpot",
    "measured_tpot",
    "predicted_request_latency",
    "measured_request_latency",
    "predicted_tokens_per_second",
    "measured_tokens_per_second",
    "predicted_fits",
    "reason",
    *(f"{metric}_{end}" for metric in METRICS for end in ("low", "high")),
    "predicted_max_sequences",
    "kind",
    "source",
    "engine",
    "chip",
    "framework",
    "model",
    "tier",
    "precision",
    "concurrency",
    "experts",
    "suspect",
)
"""Columns of serving runs: seconds, and output tokens a second of all chips."""

_LABELS = ("source", "engine", "chip", "framework", "model", "precision", "experts")


def serving_row_values(row: ServingRow) -> dict[str, Any]:
    """Return column -> value; nan and None for missing values."""
    values: dict[str, Any] = {"id": row.id, "reason": row.reason, "kind": row.kind, "tier": row.tier, "suspect": row.served.suspect}
    for metric in METRICS:
        low, high = row.intervals.get(metric, (math.nan, math.nan))
        values |= {
            f"predicted_{metric}": row.predicted.get(metric, math.nan),
            f"measured_{metric}": row.measured(metric),
            f"{metric}_low": low,
            f"{metric}_high": high,
        }
    values |= {"predicted_fits": row.predicted_fits, "predicted_max_sequences": row.max_sequences}
    values |= {name: known_label(row.labels.get(name, UNKNOWN)) for name in _LABELS}
    concurrency = row.labels.get("concurrency", UNKNOWN)
    return values | {"concurrency": math.nan if concurrency == UNKNOWN else float(concurrency)}
