"""Read a trace of torch.profiler (Kineto's JSON): the time of its steps, by group of kernels.

A kernel belongs to the step in which it was launched. Each instant is assigned to one group: compute before communication before copies,
else idle. So groups add up to the step, and only exposed communication counts. Idle time is split by the concurrent activity of the host.
Without kernels (a CPU), operators count, each without those that it calls. Without marks, a step ends with the optimizer's step.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.parallel.measured import COMMUNICATION, COMPUTE, GROUPS, HOST, TRACE_NAMES, MeasuredTrace
from perfmodel.parallel.plan import Plan


def _compiled(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, re.Pattern[str]]]:
    return [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in pairs]


#: (group, names of its kernels and operators), (class of communication, words of its process group), (activity, events of the host).
_GROUPS, _AXES, _HOST_EVENTS = (_compiled(TRACE_NAMES[table]) for table in ("groups", "process_groups", "host_events"))
_PATTERN = dict(_compiled(TRACE_NAMES["patterns"].items()))
_AFTER_WAIT = 20e-6  # [s] from the end of a wait to the idle time that it caused
_ON_DEVICE, _LAUNCHES, _ON_HOST = (TRACE_NAMES["categories"][kind] for kind in ("device", "launch", "host"))
_MICROSECOND = 1e-6
_MOST_NAMES = 3

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Event:
    category: str
    name: str
    start: float
    end: float
    thread: tuple[Any, Any]
    known: Mapping[str, Any]

    @property
    def interval(self) -> Interval:
        return self.start, self.end


def read_trace(path: str | Path, plan: Plan | None = None, *, steps: int | None = None) -> MeasuredTrace:
    """Return the mean step of a trace. Raises InputError.

    plan    axes of collectives whose process group has no description
    steps   number of steps in a trace without marks (ProfilerStep#N); None: the number of optimizer steps
    """
    events, rank = _events(Path(path))
    marks = sorted({event.interval for event in events if _PATTERN["step"].search(event.name) and not event.category.startswith("gpu")})
    if marks and steps is not None:
        raise InputError(f"{path}: marks its steps (ProfilerStep#N), so their number is known; leave out steps={steps}")
    steps_found, note = (marks, "") if marks else _unmarked_steps(path, events, steps)
    kernels = [event for event in events if event.category in _ON_DEVICE]
    busy = list(_by_kernel(kernels, events, steps_found, plan) if kernels else _by_operator(events, steps_found, plan))
    windows = _windows(steps_found, busy) if kernels else dict(enumerate(steps_found))
    if len(windows) > 1 + (not kernels):
        del windows[min(windows)]  # warm-up step
    number = steps if steps is not None else len(windows)
    names, seconds, overlapped = defaultdict[str, float](float), dict.fromkeys((*GROUPS, *HOST), 0.0), 0.0
    host_work = {group: [event.interval for event in _named(events, _ON_HOST, pattern)] for group, pattern in _HOST_EVENTS}
    waits = sorted(event.interval for event in _named(events, _LAUNCHES, _PATTERN["wait"]))
    for step, window in windows.items():
        groups = defaultdict[str, list[Interval]](list, host_work)
        for _, group, event in (entry for entry in busy if entry[0] == step):
            groups[group].append(event.interval)
            if group == "other_kernels":
                names[event.name] += event.end - event.start
        covered: list[Interval] = []
        for group in (*COMPUTE, *COMMUNICATION, "copies", *host_work):
            clipped = [(max(start, window[0]), min(end, window[1])) for start, end in groups[group]]
            group_intervals = _union(interval for interval in clipped if interval[1] > interval[0])
            before, covered = _length(covered), _union([*covered, *group_intervals])
            exposed = _length(covered) - before
            seconds[group] += exposed / number
            overlapped += (_length(group_intervals) - exposed) / number if group in COMMUNICATION else 0.0
        for (_, start), (end, _) in pairwise([(window[0], window[0]), *covered, (window[1], window[1])]):
            wait = waits[bisect_right(waits, (start, math.inf)) - 1] if waits else (math.inf, 0.0)
            seconds[HOST[2] if wait[0] <= start <= wait[1] + _AFTER_WAIT else HOST[3]] += (end - start) / number
    host = {name: max(seconds.pop(name), 0.0) for name in HOST}
    seconds["idle"] = sum(host.values())
    if not sum(seconds.values()) > 0:
        raise InputError(f"{path}: its steps take no time; profile whole steps, with prof.step() after each")
    if seconds["other_kernels"] > 0 and not any(seconds[group] for group in GROUPS if group not in ("other_kernels", "idle")):
        raise InputError(f"{path}: no kernel of it is known ({next(iter(names))} ...); trace the training step of a model")
    return MeasuredTrace(
        name=str(path),
        rank=rank,
        device="GPU" if kernels else "CPU",
        num_steps=number,
        step_time=sum(seconds.values()),
        groups=seconds,
        idle=host,
        overlapped=max(overlapped, 0.0),
        unknown=tuple(sorted(names, key=lambda name: -names[name])[:_MOST_NAMES]),
        note=note,
    )


def _named(events: Iterable[_Event], categories: Collection[str], pattern: re.Pattern[str]) -> list[_Event]:
    return [event for event in events if event.category in categories and pattern.search(event.name)]


def _unmarked_steps(path: str | Path, events: list[_Event], steps: int | None) -> tuple[list[Interval], str]:
    """Return the steps of a trace without marks, and a note on it: each ends with the optimizer's step, else the trace is one step."""
    work = [event for event in events if event.category in (*_ON_DEVICE, "cpu_op", *_LAUNCHES)]
    if not work:
        raise InputError(f"{path}: a trace without steps (ProfilerStep#N); call prof.step() after each step, and profile with a schedule")
    first, last = min(event.start for event in work), max(event.end for event in work)
    updates = _named(events, _ON_HOST, _PATTERN["update"])
    ends = sorted(event.end for event in updates if event.name == updates[0].name)
    if not ends:  # the launches of the optimizer's last fused kernels before each matmul, and of the very last one
        launched, launches = _launches(events), []
        for event in events:
            is_update = _PATTERN["fused_update"].search(event.name) is not None
            if event.category == "kernel" and (is_update or _group(event.name) == "matmul"):
                launches.append((launched.get(event.known.get("correlation"), event.start), is_update))
        pairs = pairwise([*sorted(launches), (math.inf, False)])
        ends = [time for (time, is_update), (_, is_next) in pairs if is_update and not is_next]
    if steps is None and len(ends) > 1:
        return list(pairwise([first, *ends])), f"no step is marked: read as {len(ends)} steps, each of which ends with the optimizer's"
    read = "one step" if steps is None else f"{steps} step{'s' * (steps > 1)}"
    return [(first, last)], f"no step is marked: the trace is read as {read}; mark steps with prof.step(), or give their number (--steps N)"


def _launches(events: list[_Event]) -> dict[Any, float]:
    """Return the start of the launch by the correlation id of its kernel."""
    return {event.known["correlation"]: event.start for event in events if event.category in _LAUNCHES and "correlation" in event.known}


def _events(path: Path) -> tuple[list[_Event], int]:
    """Return the slices of a trace and its rank, 0 where it has none; slices without a finite time are left out."""
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "is not JSON, or damaged"
        raise InputError(f"{path}: cannot be read as a trace ({reason}); write it with prof.export_chrome_trace") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise InputError(f"{path}: is no trace (traceEvents is missing); write it with prof.export_chrome_trace")
    events = []
    slices = [entry for entry in content["traceEvents"] if isinstance(entry, dict) and entry.get("ph") == "X"]
    stamps = (entry.get("ts") for entry in slices)
    first = min((time for time in stamps if isinstance(time, (int, float)) and math.isfinite(time)), default=0.0)  # 1970 in old traces
    for entry in slices:
        start, length, arguments = entry.get("ts"), entry.get("dur"), entry.get("args")
        if isinstance(start, (int, float)) and isinstance(length, (int, float)) and math.isfinite(start) and 0 <= length < math.inf:
            times = ((start - first) * _MICROSECOND, (start - first + length) * _MICROSECOND)
            if not isinstance(arguments, dict) or not isinstance(arguments.get("correlation", 0), int | str):
                arguments = {}
            category, thread = str(entry.get("cat", "")), (entry.get("pid"), entry.get("tid"))
            category = TRACE_NAMES["old_categories"].get(category, category)
            events.append(_Event(category, str(entry.get("name", "")), *times, thread, arguments))
    info = content.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else 0
    return events, rank if isinstance(rank, int) and rank >= 0 else 0


def _step_of(time: float, steps: list[Interval]) -> int | None:
    index = bisect_right(steps, (time, math.inf)) - 1
    return index if index >= 0 and time <= steps[index][1] else None


def _by_kernel(kernels: list[_Event], events: list[_Event], steps: list[Interval], plan: Plan | None) -> Iterator[tuple[int, str, _Event]]:
    """Yield kernels with their step and group; a kernel launched in the optimizer's step belongs to the optimizer."""
    launched = _launches(events)
    updates = _union(event.interval for event in _named(events, _ON_HOST, _PATTERN["update"]))
    for kernel in kernels:
        launch = launched.get(kernel.known.get("correlation"), -math.inf)
        step = _step_of(kernel.start if launch == -math.inf else launch, steps)
        if step is not None:
            group = "copies" if kernel.category != "kernel" else _collective_group(kernel, plan)
            yield step, group or ("optimizer" if _step_of(launch, updates) is not None else _group(kernel.name) or "other_kernels"), kernel


def _by_operator(events: list[_Event], steps: list[Interval], plan: Plan | None) -> Iterator[tuple[int, str, _Event]]:
    """Yield operators of a CPU, without those that they call, with step and group; those of the optimizer's step belong to it."""

    def is_operator(event: _Event) -> object:
        return event.category == "cpu_op" or _PATTERN["update"].search(event.name) or _PATTERN["collective"].match(event.name)

    for thread in grouped(filter(is_operator, events), lambda event: event.thread).values():
        stack: list[tuple[_Event, str]] = []
        now = -math.inf
        for operator in [*sorted(thread, key=lambda event: (event.start, -event.end)), _Event("", "", math.inf, math.inf, (0, 0), {})]:
            while stack:
                top, group = stack[-1]
                piece = replace(top, start=max(now, top.start), end=min(top.end, operator.start))  # without the operators that it calls
                step = _step_of(piece.start, steps)
                if group and piece.end > piece.start and step is not None:
                    yield step, group, piece
                now = max(now, piece.end)
                if top.end > operator.start:
                    break
                stack.pop()
            now = max(now, operator.start)
            above = stack[-1][1] if stack else ""
            group = _collective_group(operator, plan) or _group(operator.name)
            group = group or ("elementwise" if operator.name.startswith("aten::") else above)
            if above in ("optimizer", "attention"):
                group = above
            elif operator.name in TRACE_NAMES["copies"]:
                group = "copies"
            stack.append((operator, group))


def _group(name: str) -> str:
    return next((group for group, pattern in _GROUPS if pattern.search(name)), "")


def _collective_group(event: _Event, plan: Plan | None) -> str:
    """Return the class of a collective, by its process group, else by its kind and the plan's axes; empty for other kernels."""
    if not _PATTERN["collective"].match(event.name):
        return ""
    described = str(event.known.get("Process Group Description", ""))
    axis = next((group for group, pattern in _AXES if pattern.search(described)), "")
    if axis:
        return axis
    kind = f"{event.name} {event.known.get('Collective name', '')}".lower().replace("_", "")
    if not described and plan is not None:
        size, degrees = event.known.get("Group size"), (plan.layout.tp, plan.layout.cp, plan.ep, plan.layout.pp)
        matching = [group for group, degree in zip(COMMUNICATION, degrees, strict=False) if degree > 1 and size in (degree, None)]
        is_data = plan.layout.data_parallel == size if size else plan.layout.data_parallel > 1
        if len(matching) == 1 and not is_data:
            return matching[0]
    if "sendrecv" in kind or "alltoall" in kind or kind.split(":")[-1].strip() in ("send", "recv"):
        return COMMUNICATION[3] if plan is not None and plan.layout.pp > 1 and "alltoall" not in kind else COMMUNICATION[2]
    return "parameter_gather" if "gather" in kind or "broadcast" in kind else "gradient_reduction"


def _windows(steps: list[Interval], busy: Iterable[tuple[int, str, _Event]]) -> dict[int, Interval]:
    """Return the window of each step with a successor: from its first kernel to that of the next. For one step, the host's window."""
    by_step = grouped(busy, itemgetter(0))
    first = {step: min(event.start for _, _, event in entries) for step, entries in by_step.items()}
    last = {step: max(event.end for _, _, event in entries) for step, entries in by_step.items()}
    windows = {step: (first[step], first[step + 1]) for step in first if step + 1 in first and first[step + 1] > first[step]}
    return windows or {step: (steps[step][0], max(steps[step][1], last.get(step, 0.0))) for step in [len(steps) - 1]}


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
