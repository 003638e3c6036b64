"""Validated runs as flat rows, for `validate --out` and data frames: seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perfmodel.validation.fields import known_label
from perfmodel.validation.serving.rows import SERVING_COLUMNS, ServingRow, serving_row_values

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


def case_columns(rows: Iterable[ValidationRow | ServingRow]) -> list[str]:
    """Return the columns of the kinds of runs that are present; those of training runs if there are none."""
    served = {isinstance(row, ServingRow) for row in rows} or {False}
    return list(dict.fromkeys((*(COLUMNS if False in served else ()), *(SERVING_COLUMNS if True in served else ()))))


def case_rows(rows: Iterable[ValidationRow | ServingRow]) -> list[dict[str, Any]]:
    """Return column -> value of each run; nan and None for missing values."""
    return [serving_row_values(row) if isinstance(row, ServingRow) else _training_row_values(row) for row in rows]


def _training_row_values(row: ValidationRow) -> dict[str, Any]:
    labels = {name: known_label(getattr(row.labels, name)) for name in _LABEL_COLUMNS}
    return {**{name: getattr(row, name) for name in _ROW_COLUMNS}, **labels}
