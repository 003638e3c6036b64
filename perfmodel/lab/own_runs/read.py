"""Files of measured runs, of whatever kind, as rows: tables (CSV), JSON lines, logs of training frameworks, profiler traces.

Which kind a file is its beginning tells, whatever its name.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from perfmodel.foundation.errors import InputError, one_line, shown
from perfmodel.foundation.files import open_input
from perfmodel.foundation.values import check_path
from perfmodel.lab.own_runs.columns import Row, is_beside, name_of
from perfmodel.lab.own_runs.logs import row_of_log
from perfmodel.lab.own_runs.trace import is_trace, row_of_trace
from perfmodel.parallel.plan import Plan

MAX_FILE_BYTES = 512 * 2**20
"""Of a file, unpacked: a profiler's trace of a few steps has hundreds of megabytes."""

_MOST_RUNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """What a file holds.

    unread      columns that mean nothing here
    needs_plan  it gives times only, as logs and traces do
    notes       what a person should know of it, as sentences
    """

    rows: Sequence[Row]
    unread: tuple[str, ...] = ()
    needs_plan: bool = False
    notes: tuple[str, ...] = ()

    def planned(self, plan: Plan) -> RunFile:
        """With the plan that the file does not say."""
        return replace(self, rows=[row.over({"plan": plan}) for row in self.rows])


def read_rows(path: str | Path) -> RunFile:
    """The runs of a file."""
    check_path(path, "runs")
    content = _content(path)
    start = content[: 2**16].lstrip(b"\xef\xbb\xbf \t\r\n")
    name = Path(path).name
    if not start:
        raise InputError(f"{one_line(path, 200)}: is empty; give measured runs as CSV, JSON lines, a log or a profiler's trace")
    if start[:1] in b"{[" and is_trace(start):
        found = _bare(*row_of_trace(content, name))
    elif re.match(rb'\{\s*["}\]]|\{$', start):  # a dictionary that Python prints has other quotes
        found = _json_lines(_text(content, path), name)
    else:
        found = _table_or_log(content, path, name)
    if len(found.rows) > _MOST_RUNS:
        raise InputError(f"{one_line(path, 200)}: holds {len(found.rows):,} runs; give at most {_MOST_RUNS:,}")
    return found


def rows_of(values: Mapping[str, Any], place: str) -> RunFile:
    """A run that a program describes itself."""
    unread: dict[str, None] = {}
    row = Row(place=place, values=_measurement(values) or _named(values, unread, place))
    return RunFile(rows=(row,), unread=tuple(unread))


def _content(path: str | Path) -> bytes:
    """All of a file, unpacked where it is packed."""
    try:
        with open_input(path) as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if content[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{one_line(path, 200)}: cannot be read ({one_line(reason)}); give a file of measured runs") from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{one_line(path, 200)}: larger than {MAX_FILE_BYTES >> 20} MiB; give a shorter one")
    return content


def _text(content: bytes, path: str | Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{one_line(path, 200)}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _bare(row: Row, told: str) -> RunFile:
    """Of a file that gives times only."""
    return RunFile(rows=(row,), needs_plan=True, notes=(told,))


def _table_or_log(content: bytes, path: str | Path, name: str) -> RunFile:
    """A table's first line names columns that are known, and a log's does not."""
    heading = _heading(content[: 2**16].decode("utf-8-sig", "replace"))
    cells = re.split(r"[,;\t]", heading)
    if sum(bool(name_of(cell)) for cell in cells) >= min(len(cells), 2):
        return _table(_text(content, path), name, separator=max(",;\t", key=heading.count))
    found = row_of_log(content.decode("utf-8", "replace"), name)
    if found is None:
        table = "a table whose first line names the columns, such as model,chip,chips,tp,dp,global_batch,seq_len,step_time"
        logs = "a log with the steps of torchtitan, Megatron-LM, nanotron, DeepSpeed or HF Trainer"
        raise InputError(f"{one_line(path, 200)}: holds no step; give {table}, JSON lines, {logs}, or a trace of torch's profiler")
    return _bare(*found)


def _json_lines(text: str, name: str) -> RunFile:
    rows: list[Row] = []
    unread: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{name} line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not a JSON object ({one_line(str(error), 120)}); write one run a line") from None
        if not isinstance(data, dict):
            raise InputError(f"{place}: must be a JSON object, not a {type(data).__name__}; write one run a line")
        rows.append(Row(place=place, values=_measurement(data) or _named(data, unread, place)))
    return RunFile(rows=rows, unread=tuple(unread))


def _measurement(data: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `perfmodel run --save`; nothing of any other object."""
    if not isinstance(data.get("plan"), Mapping) or "plan_hash" not in data:
        return {}
    return {name: data[name] for name in ("plan", "device", "step_time") if name in data}


def _heading(text: str) -> str:
    """The first line that says something."""
    return next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")


def _table(text: str, name: str, *, separator: str) -> RunFile:
    reader = csv.reader(io.StringIO(text), delimiter=separator)
    columns: list[str] = []
    rows: list[Row] = []
    unread: dict[str, None] = {}
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells) or cells[0].startswith("#"):
                continue
            place = f"{name} line {reader.line_num}"
            if not columns:
                columns = [cell.strip() for cell in cells]
                continue
            if len(cells) != len(columns):
                raise InputError(f"{place}: has {len(cells)} cells under {len(columns)} columns; correct the line")
            values = {column: cell.strip() for column, cell in zip(columns, cells, strict=True) if cell.strip()}
            rows.append(Row(place=place, values=_named(values, unread, place)))
    except csv.Error as error:
        raise InputError(f"{name} line {reader.line_num}: no table ({error}); correct the line") from None
    return RunFile(rows=rows, unread=tuple(unread))


def _named(data: Mapping[str, Any], unread: dict[str, None], place: str) -> dict[str, Any]:
    """The values under the names that they have here."""
    values: dict[str, Any] = {}
    for column, value in data.items():
        if value is None or value == "":
            continue
        name = name_of(str(column))
        if not name:
            if not is_beside(str(column)):
                unread[one_line(column, 40)] = None
            continue
        if name in values and values[name] != value:
            raise InputError(f"{place}: {one_line(column, 40)}={shown(value)}: says {name}, which another column says too; keep one")
        values[name] = cast(Any, value)
    return values
