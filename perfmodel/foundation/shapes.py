"""What a file of ours may hold: every mapping forbids fields that it does not know, and all that is wrong is said at once.

A shape is a function of a value and of the field that it stands in, which yields what is wrong with it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed
from perfmodel.foundation.units import parse_quantity

_MOST_CHIPS = 2**31


#: Remedies of required fields whose name alone does not say what they take.
_WHAT_TO_WRITE = {
    "source": "say where the numbers are from, such as source: 'data sheet, read 2026-01-15'",
    "provenance": "write read, recalled, mixed or measured",
}


class Fault(NamedTuple):
    """One thing that is wrong with a file: field, value, rule, remedy."""

    sentence: str
    is_misspelt: bool = False


Shape = Callable[[object, str], Iterator[Fault]]


def check_shape(data: object, shape: Shape, *, where: str) -> Any:
    """`data` if it has the shape; else an `InputError` that names file, field, value, rule and the nearest known field."""
    faults = sorted(shape(data, ""), key=lambda fault: not fault.is_misspelt)  # a misspelt field before the one that it should be
    if faults:
        raise InputError(f"{where}: {listed(list(dict.fromkeys(fault.sentence for fault in faults)))}")
    return data


def _bad(field: str, value: object, rule: str, remedy: str) -> Fault:
    return Fault(str(bad_field(field or "file", shown(value), rule, remedy)))


def _below(field: str, name: object) -> str:
    return f"{field}.{one_line(name, 60)}" if field else one_line(name, 60)


def text(*, may_be_empty: bool = False) -> Shape:
    def check(value: object, field: str) -> Iterator[Fault]:
        if not isinstance(value, str):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            yield _bad(field, value, "must be a text", f"write '{shown(value)}' in quotes" if is_number else "write one text")
        elif not (value or may_be_empty):
            yield _bad(field, value, "must not be empty", "write a text")

    return check


def count(most: int = _MOST_CHIPS) -> Shape:
    """A whole number of at least 1."""

    def check(value: object, field: str) -> Iterator[Fault]:
        if isinstance(value, bool) or not isinstance(value, int):
            yield _bad(field, value, "must be a whole number", "write a number without quotes or unit")
        elif not 1 <= value <= most:
            yield _bad(field, value, "must be at least 1" if value < 1 else f"must be at most {most}", "correct it")

    return check


def number(least: float, most: float) -> Shape:
    def check(value: object, field: str) -> Iterator[Fault]:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            yield _bad(field, value, "must be a number", "write a number without quotes or unit")
        elif math.isnan(value) or not least <= value <= most:
            yield _bad(field, value, f"must be from {least:g} to {most:g}", "correct it")

    return check


def yes_or_no() -> Shape:
    def check(value: object, field: str) -> Iterator[Fault]:
        if not isinstance(value, bool):
            yield _bad(field, value, "must be true or false", "write true or false")

    return check


def one_of(choices: Sequence[str]) -> Shape:
    def check(value: object, field: str) -> Iterator[Fault]:
        if not isinstance(value, str) or value not in choices:
            yield _bad(field, value, f"must be one of {', '.join(choices)}", "use one of these")

    return check


def quantity(kind: str) -> Shape:
    """A text that holds a quantity with its unit; it stays the text that it is."""

    def check(value: object, field: str) -> Iterator[Fault]:
        try:
            parse_quantity(value, kind, field=field)
        except InputError as error:
            yield Fault(str(error))

    return check


def list_of(item: Shape, *, least: int = 0, most: int) -> Shape:
    def check(value: object, field: str) -> Iterator[Fault]:
        if not isinstance(value, list):
            yield _bad(field, value, "must be a list", "write a list: [a, b], or a line '- a' for each")
            return
        if not least <= len(value) <= most:
            yield _bad(field, value, f"must have from {least} to {most} entries, not {len(value)}", f"write {least} to {most} entries")
        for place, each in enumerate(value):
            yield from item(each, _below(field, place))

    return check


def map_of(item: Shape, *, may_be_empty: bool = False) -> Shape:
    """From names, whatever they are."""

    def check(value: object, field: str) -> Iterator[Fault]:
        if not isinstance(value, Mapping):
            yield _no_mapping(field, value)
            return
        if not (value or may_be_empty):
            yield _bad(field, value, "must not be empty", "write a line 'name: value'")
        for name, each in value.items():
            yield from _NAME(name, _below(field, name))
            yield from item(each, _below(field, name))

    return check


_NAME = text()


def record(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """A mapping with exactly these fields."""
    known = {**required, **(optional or {})}

    def check(value: object, field: str) -> Iterator[Fault]:
        if not isinstance(value, Mapping):
            yield _no_mapping(field, value)
            return
        for name, each in value.items():
            if name in known:
                yield from known[name](each, _below(field, name))
            else:
                nearest = suggest(one_line(name, 60), known) or "; take it out"
                yield Fault(f"{_below(field, name)}: unknown field{nearest}", is_misspelt=True)
        for name in required:
            if name not in value:
                yield Fault(f"{_below(field, name)}: required field is missing; {_WHAT_TO_WRITE.get(name, 'add it')}")

    return check


def _no_mapping(field: str, value: object) -> Fault:
    return _bad(field, value, "must be a mapping", "write a line 'name: value' for each entry")
