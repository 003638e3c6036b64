"""How tokens spread over experts: evenly, unevenly by so much, or cut to a capacity."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.foundation.errors import bad_field, shown

_TEXT = re.compile(r"balanced|skew:(\d{1,4}(?:\.\d{1,6})?)", re.ASCII)
_MOST = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the fullest rank has to do, which sets the time of a layer and its memory.

    skew              rows of the fullest rank over the mean, where none are dropped (dropless)
    capacity_factor   rows that each expert has room for over the mean: buffers are so large, and padded to it, whatever comes; what has no
                      room is dropped. 0: none are dropped
    """

    skew: float = 1.0
    capacity_factor: float = 0.0

    @property
    def load(self) -> float:
        """Rows of the fullest rank over the mean."""
        return self.capacity_factor or self.skew

    @property
    def is_balanced(self) -> bool:
        return self.load == 1.0

    def __str__(self) -> str:
        return "balanced" if self.skew == 1.0 else f"skew:{self.skew:g}"

    def with_capacity(self, value: Any, name: str = "capacity_factor") -> Routing:
        """With room for so many times the mean; 0 or "none": for all that come."""
        if isinstance(value, str):
            try:
                value = 0.0 if value == "none" else float(value)
            except ValueError:
                raise bad_field(name, shown(value), "must be a number", "write 1.25, or none") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value == 0 or 0 < value <= _MOST):
            raise bad_field(name, shown(value), f"must be a positive number of {_MOST:g} at most", "write 1.25, or none")
        return replace(self, capacity_factor=float(value))


BALANCED = Routing()


def routing_of(value: Any, name: str = "routing") -> Routing:
    """`balanced`, or `skew:1.3`: the fullest rank has 1.3 times the mean."""
    if isinstance(value, Routing):
        return value
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    skew = float(found[1]) if found and found[1] else 1.0
    if found is None or not 1.0 <= skew <= _MOST:
        raise bad_field(name, shown(value), "must be balanced, or skew: and how many times the mean the fullest rank has", "write skew:1.3")
    return Routing(skew=skew)
