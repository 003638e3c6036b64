"""Constants of a full training run, each with its unit and source: `hardware_specs/assumptions.yaml`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir

if TYPE_CHECKING:
    from perfmodel.hardware.cluster import Cluster

#: Assumptions that are fractions, above 0 and at most 1.
_SHARES = ("spares_confidence", "power_utilization")
#: Factor beyond the published range at which a number is assumed to be in another unit.
_FARTHEST = 1e4
#: Words of `with_given` in addition to the names of constants.
LOCATION, PRICE = "location", "price"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A constant, the range of its published values, and its source. All three numbers are in `unit`."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    means: str
    provenance: str
    date: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The constants of a run by name.

    by_location   grams of CO2 equivalents per kWh [g/kWh]
    price         price of a chip-hour if the user gives one; 0: that of the chip's price table [USD/h]
    prices        the same for single clusters or chips by name, with priority over `price` [USD/h]
    """

    constants: Mapping[str, Assumption]
    by_location: Mapping[str, float]
    price: float = 0.0
    prices: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> float:
        return self.constants[name].value

    def with_given(self, given: Mapping[str, float | str]) -> Assumptions:
        """Return the assumptions with the user's values: names of constants, `location`, `price` and `price.NAME`."""
        constants, price, prices = dict(self.constants), self.price, dict(self.prices)
        for name, value in given.items():
            word = f"assume {name}"
            if name == LOCATION:
                location = str(value).lower()
                if location not in self.by_location:
                    remedy = f"use {', '.join(self.by_location)}, or --assume carbon_intensity=G_PER_KWH"
                    raise bad_field("assume location", location, "has no carbon intensity", remedy)
                source = f"Ember, year 2023: {location}"
                constants["carbon_intensity"] = _replaced(constants["carbon_intensity"], self.by_location[location], source)
            elif name == PRICE:
                price = _positive(value, word)
            elif name.startswith(f"{PRICE}."):
                from perfmodel.hardware.reader import list_chips, list_clusters

                target, priced = name.removeprefix(f"{PRICE}."), (*list_clusters(), *list_chips())
                if target not in priced:
                    raise InputError(f"assume={name}: {target or 'nothing'} is no cluster and no chip{suggest(target, priced)}")
                prices[target] = _positive(value, word)
            elif name in constants:
                constant = constants[name]
                unit = constant.unit.removeprefix("1")  # a rate: 0.004/day
                has_unit = bool(unit) and isinstance(value, str) and value.strip().endswith(unit)
                number = _positive(str(value).strip().removesuffix(unit) if has_unit else value, word)
                # A bare number of another magnitude is assumed to be in another unit.
                if not has_unit and not constant.low / _FARTHEST <= number <= constant.high * _FARTHEST:
                    rule = f"is in {constant.unit}, and published values are {constant.low:g} to {constant.high:g}"
                    raise bad_field(word, value, rule, f"write {name}={constant.value:g}{unit}")
                constants[name] = _replaced(constant, number)
            else:
                known = (*constants, LOCATION, PRICE)
                raise InputError(f"assume={name}: is no assumption{suggest(name, known)}")
        return Assumptions(constants=constants, by_location=self.by_location, price=price, prices=prices)

    def on(self, cluster: Cluster) -> Assumptions:
        """Return the assumptions with the user's price for this cluster, or for its chip, as `price`."""
        return replace(self, price=self.prices.get(cluster.name) or self.prices.get(cluster.chip.name) or self.price)


def read_assumed(given: Mapping[str, float | str] | Sequence[str] | None) -> dict[str, float | str]:
    """Return given values by name; texts are NAME=VALUE, as on a command line. Raise InputError for other texts."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    if isinstance(given, str):
        given = [given]
    pairs = [str(text).partition("=") for text in given]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise bad_field("assume", name, "has no value", "write NAME=VALUE, such as pue=1.1")
    return {name: value for name, _, value in pairs}


def load_assumptions() -> Assumptions:
    """Read the shipped constants."""
    data = read_yaml(resource_dir("hardware_specs") / "assumptions.yaml")
    by_location: Mapping[str, float] = data["carbon_intensity"].pop("by_location")
    constants = {}
    for name, entry in data.items():
        value, low, high = (float(entry[key]) for key in ("value", "low", "high"))
        texts = {key: str(entry[key]) for key in ("unit", "means", "provenance", "date", "source")}
        constants[name] = Assumption(name=name, value=value, low=low, high=high, **texts)
    return Assumptions(constants=constants, by_location=by_location)


def _replaced(constant: Assumption, value: float, source: str = "given by the user") -> Assumption:
    return replace(constant, value=value, low=value, high=value, provenance="given", source=source)


def _positive(value: float | str, field: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise bad_field(field, value, "must be a number above 0", "write a number such as 1.2")
    if field.removeprefix("assume ") in _SHARES and number > 1:
        raise bad_field(field, value, "is a share of a whole, at most 1", "write a number such as 0.8")
    return number
