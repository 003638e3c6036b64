"""Step times from a trace of torch's profiler (Chrome's JSON): the marks `ProfilerStep#N` that its schedule writes.

A trace has hundreds of megabytes but few marks: they are found by pattern, and the rest is not parsed.
"""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from perfmodel.fitting.columns import Row
from perfmodel.foundation.errors import InputError

_EVENT = re.compile(rb'\{[^{}]*"ProfilerStep\*?#(\d{1,9})"[^{}]*')
_LENGTH = re.compile(rb'"dur"\s*:\s*(\d+(?:\.\d+)?)')
_KIND = re.compile(rb'"cat"\s*:\s*"([^"]*)"')
_RANKS = re.compile(rb'"world_size"\s*:\s*(\d{1,7})')
_MICROSECOND = 1e-6


def is_trace(start: bytes) -> bool:
    return b'"traceEvents"' in start or b'"schemaVersion"' in start


def row_of_trace(content: bytes, name: str) -> tuple[Row, str]:
    """Return the run of a trace and a note on it. It counts the marks of the host, not those of the chip, of which a step has several."""
    steps: dict[int, list[float]] = {}
    for event in _EVENT.finditer(content):
        length, kind = _LENGTH.search(event[0]), _KIND.search(event[0])
        if length is not None and not (kind is not None and kind[1].startswith(b"gpu")):
            steps.setdefault(int(event[1]), []).append(float(length[1]) * _MICROSECOND)
    times = [median(durations) for _, durations in sorted(steps.items()) if median(durations) > 0]
    if not times:
        remedy = "call prof.step() after each step, and profile with a schedule"
        raise InputError(f"{name}: a trace without steps (ProfilerStep#N); {remedy}")
    values: dict[str, Any] = {"id": name, "logged_unit": "seconds", "logged_steps": times}
    ranks = _RANKS.search(content)
    if ranks is not None:
        values["logged_chips"] = int(ranks[1])
    return Row(
        location=name, values=values
    ), f"{name}: {len(times)} profiled step{'s' if len(times) > 1 else ''}; a profiler slows small steps"
