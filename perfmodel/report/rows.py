"""Flat rows as CSV, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from perfmodel.foundation.frames import columns_of


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows under one header; what a row does not have is empty."""
    known = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(known), lineterminator="\n")
    writer.writeheader()
    for row in known:
        writer.writerow({name: str(value).lower() if isinstance(value, bool) else value for name, value in row.items()})
    return text.getvalue()
