"""Table of serving runs in `perfmodel validate --out`."""

from __future__ import annotations

import math
from typing import Any

from perfmodel.frameworks.serving_intervals import METRICS
from perfmodel.validation.fields import UNKNOWN, known_label
from perfmodel.validation.serving.rows import ServingRow

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
