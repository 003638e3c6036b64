"""Columns: numbers of one plan or arrays of many plans, and records of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = float | NDArray[np.floating] | NDArray[np.integer]
"""A number, or an array with one entry per plan that broadcasts with other columns."""

Record = TypeVar("Record")


def as_columns(records: Sequence[Record]) -> Record:
    """Return one record with an array, [record], in place of each float in which the records differ.

    Its checks are not repeated, because each record has passed them. Raises ValueError if records differ in anything but floats.
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
