"""Figures of one plan or of many, and records whose numbers are such columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = float | NDArray[np.floating] | NDArray[np.integer]
"""A number, or an array with an entry for each plan, which broadcasts over the rest."""

Record = TypeVar("Record")


def as_columns(records: Sequence[Record]) -> Record:
    """Return one record with an array, [record], in place of each float in which the records differ.

    Its checks are not repeated: each of the records has passed them. Raises ValueError where they differ in anything but floats.
    """
    return cast(Record, _as_columns(records))


def _as_columns(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        raise ValueError("records of several types have no columns")
    if isinstance(first, float):
        column = np.array(values)
        return first if (column == first).all() else column
    if is_dataclass(first):
        record = object.__new__(type(first))
        for field in fields(first):
            object.__setattr__(record, field.name, _as_columns([getattr(value, field.name) for value in values]))
        return record
    if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
        return {name: _as_columns([value[name] for value in values]) for name in first}
    if isinstance(first, tuple) and all(len(value) == len(first) for value in values):
        return tuple(_as_columns(entries) for entries in zip(*values, strict=True))
    if any(value != first for value in values):
        raise ValueError("records that differ in more than floats have no columns")
    return first


def table_entries(table: NDArray[np.float64], code: Any, *, has_columns: bool) -> NDArray[np.float64]:
    """Return table[..., code], [..., *code.shape]; with `has_columns` of a table [..., code, column], whose columns are the last dim of
    `code`."""
    if not has_columns:
        return table[..., code]
    return table[..., code, :] if np.ndim(code) == 0 else table[..., code[..., 0], :]
