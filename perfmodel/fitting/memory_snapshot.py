"""Read a memory snapshot of torch (`torch.cuda.memory._dump_snapshot`): the peak of its allocator and the code that allocated it.

The file is a pickle of dicts, lists, strings and numbers. It is read without torch, and nothing in it is executed: a pickle that names any
class or function is refused. The history is replayed backwards from the state at the snapshot. So the peak is found even if the start of
the history was dropped. Format: docstring of `torch.cuda.memory._snapshot`, torch 2.13.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.units import format_bytes
from perfmodel.parallel.measured import AllocationSite, MeasuredMemory

MOST_FILE_BYTES = 1 << 30
_MOST_BYTES = 1 << 53  # upper bound of a valid block
_BLOCKS = {"alloc": 1, "free_completed": -1}
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_RECORD = "write it with torch.cuda.memory._dump_snapshot"
_NO_FRAME, _BEFORE = "no Python frame (such as the backward pass)", "before the history begins"


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of builtin containers, strings and numbers; refuses everything that would be imported or called."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded")


def is_snapshot(path: str | Path) -> bool:
    """Return whether a file is a pickle, by its name or its first byte."""
    if Path(path).suffix in (".pickle", ".pkl"):
        return True
    try:
        with Path(path).open("rb") as stream:
            return stream.read(1) == pickle.PROTO
    except OSError:
        return False


def read_snapshot(path: str | Path) -> tuple[MeasuredMemory, ...]:
    """Return the peak of each device that has memory in a snapshot. Raises InputError."""
    path = Path(path)
    try:
        size = path.stat().st_size
        content = _PlainUnpickler(io.BytesIO(path.read_bytes())).load() if size <= MOST_FILE_BYTES else None
    except Exception as error:  # a damaged pickle raises almost any error
        reason = error.strerror if isinstance(error, OSError) else error if isinstance(error, pickle.UnpicklingError) else "damaged"
        raise InputError(f"{path}: cannot be read as a memory snapshot ({reason}); {_RECORD}") from None
    if size > MOST_FILE_BYTES:
        rule = f"is {format_bytes(size)}, and at most {format_bytes(MOST_FILE_BYTES)} are read"
        raise InputError(f"{path}: {rule}; record fewer events with _record_memory_history(max_entries=100000)")
    if not isinstance(content, dict):
        raise _damaged(path, "segments")
    segments = grouped(_dicts(content, "segments", path), lambda segment: _number(segment, "device", path, missing=0))
    histories = content.get("device_traces", [])
    if not isinstance(histories, list):
        raise _damaged(path, "device_traces")
    events = {device: _dicts({"device_traces": history}, "device_traces", path) for device, history in enumerate(histories) if history}
    peaks = [_peak(path, device, segments.get(device, []), events.get(device, [])) for device in sorted({*segments, *events})]
    if not any(memory.allocated for memory in peaks):
        raise InputError(f"{path}: a snapshot without allocated memory; take it after a step, on the process that trains")
    return tuple(memory for memory in peaks if memory.allocated)


def _peak(path: Path, device: int, segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> MeasuredMemory:
    """Replay the events of a device backwards: first their sizes to find the peak, then the blocks that are live at it."""
    live: dict[int, tuple[int, list[Any] | None]] = {}
    for segment in segments:
        for block in _dicts(segment, "blocks", path):
            if str(block.get("state", "")).startswith("active"):
                size = _number(block, "requested_size", path, missing=block.get("size"))
                live[_number(block, "address", path, missing=-len(live) - 1, least=None)] = (size, block.get("frames") or [])
    allocated = most = sum(size for size, _ in live.values())
    reserved = at_peak = most_reserved = sum(_number(segment, "total_size", path) for segment in segments)
    peak, refused = len(events), 0
    for index, event in reversed(list(enumerate(events))):
        action, size = str(event.get("action")), _number(event, "size", path, missing=0)
        allocated -= _BLOCKS.get(action, 0) * size
        reserved -= _SEGMENTS.get(action, 0) * size
        refused = refused or (size if action == "oom" else 0)
        most_reserved = max(most_reserved, reserved)
        if allocated > most:
            peak, most, at_peak = index, allocated, reserved
        if action in _BLOCKS:
            _number(event, "addr", path, least=None)
    for event in reversed(events[peak:]):
        if event.get("action") == "alloc":
            live.pop(event["addr"], None)
        elif event.get("action") == "free_completed":
            live[event["addr"]] = (event["size"], None)
    allocations = {event["addr"]: event for event in events[:peak] if event.get("action") == "alloc"}
    sites = defaultdict[str, list[int]](list)
    for address, (size, frames) in live.items():
        if frames is None and address in allocations:
            size, frames = allocations[address]["size"], allocations[address].get("frames") or []
        sites[_BEFORE if frames is None else _site(frames)].append(size)
    counted = [AllocationSite(where=where, num_blocks=len(sizes), num_bytes=sum(sizes)) for where, sizes in sites.items()]
    return MeasuredMemory(
        name=str(path),
        device=device,
        num_events=len(events),
        allocated=most,
        reserved=at_peak,
        most_reserved=most_reserved,
        sites=tuple(sorted(counted, key=lambda site: -site.num_bytes)),
        refused=refused,
    )


def _site(frames: object) -> str:
    """Return the innermost frame of Python code outside torch, else the innermost of torch."""
    first = ""
    for frame in frames if isinstance(frames, list) else []:
        if isinstance(frame, dict) and str(frame.get("filename", "")).endswith(".py"):
            parts = str(frame["filename"]).replace("\\", "/").split("/")
            where = f"{'/'.join(parts[-2:])}:{frame.get('line')} {frame.get('name')}"
            if "torch" not in parts[:-1]:
                return where
            first = first or where
    return first or _NO_FRAME


def _dicts(of: Mapping[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    entries = of.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _damaged(path, key)
    return entries


def _number(of: Mapping[str, Any], key: str, path: Path, *, missing: object = None, least: int | None = 0) -> int:
    number = of.get(key, missing)
    if isinstance(number, bool) or not isinstance(number, int) or (least is not None and not least <= number <= _MOST_BYTES):
        raise _damaged(path, key)
    return number


def _damaged(path: Path, key: str) -> InputError:
    return InputError(f"{path}: is no memory snapshot ({key} is missing or damaged); {_RECORD}")
