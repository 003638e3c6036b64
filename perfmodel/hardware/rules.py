"""Checks of the numbers of a calibration. All raise InputError."""

from typing import Any

from perfmodel.foundation.errors import bad_field


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
