"""Files of measured runs as rows: tables (CSV), JSON lines, logs of training frameworks, profiler traces, memory snapshots.

The kind of a file is determined by its first bytes, independent of its name.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from perfmodel.fitting.columns import Row
from perfmodel.fitting.logs import is_trace, row_of_log, row_of_trace
from perfmodel.fitting.memory_snapshot import is_snapshot, read_snapshot
from perfmodel.fitting.schemas import MeasuredRunFile, is_extra, name_of
from perfmodel.foundation.errors import InputError, one_line, shown
from perfmodel.foundation.files import open_input
from perfmodel.foundation.schema import check
from perfmodel.foundation.values import check_path
from perfmodel.parallel.plan import Plan

MAX_FILE_BYTES = 512 * 2**20
"""Limit of a decompressed file: a profiler trace of a few steps has hundreds of megabytes."""

_MAX_TABLE_BYTES, _MAX_LINE_BYTES = 64 * 2**20, 2**20
"""Limits of decompressed tables and JSON lines: 10,000 runs with their plans are smaller."""

_START_BYTES = 2**16
_MOST_RUNS, _MOST_LINES = 10_000, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """Contents of a file of runs.

    unread      unknown columns
    needs_plan  it gives times only, as logs and traces do
    notes       notes for the user, as sentences
    """

    rows: Sequence[Row]
    unread: tuple[str, ...] = ()
    needs_plan: bool = False
    notes: tuple[str, ...] = ()

    def planned(self, plan: Plan) -> RunFile:
        """Return the file with the plan that it lacks."""
        return replace(self, rows=[row.over({"plan": plan}) for row in self.rows])


def read_rows(path: str | Path) -> RunFile:
    """Read the runs of a file."""
    check_path(path, "runs")
    if is_snapshot(path):
        memories = read_snapshot(path)
        row = Row(
            location=Path(path).name, values={"id": Path(path).name, "peak_memory": float(max(memory.most_reserved for memory in memories))}
        )
        return RunFile(rows=(row,), needs_plan=True)
    try:
        with open_input(path) as opened:
            buffered = cast(io.BufferedReader, opened)
            is_packed = buffered.peek(2)[:2] == b"\x1f\x8b"
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=buffered)) if is_packed else opened
            return _rows(_Content(stream=stream, path=path), Path(path).name)
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{one_line(path, 200)}: cannot be read ({one_line(reason)}); give a file of measured runs") from None


@dataclass(slots=True)
class _Content:
    """A file that is read in pieces; its kind is determined by the first piece.

    most   bytes after which it is refused
    """

    stream: BinaryIO
    path: str | Path
    start: bytes = b""
    most: int = MAX_FILE_BYTES

    def __post_init__(self) -> None:
        while len(self.start) < _START_BYTES and (piece := self.stream.read(_START_BYTES)):
            self.start += piece

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes from the start."""
        piece, total = self.start, 0
        while piece:
            total += len(piece)
            if total > self.most:
                raise InputError(f"{one_line(self.path, 80)}: larger than {self.most >> 20} MiB; give a shorter one")
            yield piece
            piece = self.stream.read(2**20)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines with their ends; a line longer than the limit is split."""
        rest = b""
        for piece in self.pieces():
            complete, end, rest = (rest + piece).rpartition(b"\n")
            yield from (line + b"\n" for line in complete.split(b"\n")) if end else ()
            if len(rest) > _MAX_LINE_BYTES:
                yield rest + b"\n"
                rest = b""
        if rest:
            yield rest

    def text_lines(self) -> Iterator[str]:
        """Yield the lines of a table or of JSON lines, decoded as UTF-8."""
        self.most, offset = _MAX_TABLE_BYTES, 0
        for number, line in enumerate(self.lines(), 1):
            if number > _MOST_LINES:
                raise InputError(f"{one_line(self.path, 80)}: has more than {_MOST_LINES:,} lines; write one run a line")
            if len(line) > _MAX_LINE_BYTES:
                raise InputError(f"{one_line(self.path, 80)} line {number}: longer than {_MAX_LINE_BYTES >> 20} MiB; write one run a line")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 text (byte {offset + error.start})"
                raise InputError(f"{one_line(self.path, 200)}: {reason}; save it as UTF-8") from None
            offset += len(line)


def _rows(content: _Content, name: str) -> RunFile:
    start = content.start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        raise InputError(f"{one_line(content.path, 200)}: is empty; give measured runs as CSV, JSON lines, a log or a profiler's trace")
    if start[:1] in b"{[" and is_trace(start):
        return _times_only(*row_of_trace(b"".join(content.pieces()), name))
    if re.match(rb'\{\s*["}\]]|\{$', start):  # the repr of a Python dictionary has other quotes
        return _json_lines(content, name)
    heading = next((line for line in content.start.decode("utf-8-sig", "replace").splitlines() if line.strip() and line[0] != "#"), "")
    cells = re.split(r"[,;\t]", heading)
    if sum(bool(name_of(cell)) for cell in cells) >= min(len(cells), 2):  # known names of columns
        return _table(content, name, separator=max(",;\t", key=heading.count))
    log_run = row_of_log(content.lines(), name)
    if log_run is None:
        table = "a table with a line of column names (model,chip,chips,tp,step_time)"
        raise InputError(
            f"{one_line(content.path, 200)}: holds no step; give {table}, JSON lines, a framework's log or a torch profiler trace"
        )
    return _times_only(*log_run)


def _check_number(rows: Sequence[Row], content: _Content) -> None:
    if len(rows) > _MOST_RUNS:
        raise InputError(f"{one_line(content.path, 80)}: holds more than {_MOST_RUNS:,} runs; give at most that many")


def rows_of(values: Mapping[str, Any], location: str) -> RunFile:
    """Return the run of a mapping that a program passes."""
    unread: dict[str, None] = {}
    row = Row(location=location, values=_measurement(values) or _named(values, unread, location))
    return RunFile(rows=(row,), unread=tuple(unread))


def _times_only(row: Row, note: str) -> RunFile:
    """Return the contents of a file that gives times only."""
    return RunFile(rows=(row,), needs_plan=True, notes=(note,))


def _json_lines(content: _Content, name: str) -> RunFile:
    rows: list[Row] = []
    unread: dict[str, None] = {}
    for number, line in enumerate(content.text_lines(), 1):
        if not line.strip():
            continue
        location = f"{name} line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{location}: not a JSON object ({one_line(str(error), 120)}); write one run a line") from None
        if not isinstance(data, dict):
            raise InputError(f"{location}: must be a JSON object, not a {type(data).__name__}; write one run a line")
        rows.append(Row(location=location, values=_measurement(data) or _named(data, unread, location)))
        _check_number(rows, content)
    return RunFile(rows=rows, unread=tuple(unread))


def _measurement(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line of `perfmodel run --save`; empty for any other object."""
    if not isinstance(data.get("plan"), Mapping) or "plan_hash" not in data:
        return {}
    return {name: data[name] for name in ("plan", "device", "step_time") if name in data}


def _table(content: _Content, name: str, *, separator: str) -> RunFile:
    reader = csv.reader(content.text_lines(), delimiter=separator)
    columns: list[str] = []
    rows: list[Row] = []
    unread: dict[str, None] = {}
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells) or cells[0].startswith("#"):
                continue
            location = f"{name} line {reader.line_num}"
            if not columns:
                columns = [cell.strip() for cell in cells]
                for column in filter(None, columns):
                    if columns.count(column) > 1:  # the last would replace the first without notice
                        raise InputError(f"{location}: two columns are called {one_line(column, 40)}; keep one of them")
                continue
            if len(cells) != len(columns):
                raise InputError(f"{location}: has {len(cells)} cells under {len(columns)} columns; correct the line")
            values = {column: cell.strip() for column, cell in zip(columns, cells, strict=True) if cell.strip()}
            rows.append(Row(location=location, values=_named(values, unread, location)))
            _check_number(rows, content)
    except csv.Error as error:
        raise InputError(f"{name} line {reader.line_num}: no table ({error}); correct the line") from None
    return RunFile(rows=rows, unread=tuple(unread))


def _named(data: Mapping[str, Any], unread: dict[str, None], location: str) -> dict[str, Any]:
    """Return the checked values by their standard names."""
    values: dict[str, Any] = {}
    for column, value in data.items():
        if value is None or value == "":
            continue
        name = name_of(str(column))
        if not name:
            if not is_extra(str(column)):
                unread[one_line(column, 40)] = None
            continue
        if name in values and values[name] != value:
            raise InputError(f"{location}: {one_line(column, 40)}={shown(value)}: says {name}, which another column says too; keep one")
        values[name] = value
    check(MeasuredRunFile, {name: value for name, value in values.items() if not name.startswith("settings.")}, where=location)
    return values
