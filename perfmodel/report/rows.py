"""Flat rows as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.foundation.frames import columns_of


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return the rows as CSV under one header; booleans as in JSON, empty cells for missing values and nan (unknown).

    columns   those of the rows by default
    """
    known = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or columns_of(known), lineterminator="\n")
    writer.writeheader()
    for row in known:
        cells = dict(row)
        for name, value in row.items():
            if isinstance(value, bool):
                cells[name] = str(value).lower()
            elif isinstance(value, float) and math.isnan(value):
                cells[name] = None
        writer.writerow(cells)
    return text.getvalue()
