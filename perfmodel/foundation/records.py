"""Conversion between frozen records (a calibration) and plain data with units; the dataclass defines the form of the file.

A field's name carries its quantity (STYLE: `*_time`, `*_bytes`, `bandwidth`, ...), so it determines the unit in the file too. Any other
number is dimensionless and written without unit. A round trip is exact.
"""

import dataclasses
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.units import exact_quantity, parse_quantity, quantity_of

Record = TypeVar("Record")

INLINE: Mapping[str, bool] = MappingProxyType({"inline": True})
"""Metadata of a field with a group of fields: data and JSON have the group's fields among those of the record."""


def record_from_data(cls: type[Record], data: object, *, where: str) -> Record:
    """Return a frozen dataclass from data that has its schema: shipped data, or data checked by `schema.checked_record`."""
    return typing.cast(Record, _value(cls, data, where=where, name=""))


def record_to_data(value: Any, *, name: str = "") -> Any:
    """Return plain data with units; fields with their default value are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.metadata == INLINE:
                data |= record_to_data(item)
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if default is dataclasses.MISSING or item != default:
                data[field.name] = record_to_data(item, name=field.name)
        return data
    if isinstance(value, Mapping):
        return {str(key): record_to_data(item, name=_item_name(name, str(key))) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [record_to_data(item, name=name) for item in value]
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, bool | str | int):
        return value
    number = float(value)  # numpy scalars too
    kind = quantity_of(name)
    return exact_quantity(number, kind) if kind else number


def _item_name(name: str, key: str) -> str:
    """Return the name that determines the unit of a mapping's entry: the mapping's (`host_times`), but the key for `peaks`."""
    return key if name == "peaks" else name


_hints = lru_cache(maxsize=64)(typing.get_type_hints)


def _value(hint: Any, value: Any, *, where: str, name: str) -> Any:
    """Convert `value`, which has the schema of its file, to the type of the annotation `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key_hint, item_hint = arguments
        return {
            _value(key_hint, key, where=where, name=""): _value(item_hint, item, where=f"{where}.{key}", name=_item_name(name, str(key)))
            for key, item in value.items()
        }
    if origin is tuple:
        return tuple(_value(arguments[0], item, where=f"{where}.{index}", name=name) for index, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(type, hint))
        groups = {}
        for field in dataclasses.fields(hint):
            if field.metadata == INLINE:
                inlined = {name: value[name] for name in _hints(hints[field.name]) if name in value}
                groups[field.name] = _value(hints[field.name], inlined, where=where, name="")
                value = {name: item for name, item in value.items() if name not in inlined}
        values = groups | {name: _value(hints[name], item, where=f"{where}.{name}", name=name) for name, item in value.items()}
        try:
            return typing.cast(type, hint)(**values)
        except InputError as error:
            raise InputError(f"{where}: {error.full}") from error
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is float:
        kind = quantity_of(name)
        if not kind and isinstance(value, str):  # an entry of a mapping whose keys determine the units
            raise bad_field(where, value, "is no figure that is known", "correct its name")
        return parse_quantity(value, kind, field=where) if kind else float(value)
    return value
