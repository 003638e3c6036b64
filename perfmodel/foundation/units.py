"""Quantities with units: strings in files and printouts, SI floats (s, byte, byte/s, FLOP/s, W, m2) inside.

Prefixes are used only in this module. Decimal and binary units are distinct (GB = 10^9, GiB = 2^30), and so are bits and bytes: `Gb` is
refused, because some mean `Gbit` by it and others `GB`.
"""

import math
import re
from enum import StrEnum

from perfmodel.foundation.errors import InputError, bad_field, shown, suggest


class QuantityKind(StrEnum):
    """Kinds of quantities; each allows its own units."""

    TIME = "time"
    BYTES = "bytes"
    BANDWIDTH = "bandwidth"
    FLOP_RATE = "flop_rate"
    POWER = "power"
    PRICE = "price"
    COUNT = "count"
    FRACTION = "fraction"
    LENGTH = "length"
    AREA = "area"
    DENSITY = "density"
    ENERGY = "energy"
    CLOCK = "clock"


_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}

# unit -> (factor, power of ten). The power is appended to the digits before the conversion to float, so "3.35 TB/s" is exactly 3.35e12.
_Unit = tuple[float, int]
_BYTES: dict[str, _Unit] = {
    **{f"{prefix}B": (1.0, power) for prefix, power in _DECIMAL.items()},
    **{f"{prefix}B": (factor, 0) for prefix, factor in _BINARY.items()},
    **{f"{prefix}bit": (0.125, power) for prefix, power in _DECIMAL.items()},
}
_UNITS: dict[str, dict[str, _Unit]] = {
    QuantityKind.TIME: {
        "s": (1.0, 0),
        "ms": (1.0, -3),
        "us": (1.0, -6),
        "ns": (1.0, -9),
        "ps": (1.0, -12),
        "min": (60.0, 0),
        "h": (3600.0, 0),
        "d": (86400.0, 0),
    },
    QuantityKind.BYTES: _BYTES,
    QuantityKind.BANDWIDTH: {f"{unit}/s": scale for unit, scale in _BYTES.items()},
    QuantityKind.FLOP_RATE: {f"{prefix}FLOP/s": (1.0, power) for prefix, power in _DECIMAL.items()},
    QuantityKind.POWER: {"W": (1.0, 0), "mW": (1.0, -3), "kW": (1.0, 3), "MW": (1.0, 6)},
    QuantityKind.PRICE: {"USD/h": (1.0, 0)},
    QuantityKind.COUNT: {"": (1.0, 0), "k": (1.0, 3), "K": (1.0, 3), "M": (1.0, 6), "B": (1.0, 9), "G": (1.0, 9), "T": (1.0, 12)},
    QuantityKind.FRACTION: {"": (1.0, 0), "%": (1.0, -2)},
    QuantityKind.LENGTH: {"m": (1.0, 0), "mm": (1.0, -3), "um": (1.0, -6)},
    QuantityKind.AREA: {"m2": (1.0, 0), "mm2": (1.0, -6), "um2": (1.0, -12)},
    QuantityKind.DENSITY: {"Tr/m2": (1.0, 0), "MTr/mm2": (1.0, 12)},
    QuantityKind.ENERGY: {"J": (1.0, 0), "nJ": (1.0, -9), "pJ": (1.0, -12)},
    QuantityKind.CLOCK: {"Hz": (1.0, 0), "MHz": (1.0, 6), "GHz": (1.0, 9)},
}
#: The unit of the number that a quantity becomes.
SI_UNITS: dict[str, str] = {
    QuantityKind.TIME: "s",
    QuantityKind.BYTES: "byte",
    QuantityKind.BANDWIDTH: "byte/s",
    QuantityKind.FLOP_RATE: "FLOP/s",
    QuantityKind.POWER: "W",
    QuantityKind.PRICE: "USD/h",
    QuantityKind.COUNT: "1",
    QuantityKind.FRACTION: "1",
    QuantityKind.LENGTH: "m",
    QuantityKind.AREA: "m2",
    QuantityKind.DENSITY: "Tr/m2",
    QuantityKind.ENERGY: "J",
    QuantityKind.CLOCK: "Hz",
}
# Largest value in SI units: no quantity is larger, and products of a few larger numbers would overflow.
_MOST = 1e26
_BARE_NUMBERS = frozenset({QuantityKind.COUNT, QuantityKind.FRACTION})
_EXAMPLES = {
    QuantityKind.TIME: "'5 us'",
    QuantityKind.BYTES: "'80 GiB' or '80 GB'",
    QuantityKind.BANDWIDTH: "'3.35 TB/s' or '400 Gbit/s'",
    QuantityKind.FLOP_RATE: "'989.4 TFLOP/s'",
    QuantityKind.POWER: "'700 W'",
    QuantityKind.PRICE: "'2.99 USD/h'",
    QuantityKind.COUNT: "'15T' or 64",
    QuantityKind.FRACTION: "'10%' or 0.1",
    QuantityKind.LENGTH: "'10 mm'",
    QuantityKind.AREA: "'814 mm2'",
    QuantityKind.DENSITY: "'138 MTr/mm2'",
    QuantityKind.ENERGY: "'4 pJ'",
    QuantityKind.CLOCK: "'1.83 GHz'",
}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,4}))?\s*(\S*)\s*", re.ASCII)
_BITS_OR_BYTES = re.compile(r"([kKMGTPE])b(ps|/s|its?(?:/s|ps)?)?")


_SUFFIXES = (
    ("time", QuantityKind.TIME),
    ("times", QuantityKind.TIME),
    ("latency", QuantityKind.TIME),
    ("bytes", QuantityKind.BYTES),
    ("capacity", QuantityKind.BYTES),
    ("bandwidth", QuantityKind.BANDWIDTH),
    ("flop_rate", QuantityKind.FLOP_RATE),
    ("tdp", QuantityKind.POWER),
    ("power", QuantityKind.POWER),
    ("length", QuantityKind.LENGTH),
    ("area", QuantityKind.AREA),
    ("density", QuantityKind.DENSITY),
    ("energy", QuantityKind.ENERGY),
    ("clock", QuantityKind.CLOCK),
)
# The most likely unit of a small number without a unit.
_USUAL_UNIT = {
    QuantityKind.TIME: "us",
    QuantityKind.BYTES: "GB",
    QuantityKind.BANDWIDTH: "GB/s",
    QuantityKind.FLOP_RATE: "TFLOP/s",
    QuantityKind.POWER: "W",
    QuantityKind.AREA: "mm2",
    QuantityKind.CLOCK: "GHz",
}


def quantity_of(name: str) -> str:
    """Return the kind of quantity of a field with this name; "" if it is dimensionless."""
    stem = name.partition(".")[0]
    return next((kind for suffix, kind in _SUFFIXES if stem == suffix or stem.endswith("_" + suffix)), "")


def example_of(kind: str, number: float | None = None) -> str:
    """Return an example of a quantity, or the bare `number` with its most likely unit, or with the base unit if it is large."""
    known = QuantityKind(kind)
    if number is None or known not in _USUAL_UNIT or not 0 <= number < 1e18:
        return _EXAMPLES[known]
    base = next(unit for unit, scale in _UNITS[kind].items() if scale == (1.0, 0))
    if number >= 1e6:
        return f"'{number:g} {base}'"
    return f"'{number:g} {_USUAL_UNIT[known]}' or whatever unit it is in"


def parse_quantity(text: object, kind: str, *, field: str = "quantity") -> float:
    """Return the SI value of a string such as "3.35 TB/s"; `kind` determines its units.

    Counts and fractions may be bare numbers; all else must have a unit. A fraction is in 0..1. Negative and non-finite values are
    refused. field: name in the error message.
    """
    units = _UNITS.get(kind)
    if units is None:
        raise InputError(f"kind={kind}: unknown kind of quantity{suggest(kind, _UNITS)}")
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise bad_field(field, shown(text), f"must be a {kind} with its unit", f"write {_EXAMPLES[QuantityKind(kind)]}")
    if not isinstance(text, str) and kind not in _BARE_NUMBERS:
        raise bad_field(field, shown(text), f"a {kind} needs its unit", f"write {example_of(kind, text)}")
    if isinstance(text, int) and abs(text) > 10**30:
        raise bad_field(field, shown(text), f"must be a finite {kind}", f"write {_EXAMPLES[QuantityKind(kind)]}")
    source = text if isinstance(text, str) else repr(text)
    match = _QUANTITY.fullmatch(source.replace("µ", "u").replace("μ", "u"))
    if match is None:
        raise bad_field(field, repr(text), "must be a number and a unit", f"write {_EXAMPLES[QuantityKind(kind)]}")
    digits, exponent, unit = match.groups()
    if unit not in units:
        rule, remedy = f"a {kind} needs its unit", f"write {_EXAMPLES[QuantityKind(kind)]}"
        ambiguous = _BITS_OR_BYTES.fullmatch(unit)
        if ambiguous:
            prefix, tail = ambiguous[1].replace("K", "k"), "/s" if kind == QuantityKind.BANDWIDTH else ""
            rule, remedy = f"unit {unit!r} may mean bits or bytes", f"write {prefix}bit{tail} or {prefix}B{tail} (8 times as much)"
        elif unit:
            rule = f"unknown {kind} unit {unit!r}{suggest(unit, filter(None, units))}"
        raise bad_field(field, repr(text), rule, remedy)
    factor, power = units[unit]
    value = float(f"{digits}e{int(exponent or 0) + power}") * factor
    if not math.isfinite(value):
        raise bad_field(field, repr(text), f"must be a finite {kind}", f"write {_EXAMPLES[QuantityKind(kind)]}")
    if value < 0 or math.copysign(1.0, value) < 0:
        raise bad_field(field, repr(text), f"a {kind} is never negative", "drop the sign")
    if value > _MOST:
        raise bad_field(field, repr(text), f"no {kind} is so large", f"write {_EXAMPLES[QuantityKind(kind)]}")
    if kind == QuantityKind.FRACTION and value > 1:
        raise bad_field(field, repr(text), "a fraction lies in 0..1", "write 0.1 or '10%'")
    return value


def exact_quantity(value: float, kind: str) -> str:
    """Return a string that `parse_quantity` converts back to exactly `value`, with the shortest prefix, and bytes for data."""
    units = _UNITS[kind]
    candidates = []
    for unit, (factor, power) in units.items():
        for digits in (f"{value / (factor * 10.0**power):.15g}", repr(float(value) / (factor * 10.0**power))):
            text = f"{digits} {unit}".strip()
            if "inf" not in digits and parse_quantity(text, kind) == value:
                penalty = 4 * ("e" in digits) + 2 * (not 1 <= float(digits) < 1000) + 4 * unit.endswith("bit")
                candidates.append((len(digits) + penalty, len(text), text))
    base = next(unit for unit, scale in units.items() if scale == (1.0, 0))
    return min(candidates)[2] if candidates else f"{value!r} {base}".strip()


def _with_prefix(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Return `value` in the largest unit in which it is at least 1, with three significant digits."""
    if not math.isfinite(value):
        return f"{value} {steps[-1][1]}"
    for scale, unit in steps:
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {unit}"
    scale, unit = steps[-1]
    return f"{_three_digits(value / scale)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


_TIME_STEPS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BINARY_BYTE_STEPS = ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_DECIMAL_BYTE_STEPS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_BANDWIDTH_STEPS = tuple((scale, f"{unit}/s") for scale, unit in _DECIMAL_BYTE_STEPS)
_FLOP_RATE_STEPS = (
    (1e18, "EFLOP/s"),
    (1e15, "PFLOP/s"),
    (1e12, "TFLOP/s"),
    (1e9, "GFLOP/s"),
    (1e6, "MFLOP/s"),
    (1e3, "kFLOP/s"),
    (1.0, "FLOP/s"),
)
_POWER_STEPS = ((1e6, "MW"), (1e3, "kW"), (1.0, "W"))
_COUNT_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_time(time: float) -> str:
    """Format a time with three digits: 1.23 s, 45.6 ms."""
    return _with_prefix(time, _TIME_STEPS)


def format_step(time: float) -> str:
    """Format a step time, in seconds even above a minute, so that steps can be compared."""
    return format_time(time) if time < 60 else f"{time:,.{1 if time < 1000 else 0}f} s"


def format_bytes(num_bytes: float) -> str:
    """Format bytes of memory with three digits in binary units: 74.5 GiB."""
    return _with_prefix(num_bytes, _BINARY_BYTE_STEPS)


def format_traffic(num_bytes: float) -> str:
    """Format bytes of traffic with three digits in decimal units, as for bandwidths: 1.5 GB."""
    return _with_prefix(num_bytes, _DECIMAL_BYTE_STEPS)


def format_bandwidth(bandwidth: float) -> str:
    """Format a bandwidth with three digits in decimal units: 450 GB/s."""
    return _with_prefix(bandwidth, _BANDWIDTH_STEPS)


def format_flop_rate(flop_rate: float) -> str:
    """Format a FLOP rate with three digits: 989 TFLOP/s."""
    return _with_prefix(flop_rate, _FLOP_RATE_STEPS)


def format_power(power: float) -> str:
    """Format a power with three digits: 700 W."""
    return _with_prefix(power, _POWER_STEPS)


def format_quantity(value: float, kind: str) -> str:
    """Format a quantity of this kind with three digits, in the unit of tables."""
    steps = {
        QuantityKind.TIME: _TIME_STEPS,
        QuantityKind.BYTES: _BINARY_BYTE_STEPS,
        QuantityKind.BANDWIDTH: _BANDWIDTH_STEPS,
        QuantityKind.FLOP_RATE: _FLOP_RATE_STEPS,
        QuantityKind.POWER: _POWER_STEPS,
        QuantityKind.COUNT: _COUNT_STEPS,
        QuantityKind.AREA: ((1e-6, "mm2"),),
        QuantityKind.LENGTH: ((1e-3, "mm"),),
        QuantityKind.CLOCK: ((1e9, "GHz"), (1e6, "MHz")),
    }
    return _with_prefix(value, steps.get(QuantityKind(kind), ((1.0, SI_UNITS[kind]),)))


def format_count(count: float) -> str:
    """Format a count with three digits: 8.03B."""
    return _with_prefix(count, _COUNT_STEPS).replace(" ", "")
