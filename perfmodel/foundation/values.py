"""Readers of values on the command line and in Python: `8k`, `10%`, `15T`, one value or several.

Suffixes of lengths and batches are binary, as usual (`8k` tokens are 8192); those of training tokens are decimal (`15T`). The readers raise
InputError that names the field.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from perfmodel.foundation.errors import bad_field, plain_text, shown, suggest
from perfmodel.foundation.units import QuantityKind, parse_quantity

MAX_WHOLE = 2**31 - 1
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_WHOLE = re.compile(r"\s*(\d{1,3}(?:_\d{3})+|\d{1,12})(\.\d{1,9})?\s*([kKmMgG]?)i?\s*", re.ASCII)


def read_integer(value: object, field: str, *, least: int = 1, most: int = MAX_WHOLE, remedy: str = "write 64 or 8k (8192)") -> int:
    """Return an integer from `least` to `most`; text may have a binary suffix: `8k`, `1M`."""
    number = _number(value)
    if number is None or not least <= number <= most:
        bound = f"at least {least}" if number is None or number < least else f"at most {most}"
        raise bad_field(field, _quoted(value), f"must be a whole number of {bound}", remedy)
    return number


def _number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if not isinstance(value, str):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return None
    match = _WHOLE.fullmatch(value)
    if match is None:
        return None
    digits, part, step = match.groups()
    scaled = int(digits.replace("_", "")) * _BINARY[step.lower()]
    if part:
        numerator, denominator = int(part[1:]) * _BINARY[step.lower()], 10 ** (len(part) - 1)
        if numerator % denominator:
            return None
        scaled += numerator // denominator
    return scaled


def share(value: object, field: str) -> float:
    """Return a share from 0 to below 1: `10%` or 0.1."""
    fraction = parse_quantity(value, QuantityKind.FRACTION, field=field)
    if fraction >= 1.0:
        raise bad_field(field, _quoted(value), "must be less than the whole", "write 10% or 0.1")
    return fraction


def optional_share(value: object, field: str) -> float | None:
    """Return a share, or None if none is given."""
    return None if value is None or value == "" else share(value, field)


def seconds(value: object, field: str) -> float:
    """Return a time limit in seconds: 30, `30`, `30 s` or `500 ms`. [s]"""
    is_bare = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str):
        is_bare = re.fullmatch(r"\s*[0-9.]+\s*", value, re.ASCII) is not None
    time = parse_quantity(f"{value} s" if is_bare else value, QuantityKind.TIME, field=field)
    if time == 0.0:
        raise bad_field(field, _quoted(value), "must be more than nothing", "write 30 (seconds)")
    return time


def token_count(value: object, field: str = "tokens") -> float:
    """Return a number of training tokens: `15T`, `300b`, 3e11."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text[-1:] in ("t", "b", "m", "g"):
        text = text[:-1] + text[-1].upper()
    tokens = parse_quantity(text, QuantityKind.COUNT, field=field)
    if tokens < 1:
        raise bad_field(field, _quoted(value), "must be at least 1", "write 15T or 300B")
    return tokens


def yes_or_no(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise bad_field(field, _quoted(value), "must be true or false", "give True or False")
    return value


def parsed_bool(word: str, field: str) -> bool:
    """Return the truth value of a word: true, yes, on, 1; false, no, off, 0, none."""
    plain = word.strip().lower()
    if plain in ("true", "yes", "on", "1"):
        return True
    if plain in ("false", "no", "off", "0", "none"):
        return False
    raise bad_field(field, shown(word), "must be true or false", "write one of them")


def text_of(value: object, field: str, example: str) -> str:
    if not isinstance(value, str):
        raise bad_field(field, _quoted(value), "must be a text", f"write {example}")
    return value


_Member = TypeVar("_Member", bound=StrEnum)


def choice_of(kind: type[_Member], value: str, field: str) -> _Member:
    """Return the member of a closed choice. Raises InputError with a suggestion."""
    try:
        return kind(value)
    except ValueError:
        raise bad_field(field, value, f"not known{suggest(value, kind)}") from None


def check_name(value: object, field: str, kind: type, remedy: str) -> None:
    """Refuse a value that is no name, path or object of that kind."""
    if not isinstance(value, (str, Path, kind)):
        raise bad_field(field, shown(value), f"must be a name, a path or a {kind.__name__}", remedy)


def check_path(value: object, field: str) -> None:
    """Refuse a value that is no name or path."""
    if not isinstance(value, (str, Path)):
        raise bad_field(field, shown(value), "must be a name or a path", f"write {field}='name' or the path of its file")


def is_path(name: str | Path) -> bool:
    """Return whether a text is the path of a file and not a name."""
    text = name if isinstance(name, str) else plain_text(name)
    return "/" in text or "\\" in text or text.endswith((".yaml", ".yml", ".json"))


def check_progress(progress: object) -> None:
    """Refuse a progress callback that is neither a function of the completed share nor None."""
    if progress is not None and not callable(progress):
        raise bad_field("progress", shown(progress), "must be a function of the share that is done", "leave it out")


def several(value: object) -> list[Any]:
    """Return one value or several as a list: `64,128` and [64, 128] are two, None is none, everything else is one."""
    if value is None:
        return []
    if isinstance(value, str):
        return [*filter(None, map(str.strip, value.split(",")))]
    if isinstance(value, Iterable) and isinstance(value, (list, tuple, range, set, frozenset)):
        return [part for item in value for part in (several(item) if isinstance(item, str) else [item])]
    return [value]


def doubled(first: int, last: int) -> list[int]:
    """Return the numbers from the first to the last, each twice the previous one; the last is always included."""
    numbers = [first * 2**power for power in range((last // first).bit_length())]
    return numbers if numbers[-1] == last else [*numbers, last]


def several_numbers(value: object, field: str) -> list[Any]:
    """Return numbers as `several`: `8,192` is ambiguous and refused, `64,128` are two, and `256..1k` are 256, 512 and 1024."""
    for text in [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ():
        if isinstance(text, str) and _THOUSANDS.fullmatch(text.strip()):
            one, parts = text.strip().replace(",", ""), text.strip().split(",")
            odd_factor = int(one) // (int(one) & -int(one)) if int(one) else 0
            if odd_factor <= _MOST_ODD or any(part.startswith("0") for part in parts[1:]):  # probably thousands separators
                rule = f"may be {one} or {len(parts)} values"
                raise bad_field(field, text, rule, f"write {one}, or '{', '.join(parts)}' with spaces for several")
    numbers: list[Any] = []
    for entry in several(value):
        ends = entry.split("..") if isinstance(entry, str) else [entry]
        if len(ends) == 1:
            numbers.append(entry)
            continue
        first, *others = (read_integer(end, field) for end in ends)
        if len(others) != 1 or others[0] < first:
            raise bad_field(field, entry, "must be two numbers, the smaller first", "write 256..2048 for 256,512,1024,2048")
        numbers += doubled(first, others[0])
    return numbers


_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+", re.ASCII)
_MOST_ODD = 15
"""Largest odd factor of round sizes (4,096, 12,288, 131,072)."""


def _quoted(value: object) -> str:
    return value if isinstance(value, str) and value else shown(value)
