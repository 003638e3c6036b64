"""Step times and peaks of memory from logs of training frameworks and traces of torch's profiler. Their plan is given separately.

`log_formats.yaml` has the lines that each framework prints. A trace (Chrome's JSON) has hundreds of megabytes, but few of the marks
`ProfilerStep#N` that the profiler's schedule writes: they are found by pattern, and the rest is not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from perfmodel.fitting.columns import Row
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import read_yaml

_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_MOST_LINE = 4000
_EVENT = re.compile(rb'\{[^{}]*"ProfilerStep\*?#(\d{1,9})"[^{}]*')
_LENGTH = re.compile(rb'"dur"\s*:\s*(\d+(?:\.\d+)?)')
_KIND = re.compile(rb'"cat"\s*:\s*"([^"]*)"')
_RANKS = re.compile(rb'"world_size"\s*:\s*(\d{1,7})')
_MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """Format of a line with a step or a peak of memory, as `log_formats.yaml` describes it."""

    has: str
    pattern: re.Pattern[str]
    name: str = ""
    framework: str = ""
    unit: int = 0


_TABLE = read_yaml(Path(__file__).with_name("log_formats.yaml"))
_STEPS, _PEAKS = ([LineFormat(**{**form, "pattern": re.compile(form["pattern"])}) for form in _TABLE[part]] for part in ("steps", "peaks"))
_MAY_BE_STEP = re.compile(b"|".join(re.escape(form.has.encode()) for form in (*_STEPS, *_PEAKS)))
_MOST_LINES = 5_000_000


def row_of_log(lines: Iterable[bytes], name: str) -> tuple[Row, str] | None:
    """Return the run of a log and a note on how it was read; None for a text without a known step."""
    logs, peaks = _steps(lines, name)
    if not logs:
        return None
    formats = set(logs)
    if len(formats) > 1 and not any(formats <= {*combination} for combination in _TABLE["together"]):
        raise InputError(f"{name}: holds steps of {' and of '.join(sorted(formats))}; a profile is of one framework: give a log of one")
    kind = next(form.name for form in _STEPS if form.name in logs)
    log = logs[kind]
    steps = [median(values) for _, values in sorted(log.steps.items())]
    values: dict[str, Any] = {"id": name, "logged_unit": log.unit, "logged_steps": steps, **peaks}
    framework = "DeepSpeed" if {"Megatron-LM", "DeepSpeed"} <= formats else next(form.framework for form in _STEPS if form.name == kind)
    if framework:
        values["framework"] = framework
    if log.batch:
        values["logged_batch"] = log.batch
    note = f"{name}: {len(steps)} step{'s' if len(steps) > 1 else ''} as {kind} prints them"
    if kind == "HF Trainer's summary":
        note = f"{name}: the mean of all steps that the Trainer sums up, warm-up among them"
    return Row(location=name, values=values), note


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Steps of a log of one format. steps: values of each rank by step, in `unit`; batch: last logged sequences of a step, 0: none."""

    unit: str
    batch: int = 0
    steps: dict[int, list[float]] = field(default_factory=dict)


def _steps(lines: Iterable[bytes], name: str) -> tuple[dict[str, _Steps], dict[str, float]]:
    """Return the steps by format, in `seconds`, or in `tokens` or `samples` a second, and the largest peaks of memory by column. [byte]"""
    logs: dict[str, _Steps] = {}
    peaks: dict[str, float] = {}
    for line in _lines(lines, name):
        for memory_form in _PEAKS:
            match = memory_form.pattern.search(line) if memory_form.has in line else None
            for kind, size in match.groupdict().items() if match is not None else ():
                column = {"reserved": "peak_memory", "allocated": "peak_allocated"}[kind]
                peaks[column] = max(peaks.get(column, 0.0), float(size.rstrip(".") or 0) * memory_form.unit)
        for log_format in _STEPS:
            match = log_format.pattern.search(line) if log_format.has in line else None
            if match is None:
                continue
            groups = match.groupdict()
            unit = next(name for name in ("seconds", "ms", "tokens", "samples", "rate") if groups.get(name))
            try:
                value = float(groups[unit].replace(",", "").rstrip(".")) * _SIZES[groups.get("size") or ""]
            except ValueError:
                continue
            if unit == "ms":
                unit, value = "seconds", value * 1e-3
            elif unit == "rate" and value:
                unit, value = "seconds", 1.0 / value
            if value > 0:
                log = logs.setdefault(log_format.name, _Steps(unit=unit))
                log.steps.setdefault(int(match["step"] or 0), []).append(value)
                log.batch = int(groups.get("batch") or log.batch)
    return logs, {column: size for column, size in peaks.items() if size > 0}


def _lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines that may print a step or a peak of memory, as a terminal shows them: a progress bar overwrites its line."""
    for number, line in enumerate(lines):
        if number == _MOST_LINES:
            raise InputError(f"{name}: has more than {_MOST_LINES:,} lines; give those of the first few hundred steps")
        if _MAY_BE_STEP.search(line):
            for shown in line.decode("utf-8", "replace").splitlines():
                yield _ESCAPES.sub("", shown[:_MOST_LINE])


# --- traces -----------------------------------------------------------------------------------------------------------


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
