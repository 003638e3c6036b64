"""Distribution of needed over predicted memory, for known and unknown frameworks.

Only two numbers of each kind ship (`strategies/memory_doubts.yaml`, written by `python -m lab.residuals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_room import MemoryDoubt
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile
from perfmodel.parallel.framework_ref import framework_named

KNOWN, UNKNOWN = "known", "unknown"


def memory_doubt(profile: ExecutionProfile) -> MemoryDoubt:
    """Memory uncertainty of a framework. A profile fitted to step times has that of the profile it started from."""
    name = framework_named(profile.fitted.base or profile.name)
    return load_memory_doubts()[UNKNOWN if name == GENERIC else KNOWN]


@lru_cache(maxsize=8)
def load_memory_doubts(path: str | Path | None = None) -> Mapping[str, MemoryDoubt]:
    """The shipped ones by kind, or those of a file."""
    from perfmodel.foundation.files import read_yaml

    path = resource_dir("strategies") / "memory_doubts.yaml" if path is None else Path(path)
    try:
        data = read_yaml(path)
        return {
            kind: MemoryDoubt(
                centre=_within(data[kind]["centre"], -5.0),
                scale=_within(data[kind]["scale"], 1e-4),
                of_stranger=kind == UNKNOWN,
                rests_on=str(data[kind]["rests_on"]),
            )
            for kind in (KNOWN, UNKNOWN)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"memory_doubts={path}: cannot be read ({reason.removeprefix(f'{path}: ')}); write it with `python -m lab.residuals`"
        ) from None


def _within(value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 5.0:
        raise bad_field("number", shown(value), f"must be from {least:g} to 5")
    return float(value)
