"""Values of measured runs, in the forms in which tables have them; `schemas.py` names the columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.units import QuantityKind, parse_quantity
from perfmodel.foundation.values import parsed_bool, read_integer
from perfmodel.validation.case_settings import settings_of_case

MEASURED = ("step_time", "step_time_ms", "step_times", "tokens_per_s", "tokens_per_s_per_chip", "samples_per_s")
#: Column of a peak of memory -> what it counts.
MEMORIES: Mapping[str, str] = {
    "peak_memory": "reserved",
    "peak_memory_gib": "reserved",
    "peak_allocated": "allocated",
    "peak_allocated_gib": "allocated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of a file: values by name, as written. location: file and line, for messages."""

    location: str
    values: Mapping[str, Any]

    def over(self, defaults: Mapping[str, Any]) -> Row:
        """Return the row with missing values taken from `defaults`."""
        return Row(location=self.location, values={**defaults, **self.values})

    @property
    def measured(self) -> Mapping[str, Any]:
        """Measurements of a published run; empty for any other."""
        measured = self.values.get("measured")
        return measured if isinstance(measured, Mapping) else {}

    def integer(self, name: str, *, least: int = 1) -> int | None:
        """Return an integer, or None if it is not given."""
        value = self.values.get(name)
        return None if value is None else integer_of(value, name, least=least)

    def flag(self, name: str) -> bool | None:
        return flag_of(self.values.get(name), name)

    def text(self, name: str) -> str:
        return str(self.values.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        """Return a positive number; see `positive`."""
        value = self.values.get(name)
        return None if value is None else positive(value, name)


def integer_of(value: object, name: str, *, least: int = 1) -> int:
    """Return an integer. `8.0` is 8, `8k` 8192, `8,192` too."""
    if isinstance(value, str) and re.fullmatch(r"\d+\.0+", value.strip()):
        value = value.strip().partition(".")[0]
    if isinstance(value, str) and _THOUSANDS.fullmatch(value.strip()):
        value = value.replace(",", "")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return read_integer(value, name, least=least)


GIB = 1024.0**3
_FEWEST_BYTES = 1e6
"""A smaller peak is not in bytes but in GiB or MiB."""

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_DECIMAL_COMMA = re.compile(r"\d+,\d+")


def positive(value: object, name: str, *, is_time: bool = False) -> float:
    """Return a positive number. Commas before three digits separate thousands (`12,345.6`), any other is a decimal comma (`7,91`).

    is_time   a time in seconds, in which `7,912` is ambiguous: it is refused
    """
    number = math.nan
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.,]+(?:[eE][+-]?\d+)?\s*", value):
        value = value.strip()
        if is_time and re.fullmatch(r"\d{1,3},\d{3}", value):
            remedy = f"write {value.replace(',', '.')} or {value.replace(',', '')}"
            raise bad_field(name, value, "is a decimal comma or one between thousands", remedy)
        if _DECIMAL_COMMA.fullmatch(value) and not _THOUSANDS.fullmatch(value):
            value = value.replace(",", ".")
        value = re.sub(r",(?=\d{3}(?:\D|$))", "", value)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.nan
    if not (math.isfinite(number) and number > 0):
        raise bad_field(name, shown(value), "must be a positive number", "correct it")
    return number


def flag_of(value: object, name: str) -> bool | None:
    """Return a boolean from its usual spellings, or None if it is not given."""
    if value is None or isinstance(value, bool):
        return value
    return parsed_bool(str(value), name)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run: its `settings` object, and columns with the names of settings, which defaults may supply."""
    given = {} if values.get("settings") is None else mapping_of(values["settings"], "settings")
    columns = {name.partition(".")[2]: _typed(value) for name, value in values.items() if name.startswith("settings.")}
    return {**columns, **settings_of_case(given)}


def mapping_of(value: object, name: str) -> Mapping[str, Any]:
    """Return a mapping of settings, also from JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise bad_field(name, value, "must be a JSON object", 'write {"compile": true}') from None
    if not isinstance(value, Mapping):
        raise bad_field(name, shown(value), "must be a mapping of names to values", 'write {"compile": true}')
    return value


def _typed(value: object) -> Any:
    """Return the value of a table cell in its JSON type."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        return word


def time_of(value: object, name: str) -> float:
    """Return a step time: `4.2`, `4.2 s` or `4200 ms`. [s]"""
    if isinstance(value, str) and re.search(r"[a-df-zµ]", value):
        digits, unit = re.match(r"\s*([\d.,]*)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]  # matches any text
        if "," in digits:
            value = f"{positive(digits, name, is_time=unit.strip() == 's'):.15g}{unit}"
        seconds = parse_quantity(value, QuantityKind.TIME, field=name)
        if seconds > 0:
            return seconds
    return positive(value, name, is_time=True)


def size_of(value: object, name: str) -> float:
    """Return a peak of memory: with a unit (`42.8 GiB`), in GiB under a name with `_gib`, else in bytes as torch counts them. [byte]"""
    if name.endswith("_gib"):
        return positive(value, name) * GIB
    if isinstance(value, str) and not re.fullmatch(r"\s*[\d.,]+\s*", value):
        return parse_quantity(value.strip(), QuantityKind.BYTES, field=name)
    size = positive(value, name)
    if size < _FEWEST_BYTES:
        raise bad_field(name, shown(value), "needs its unit", f"write {size:g} GiB, or name the column {name}_gib")
    return size


def times_of(value: object, name: str) -> list[float]:
    """Return the times of consecutive steps: a list, or numbers in a text. [s]"""
    if isinstance(value, str):
        value = [part for part in value.replace(";", " ").replace("[", " ").replace("]", " ").replace(",", " ").split() if part]
    if not isinstance(value, (list, tuple)) or not value:
        raise bad_field(name, shown(value), "must be a list of times", "write [4.2, 4.3]")
    return [positive(time, name) for time in value]
