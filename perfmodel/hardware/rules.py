"""Read-only records of a calibration, and checks of their numbers, which raise InputError."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import bad_field


class ReadOnly:
    """Base of records whose mappings are read-only; they are pickled as plain dicts, as mapping proxies cannot be pickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **{name: _thawed(getattr(self, name)) for name in self.__dataclass_fields__}), ()  # type: ignore[attr-defined]


def freeze(record: Any) -> None:
    for name in record.__dataclass_fields__:
        object.__setattr__(record, name, _frozen(getattr(record, name)))


def _frozen(value: object) -> Any:
    return MappingProxyType({key: _frozen(item) for key, item in value.items()}) if isinstance(value, Mapping) else value


def _thawed(value: object) -> Any:
    return {key: _thawed(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise bad_field(name, value, rule, "correct the calibration")


def least(value: object) -> Any:
    """Return the number, or the minimum of an array."""
    return value.min() if hasattr(value, "min") else value


def require_share(name: str, value: float, *, most: float = 1e9) -> None:
    """Check the achieved share of a rate. It may exceed 1 for caches and work-saving algorithms, and slightly for a burst peak."""
    require(1e-6 <= value <= most, name, value, f"must be positive, from 1e-6 to {most:g}")


def require_positive(model: object, *names: str) -> None:
    for name in names:
        require(getattr(model, name) > 0, name, getattr(model, name), "must be positive")


def require_not_negative(model: object, *names: str) -> None:
    for name in names:
        require(getattr(model, name) >= 0, name, getattr(model, name), "must not be negative")
