"""Distribution of needed over predicted memory, for known and unknown frameworks.

Its two parameters are in `strategies/memory_uncertainty.yaml`, written by `python -m lab.residuals`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_headroom import MemoryUncertainty
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile

KNOWN, UNKNOWN = "known", "unknown"


def uncertainty_of_memory(profile: ExecutionProfile) -> MemoryUncertainty:
    """Return the memory uncertainty of a framework.

    A fitted profile has that of the profile from which it started. Measured peaks reduce that of an unknown framework towards that of a
    known one, as far as they determine the allocator's reserved memory (`memory_known`).
    """
    known, unknown = map(load_memory_uncertainties().__getitem__, (KNOWN, UNKNOWN))
    if profile.known_as != GENERIC:
        return known
    share = profile.fitted.memory_known
    if not share:
        return unknown
    return MemoryUncertainty(
        centre=unknown.centre + (known.centre - unknown.centre) * share,
        scale=math.sqrt(unknown.scale**2 + (known.scale**2 - unknown.scale**2) * share),
        of_unseen=share < 0.5,
        rests_on=f"{profile.fitted.num_memory_runs} measured peaks of your own; {unknown.rests_on}",
    )


def load_memory_uncertainties(path: str | Path | None = None) -> Mapping[str, MemoryUncertainty]:
    """Return the memory uncertainties by kind: the shipped ones, or those of a file."""
    return _shipped() if path is None else _load(Path(path))


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, MemoryUncertainty]:
    return _load(resource_dir("strategies") / "memory_uncertainty.yaml")


def _load(path: Path) -> Mapping[str, MemoryUncertainty]:
    from perfmodel.foundation.files import read_yaml

    try:
        data = read_yaml(path)
        return {
            kind: MemoryUncertainty(
                centre=_within(data[kind]["centre"], -5.0),
                scale=_within(data[kind]["scale"], 1e-4),
                of_unseen=kind == UNKNOWN,
                rests_on=str(data[kind]["rests_on"]),
            )
            for kind in (KNOWN, UNKNOWN)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"memory_uncertainty={path}: cannot be read ({reason.removeprefix(f'{path}: ')}); write it with `python -m lab.residuals`"
        ) from None


def _within(value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 5.0:
        raise bad_field("number", shown(value), f"must be from {least:g} to 5")
    return float(value)
