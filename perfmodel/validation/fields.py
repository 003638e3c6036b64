"""Values of a published run's fields, which `schemas.py` checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perfmodel.foundation.errors import InputError, one_line

UNKNOWN = "?"
"""Label of a run that does not state the field."""


def optional_count(inputs: Mapping[str, Any], field: str) -> int | None:
    """Return a checked integer, or None where the run does not state it. 8.0 is 8."""
    value = inputs.get(field)
    return None if value is None else int(value)


def stated_count(inputs: Mapping[str, Any], field: str, default: int | None = None, *, within: str = "", name: str = "it") -> int:
    """Return a checked integer, or the default; without one the run must state it. Raises InputError.

    within   prefix of the field, such as `model.`; name: of what cannot be predicted without it
    """
    value = inputs.get(field, default)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{within}{field}: the run does not state it; {name} cannot be predicted without it")
    return int(value)


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
