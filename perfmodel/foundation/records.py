"""Frozen records of parameters (a calibration) as plain data with units, and back: the dataclass itself is the description of the file.

A field's name carries its quantity (STYLE: `*_time`, `*_bytes`, `bandwidth`, ...), so it decides the unit in the file too; any other number
is dimensionless and written bare. A round trip is exact. What a user wrote is checked before (`foundation/schemas.py`).
"""

import dataclasses
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar, cast

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.units import exact_quantity, parse_quantity, quantity_of

Record = TypeVar("Record")


def record_from_data(cls: type[Record], data: Mapping[str, Any], *, where: str) -> Record:
    """A frozen dataclass from plain data of its form. Raises InputError for values that the record itself refuses."""
    hints = _hints(cast(Any, cls))
    values = {name: _value(hints[name], item, name=name, where=f"{where}.{name}") for name, item in data.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error.full}") from error


def record_to_data(value: Any, *, name: str = "") -> Any:
    """Plain data with units; fields that hold their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: record_to_data(getattr(value, field.name), name=field.name)
            for field in dataclasses.fields(value)
            if not _is_default(field, getattr(value, field.name))
        }
    if isinstance(value, Mapping):
        return {str(key): record_to_data(item, name=item_name(name, str(key))) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [record_to_data(item, name=name) for item in value]
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, bool | str | int):
        return value
    number = float(value)  # numpy scalars too
    kind = quantity_of(name)
    return exact_quantity(number, kind) if kind else number


def item_name(name: str, key: str) -> str:
    """What an entry of a mapping is measured as: as the mapping's name says (`host_times`), but `peaks` by its keys."""
    return key if name == "peaks" else name


def _is_default(field: "dataclasses.Field[Any]", value: object) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(hint: Any, value: Any, *, name: str, where: str) -> Any:
    """`value` as the annotation `hint` wants it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {
            _value(arguments[0], key, name="", where=where): _value(
                arguments[1], item, name=item_name(name, str(key)), where=f"{where}.{key}"
            )
            for key, item in value.items()
        }
    if origin is tuple:
        hints = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(each, item, name=name, where=where) for each, item in zip(hints, value, strict=True))
    if dataclasses.is_dataclass(hint):
        return record_from_data(cast(type, hint), value, where=where)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is float:
        kind = quantity_of(name)
        return parse_quantity(value, kind, field=where) if kind else float(value)
    return value
