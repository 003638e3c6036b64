"""Frozen records of parameters (a calibration) as plain data with units, and back: the dataclass itself is the description of the file.

A field's name carries its quantity (STYLE: `*_time`, `*_bytes`, `bandwidth`, ...), so it decides the unit in the file too; any other number
is dimensionless and written bare. A round trip is exact.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed
from perfmodel.foundation.units import exact_quantity, parse_quantity, quantity_of

_MOST = 1e15
_PLAIN = {str: "text", bool: "true or false", int: "a whole number"}
Record = TypeVar("Record")


class _Faults(InputError):
    """Everything that is wrong with a record; `sentences` one by one."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__(listed(sentences))
        self.sentences = sentences


def record_from_data(cls: type[Record], data: object, *, where: str) -> Record:
    """A frozen dataclass from what a file holds; unknown, missing and ill-typed fields are one `InputError` that names them all."""
    if not isinstance(data, Mapping):
        raise bad_field(where, _kind(data), "must be a mapping of fields", "write a line 'name: value' for each")
    hints, fields = _hints(cls), {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    faults = [f"{where}.{one_line(name, 60)}: unknown field{suggest(name, fields)}" for name in data if name not in fields]
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"{where}.{name}: required field is missing; add it")
    known = [(str(name), item) for name, item in data.items() if name in fields]
    values = dict(_each(known, lambda name, item: _value(hints[name], item, where=f"{where}.{name}", name=name), faults))
    if faults:
        raise _Faults(faults)
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error.full}") from error


def _each(
    items: Iterable[tuple[Any, object]], read: Callable[[Any, object], Any], faults: list[str] | None = None
) -> list[tuple[Any, Any]]:
    """Each key with its value as `read` gives it. What is wrong goes to `faults`; without such a list it is raised, all of it at once."""
    found, wrong = [], [] if faults is None else faults
    for key, item in items:
        try:
            found.append((key, read(key, item)))
        except _Faults as several:
            wrong.extend(several.sentences)
        except InputError as error:
            wrong.append(str(error))
    if wrong and faults is None:
        raise _Faults(wrong)
    return found


def record_to_data(value: Any, *, name: str = "") -> Any:
    """Plain data with units; fields that hold their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: record_to_data(getattr(value, field.name), name=field.name)
            for field in dataclasses.fields(value)
            if not _is_default(field, getattr(value, field.name))
        }
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


def _value(hint: Any, value: object, *, where: str, name: str) -> Any:
    """`value` as the annotation `hint` wants it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments, value, where=where, name=name)
    if origin is tuple:
        return _tuple(arguments, value, where=where, name=name)
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"{where}: a record field has one type, not {hint}")
    if dataclasses.is_dataclass(hint):
        return record_from_data(typing.cast(type, hint), value, where=where)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _member(hint, value, where=where)
    if hint is float:
        return _number(value, where=where, name=name)
    if hint is bool or hint is int or hint is str:
        if type(value) is not hint:
            raise bad_field(where, _kind(value), f"must be {_PLAIN[hint]}", "correct it")
        return value
    raise TypeError(f"{where}: no rule to read {hint}")


def _mapping(arguments: tuple[Any, ...], value: object, *, where: str, name: str) -> dict[Any, Any]:
    key_hint, item_hint = arguments
    if not isinstance(value, Mapping):
        raise bad_field(where, _kind(value), "must be a mapping", "write a line 'name: value' for each")

    def read(key: Any, item: object) -> tuple[Any, Any]:
        own = _value(key_hint, key, where=where, name="")
        return own, _value(item_hint, item, where=f"{where}.{one_line(key, 60)}", name=_item_name(name, str(key)))

    return dict(pair for _, pair in _each(value.items(), read))


def _tuple(arguments: tuple[Any, ...], value: object, *, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise bad_field(where, _kind(value), "must be a list", "write [a, b]")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        hints = (arguments[0],) * len(value)
    else:
        hints = arguments
    if len(hints) != len(value):
        raise bad_field(where, _kind(value), f"must hold {len(hints)} values", f"write {len(hints)}")
    return tuple(
        item for _, item in _each(enumerate(value), lambda index, item: _value(hints[index], item, where=f"{where}.{index}", name=name))
    )


def _member(hint: type[StrEnum], value: object, *, where: str) -> StrEnum:
    try:
        return hint(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise bad_field(where, _kind(value), f"unknown{suggest(value, hint) if isinstance(value, str) else ''}") from None


def _number(value: object, *, where: str, name: str) -> float:
    kind = quantity_of(name)
    if kind:
        return parse_quantity(value, kind, field=where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field(where, _kind(value), "must be a number without a unit", "correct it")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MOST:
        raise bad_field(
            where, value if isinstance(value, float) else "a huge integer", f"must be a finite number, of {_MOST:g} at most", "correct it"
        )
    return number


def _kind(value: object) -> str:
    """A value for a message: short text as it is, anything deep by its type."""
    return shown(value) if isinstance(value, str | int | float | bool) else type(value).__name__
