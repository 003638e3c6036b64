"""Results as plain JSON values."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.records import INLINE

SCHEMA_VERSION = 1
"""Version of the objects that `--json` prints."""


def to_plain(value: object) -> Any:
    """Return `value` for JSON: records and mappings become objects, sequences arrays, numpy numbers plain ones; nan and inf become null."""
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, enum.StrEnum) else value
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            entry = to_plain(getattr(value, field.name))
            plain |= entry if field.metadata == INLINE else {field.name: entry}
        return plain
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(entry) for key, entry in value.items()}
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if isinstance(value, Iterable):
        return [to_plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def picked(record: object, names: str) -> dict[str, Any]:
    """Return the named attributes of a record. names: separated by spaces."""
    return {name: getattr(record, name) for name in names.split()}


def dotted(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a nested mapping; lists are values."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
