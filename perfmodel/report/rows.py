"""Flat rows as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.foundation.frames import columns_of


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return the rows as CSV under one header; missing values are empty cells. columns: those of the rows by default."""
    known = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or columns_of(known), lineterminator="\n")
    writer.writeheader()
    for row in known:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: object) -> Any:
    """Return the CSV cell of a value: JSON spelling of booleans, an empty cell for nan (unknown)."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if isinstance(value, float) and math.isnan(value) else value
