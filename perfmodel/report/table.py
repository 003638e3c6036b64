"""A table as plain words: what floor 6 prints, and what a notebook can show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """right: headers of the columns that hold numbers; fold: headers of those whose text may break on a narrow terminal."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    fold: tuple[str, ...] = ()


def bar(share: float, width: int = 20) -> str:
    """`share` of `width` characters, at least one where there is anything."""
    filled = round(min(share, 1.0) * width)
    return "#" * (filled or (1 if share > 0 else 0))


def percent(share: float) -> str:
    """One digit after the point: 43.1 %."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %" if share < 0.9995 else f"{100 * share:.0f} %"


def words(name: str) -> str:
    """A part or class of memory as people write it."""
    return name.replace("_", " ")
