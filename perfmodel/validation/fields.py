"""Validated values of a published run's fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.workload.config import printable

MAX_COUNT = 2**31 - 1

UNKNOWN = "?"
"""Label of a run that does not state the field."""


def optional_count(inputs: Mapping[str, Any], field: str) -> int | None:
    """Return an integer from 1, or None where the run does not state it. 8.0 is 8. Raises InputError."""
    value = inputs.get(field)
    if value is None:
        return None
    number = _integer(value)
    if not 1 <= number <= MAX_COUNT:
        raise bad_field(field, one_line(value), f"must be a whole number from 1 to {MAX_COUNT}", "correct it in the case")
    return number


def stated_count(inputs: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return an integer from 1, or the default; without one the run must state it. Raises InputError."""
    value = optional_count(inputs, field)
    if value is None:
        if default is None:
            raise not_stated(field)
        return default
    return value


def stated_size(model: Mapping[str, Any], field: str, name: str, *, inside: str = "") -> int:
    """Return an integer from 1 in the `model` object of a run, called `name`. 8.0 is 8. Raises InputError.

    inside   prefix of the nested object that has the field, such as `moe.`; "" for the model itself
    """
    value = model.get(field)
    if value is None:
        raise InputError(f"model.{inside}{field}: the run does not state it; {name} cannot be predicted without it")
    number = _integer(value)
    if number < 1:
        raise bad_field(f"model.{inside}{field}", printable(value), "must be a whole number from 1", "correct it in the case")
    return number


def _integer(value: object) -> int:
    """Return an integer, also from 8.0; 0, which is no valid count, for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def not_stated(field: str) -> InputError:
    return InputError(f"{field}: the run does not state it; it cannot be predicted without it")


def positive(value: object) -> float:
    """Return `value` as a positive number, else nan."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) and number > 0 else math.nan


def label(value: object) -> str:
    return one_line(value, 60) or UNKNOWN if isinstance(value, str) else UNKNOWN


def known_label(value: str | float) -> str | float | None:
    """Return a label, or None where it is unknown."""
    return None if value == UNKNOWN else value
