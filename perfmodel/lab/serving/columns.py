"""The table of runs of serving that `perfmodel validate --out` writes."""

from __future__ import annotations

import math

from perfmodel.lab.fields import UNKNOWN
from perfmodel.lab.serving.rows import ServingRow
from perfmodel.parallel.serving.intervals import METRICS

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
"""Of runs of serving: seconds, output tokens a second of all chips."""

_LABELS = ("source", "engine", "chip", "framework", "model", "precision", "concurrency", "experts")


def serving_cells(row: ServingRow) -> dict[str, str]:
    """Column -> text; an empty cell where there is nothing."""
    cells = {"id": row.id, "reason": row.reason, "kind": row.kind, "tier": row.tier, "suspect": row.served.suspect}
    for metric in METRICS:
        low, high = row.intervals.get(metric, (math.nan, math.nan))
        cells |= {
            f"predicted_{metric}": _cell(row.predicted.get(metric, math.nan)),
            f"measured_{metric}": _cell(row.measured(metric)),
            f"{metric}_low": _cell(low),
            f"{metric}_high": _cell(high),
        }
    cells["predicted_fits"] = "" if row.predicted_fits is None else str(row.predicted_fits).lower()
    cells["predicted_max_sequences"] = _cell(row.max_sequences)
    return cells | {name: _word(row.labels.get(name, "")) for name in _LABELS}


def _cell(number: float) -> str:
    return "" if math.isnan(number) else f"{number:.9g}"


def _word(label: str) -> str:
    return "" if label == UNKNOWN else label
