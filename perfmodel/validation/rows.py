"""Validated runs as flat rows, for `validate --out` and data frames: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perfmodel.parallel.interval import METRICS
from perfmodel.validation.fields import UNKNOWN, known_label
from perfmodel.validation.serving.rows import ServingRow

if TYPE_CHECKING:
    from perfmodel.validation.judgement import ValidationRow

_ROW_COLUMNS = (
    "id", "predicted_step_time", "measured_step_time", "predicted_memory", "measured_memory", "predicted_fits", "reason", "step_time_low",
    "step_time_high",
)  # fmt: skip
_LABEL_COLUMNS = (
    "source", "chip", "framework", "model", "parameters", "num_chips", "form", "tier", "precision", "experts", "dispatcher",
)  # fmt: skip
COLUMNS = (*_ROW_COLUMNS, *_LABEL_COLUMNS)
SERVING_COLUMNS = (
    "id", *(f"{origin}_{metric}" for metric in METRICS for origin in ("predicted", "measured")), "predicted_fits", "reason",
    *(f"{metric}_{end}" for metric in METRICS for end in ("low", "high")), "predicted_max_sequences", "kind", "source", "engine", "chip",
    "framework", "model", "tier", "precision", "concurrency", "experts", "suspect",
)  # fmt: skip
"""Columns of serving runs: seconds, and output tokens a second of all chips."""

_SERVING_LABELS = ("source", "engine", "chip", "framework", "model", "precision", "experts")


def case_columns(rows: Iterable[ValidationRow | ServingRow]) -> list[str]:
    """Return the columns of the kinds of runs that are present; those of training runs if there are none."""
    served = {isinstance(row, ServingRow) for row in rows} or {False}
    return list(dict.fromkeys((*(COLUMNS if False in served else ()), *(SERVING_COLUMNS if True in served else ()))))


def case_rows(rows: Iterable[ValidationRow | ServingRow]) -> list[dict[str, Any]]:
    """Return column -> value of each run; nan and None for missing values."""
    return [_serving_row_values(row) if isinstance(row, ServingRow) else _training_row_values(row) for row in rows]


def _training_row_values(row: ValidationRow) -> dict[str, Any]:
    labels = {name: known_label(getattr(row.labels, name)) for name in _LABEL_COLUMNS}
    return {**{name: getattr(row, name) for name in _ROW_COLUMNS}, **labels}


def _serving_row_values(row: ServingRow) -> dict[str, Any]:
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
    values |= {name: known_label(getattr(row.labels, name)) for name in _SERVING_LABELS}
    concurrency = row.labels.concurrency
    return values | {"concurrency": math.nan if concurrency == UNKNOWN else float(concurrency)}
