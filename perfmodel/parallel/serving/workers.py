"""Prefill and decode workers as text: `3x4:1x8`, or with degrees of each pool, `1x8,tp=2,attention-dp=4,ep=8:1x8,tp=8`.

On chips of two kinds: `3x4@h20:1x8@h200`; degrees follow the chip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.values import read_integer

_SIZE = re.compile(r"(\d{1,6})\s*x\s*(\d{1,6})\s*(?:@\s*(.+?)\s*)?", re.ASCII)
_REMEDY = "write 3x4:1x8 for three prefill workers of 4 chips and one decode worker of 8; degrees follow, as in 1x8,tp=2,pp=4:1x8,tp=8"
DEGREES = ("tp", "pp", "attention_dp", "ep", "dcp", "pcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedWorkers:
    """Stated workers of one pool.

    count    number of workers
    chips    chips of each worker
    cluster  cluster of their chips, if stated
    degrees  stated degrees by name
    """

    count: int
    chips: int
    cluster: str = ""
    degrees: Mapping[str, int] = field(default_factory=dict)


def parse_workers(value: object, name: str = "workers") -> tuple[StatedWorkers, StatedWorkers]:
    """Return the prefill and the decode workers of a text. Raises InputError."""
    parts = str(value).split(":")
    if len(parts) != 2:
        raise bad_field(name, value, "must be prefill workers x chips of each : decode workers x chips of each", _REMEDY)
    prefill, decode = (_group(part, value, name) for part in parts)
    for group, degree, rule in ((prefill, "dcp", "is of decode workers"), (decode, "pcp", "is of prefill workers")):
        if group.degrees.get(degree, 1) > 1:
            raise bad_field(name, value, f"{degree} {rule}", f"leave {degree} out on that side of the colon")
    if bool(prefill.cluster) != bool(decode.cluster):
        raise bad_field(name, value, "names the chips of one kind of worker only", "write 3x4@h20:1x8@h200, or leave both to --cluster")
    return prefill, decode


def _group(text: str, value: object, name: str) -> StatedWorkers:
    size, *given = text.split(",")
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise bad_field(name, value, "must be prefill workers x chips of each : decode workers x chips of each", _REMEDY)
    degrees: dict[str, int] = {}
    for entry in given:
        degree, _, number = entry.partition("=")
        degree = degree.strip().replace("-", "_")
        if degree not in DEGREES:
            raise bad_field(name, value, f"{degree or entry} is no degree of a worker", f"use {', '.join(DEGREES).replace('_', '-')}")
        if degree in degrees:
            raise bad_field(name, value, f"{degree} is given twice for one kind of worker", "keep one")
        degrees[degree] = read_integer(number, f"{name}: {degree}")
    return StatedWorkers(count=read_integer(match[1], name), chips=read_integer(match[2], name), cluster=match[3] or "", degrees=degrees)


def cluster_text(groups: tuple[StatedWorkers, StatedWorkers]) -> str:
    """Return the cluster of workers that name their chips (`hardware/mixed.py`); "" if they do not."""
    return "+".join(f"{group.count * group.chips}@{group.cluster}" for group in groups) if groups[0].cluster else ""
