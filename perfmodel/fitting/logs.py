"""Step times and peaks of memory from logs of training frameworks. A log contains times only; its plan is given separately.

Formats, each from the framework's source code: torchtitan `components/metrics.py`; Megatron-LM `training/training.py` (`training_log`);
nanotron `trainer.py`; DeepSpeed `utils/timer.py` (`ThroughputTimer`) and `runtime/pipe/engine.py`; Hugging Face Transformers `trainer.py`
(`speed_metrics`) and the progress bar of tqdm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from perfmodel.fitting.columns import Row
from perfmodel.foundation.errors import InputError

_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_MOST_LINE = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Format in which a framework prints a step.

    framework   its name in runs; empty for one without a profile
    has         text that every such line contains
    pattern     groups: `step`, and one of `seconds`, `ms`, `tokens` (a second and chip), `samples` (a second), `rate` (steps a second);
                `batch` where the line gives the sequences of a step; `size` is the K of 1.2K
    """

    name: str
    framework: str = ""
    has: str
    pattern: re.Pattern[str]


FORMATS = (
    LogFormat(
        name="torchtitan",
        framework="torchtitan",
        has="loss:",
        pattern=re.compile(r"\bstep:\s*(?P<step>\d+)\s.*?\b(?:tps|wps):\s*(?P<tokens>[\d,.]+)"),
    ),
    LogFormat(
        name="Megatron-LM",
        framework="Megatron-LM",
        has="elapsed time per iteration (ms):",
        pattern=re.compile(
            r"\biteration\s+(?P<step>\d+)/.*?elapsed time per iteration \(ms\):\s*(?P<ms>[\d.]+)(?:.*?global batch size:\s*(?P<batch>\d+))?"
        ),
    ),
    LogFormat(
        name="nanotron",
        framework="nanotron",
        has="elapsed_time_per_iteration_ms:",
        pattern=re.compile(
            r"\biteration:\s*(?P<step>\d+)\s*/.*?elapsed_time_per_iteration_ms:\s*(?P<ms>[\d.]+)(?P<size>[KMG]?)"
            r"(?:.*?global_batch_size:\s*(?P<batch>\d+)\b(?![.KM]))?"
        ),
    ),
    LogFormat(
        name="DeepSpeed",
        framework="DeepSpeed",
        has="CurrSamplesPerSec=",
        pattern=re.compile(r"(?:global_step=|\b\d+/)(?P<step>\d+),.*?CurrSamplesPerSec=(?P<samples>[\d.]+)"),
    ),
    LogFormat(
        name="DeepSpeed's pipeline",
        framework="DeepSpeed",
        has="iter time (s):",
        pattern=re.compile(r"\bsteps:\s*(?P<step>\d+)\s.*?iter time \(s\):\s*(?P<seconds>[\d.]+)"),
    ),
    LogFormat(
        name="HF Trainer",
        has="/it]",
        pattern=re.compile(r"\b(?P<step>\d+)/\d+\s*\[[\d:]+<[\d:?]+,\s*(?P<seconds>[\d.]+)s/it\]"),
    ),
    LogFormat(
        name="HF Trainer",
        has="it/s]",
        pattern=re.compile(r"\b(?P<step>\d+)/\d+\s*\[[\d:]+<[\d:?]+,\s*(?P<rate>[\d.]+)it/s\]"),
    ),
    LogFormat(
        name="HF Trainer's summary",
        has="train_steps_per_second",
        pattern=re.compile(r"train_steps_per_second\W+(?P<rate>[\d.]+)(?P<step>)"),
    ),
)
#: Where a run prints lines of several formats, the first of these gives its step.
_PRECEDENCE = ("Megatron-LM", "nanotron", "torchtitan", "DeepSpeed's pipeline", "DeepSpeed", "HF Trainer", "HF Trainer's summary")
_COMBINATIONS = ({"Megatron-LM", "DeepSpeed", "DeepSpeed's pipeline"}, {"HF Trainer", "HF Trainer's summary", "DeepSpeed"})
"""Formats that one run may print together: Megatron-DeepSpeed, and the Trainer on DeepSpeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFormat:
    """Format in which a framework prints the peak of a rank. pattern: groups `reserved` or `allocated`, in `unit` bytes."""

    has: str
    pattern: re.Pattern[str]
    unit: int


#: torchtitan `components/metrics.py`; Megatron-LM `training/utils.py` (`report_memory`: MB are MiB); nanotron `logging`; DeepSpeed
#: `utils/timer.py` (GB are GiB).
MEMORY_FORMATS = (
    MemoryFormat(has="memory:", pattern=re.compile(r"\bmemory:\s*(?P<reserved>[\d.]+)GiB\("), unit=2**30),
    MemoryFormat(has="max reserved:", pattern=re.compile(r"\| max reserved: (?P<reserved>[\d.]+)"), unit=2**20),
    MemoryFormat(has="Peak reserved:", pattern=re.compile(r"Peak reserved: (?P<reserved>[\d.]+)MiB"), unit=2**20),
    MemoryFormat(has="MaxMemAllocated=", pattern=re.compile(r"MaxMemAllocated=(?P<allocated>[\d.]+)GB"), unit=2**30),
)
_MAY_BE_STEP = re.compile(b"|".join(re.escape(form.has.encode()) for form in (*FORMATS, *MEMORY_FORMATS)))
_MOST_LINES = 5_000_000


def row_of_log(lines: Iterable[bytes], name: str) -> tuple[Row, str] | None:
    """Return the run of a log and a note on how it was read; None for a text without a known step."""
    logs, peaks = _steps(lines, name)
    if not logs:
        return None
    formats = set(logs)
    if len(formats) > 1 and not any(formats <= combination for combination in _COMBINATIONS):
        raise InputError(f"{name}: holds steps of {' and of '.join(sorted(formats))}; a profile is of one framework: give a log of one")
    kind = next(kind for kind in _PRECEDENCE if kind in logs)
    log = logs[kind]
    steps = [median(values) for _, values in sorted(log.steps.items())]
    values: dict[str, Any] = {"id": name, "logged_unit": log.unit, "logged_steps": steps, **peaks}
    framework = "DeepSpeed" if {"Megatron-LM", "DeepSpeed"} <= formats else next(form.framework for form in FORMATS if form.name == kind)
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
        for memory_form in MEMORY_FORMATS:
            match = memory_form.pattern.search(line) if memory_form.has in line else None
            for kind, size in match.groupdict().items() if match is not None else ():
                column = {"reserved": "peak_memory", "allocated": "peak_allocated"}[kind]
                peaks[column] = max(peaks.get(column, 0.0), float(size.rstrip(".") or 0) * memory_form.unit)
        for log_format in FORMATS:
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
