"""Rows of values as a pandas data frame. pandas is slow to load, so it is imported when the first frame is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def data_frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> DataFrame:
    """Return a data frame with one line for each row; values that a row lacks are missing (NaN, NA or None).

    columns   names in order; None: those of all rows, in the order of their first use

    Numbers with missing values are float64. Booleans with missing values have the nullable dtype `boolean`.
    """
    import pandas

    entries = list(rows)
    names = columns_of(entries) if columns is None else list(columns)
    frame = pandas.DataFrame([dict(row) for row in entries], columns=pandas.Index(names))
    partial = [name for name in names if frame[name].dtype == object and pandas.api.types.infer_dtype(frame[name]) == "boolean"]
    return frame.astype(dict.fromkeys(partial, "boolean"))


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all rows in the order of their first use."""
    return list(dict.fromkeys(name for row in rows for name in row))


def parquet_of(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return a Parquet file of the rows. A column of texts and numbers becomes one of texts, since Parquet columns have one type."""
    import io

    import pandas

    frame = data_frame(rows)
    mixed = [name for name in frame if frame[name].dtype == object and pandas.api.types.infer_dtype(frame[name]).startswith("mixed")]
    for name in mixed:
        frame[name] = [None if pandas.isna(value) else str(value) for value in frame[name]]
    stream = io.BytesIO()
    frame.to_parquet(stream, index=False)
    return stream.getvalue()
