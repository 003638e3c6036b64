"""The verb `sweep`, for Python: a study's points computed by several processes, stored as they finish, and written as one table.

    import perfmodel

    found = perfmodel.run_sweep("study.yaml", out="results.parquet")
    print(found.to_frame().groupby("cluster").step_time.min())

Next to the table is its folder of parts, `results.parquet.parts`: each process appends a line for a point as soon as it is computed, under
a hash of the point and of the data. A sweep that was interrupted, or whose study has changed, computes the points without such a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, RunError, bad_field
from perfmodel.foundation.frames import data_frame, parquet_of
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.resources import check_can_be_written, resource_dir, write_atomically
from perfmodel.foundation.values import check_path, is_path, read_integer
from perfmodel.hardware.reader import user_calibrations_dir
from perfmodel.report.document import csv_text
from perfmodel.verbs.processes import DASK, LOCAL, follow, number_of_cores, run_batches
from perfmodel.verbs.study import INTERNAL, Study, SweptVerb, cell, column_of, failure_of, read_study, rows_of, words_of_verb

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame

#: Fields that do not change the compiled programs of a job: points that differ only in these are computed by one process.
_ALIKE = (
    *("cluster", "chips", "nodes", "global_batch", "batch_tokens", "concurrency", "rate", "calibration"),
    *("tp", "pp", "cp", "micro_batch"),
)
_MOST_TOGETHER = 16  # largest batch of points of a process
_BATCHES_PER_JOB = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SweepResult:
    """Rows of every point of a study, in its order: SI units, `point` numbers the points, `reason` explains a missing result.

    num_computed   points computed by this call; the others were stored before
    failures       reasons of points without a result, a sentence for each
    work_time      of the points themselves, on all processes of all calls   [s]
    """

    study: Study
    rows: tuple[dict[str, Any], ...]
    num_computed: int
    failures: tuple[str, ...]
    work_time: float

    def to_frame(self) -> DataFrame:
        """Return the rows as a data frame."""
        return data_frame(self.rows)


def run_sweep(
    study: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    engine: str = LOCAL,
    progress: Callable[[float, str], object] | None = None,
) -> SweepResult:
    """Compute every point of a study: a file (docs/how-to/sweep.md), a shipped study by its name, or its fields as a mapping.

    out       the table, .parquet or .csv; computed points are stored next to it, so that the next call resumes. None: nothing is written
    jobs      processes; None: one for each core
    engine    local; dask: a dask cluster of this machine; dask:ADDRESS: the cluster of the scheduler at this address
    progress  called with the finished share, and a text with points, rate and failures
    """
    wanted = read_study(study)
    if out is not None:  # checked before anything is computed
        check_path(out, "out")
        check_can_be_written(out, "out", endings=".parquet .csv", rule=".parquet or .csv", remedy="write --out results.parquet")
        if Path(out).suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
            raise bad_field("out", out, "Parquet files need pyarrow", "install perfmodel[sweep], or write results.csv")
    jobs = _check_engine(engine, None if jobs is None else read_integer(jobs, "jobs"))
    points = list(wanted.points())
    version = data_version()
    files: dict[str, str] = {}
    keys = [_key(wanted.verb, point, version, files) for point in points]
    folder = None if out is None else Path(f"{out}.parts")
    with _stored(folder, set(keys)) as known:
        missing = {key: point for key, point in zip(keys, points, strict=True) if key not in known}
        start, num_failed = time.monotonic(), 0
        records = _computed(missing, wanted.verb, version, folder, jobs=jobs, engine=engine)
        for number, record in enumerate(records, 1):
            known[record["key"]] = record
            num_failed += bool(failure_of(record["rows"]))
            if progress is not None:
                rate = number / max(time.monotonic() - start, 1e-9)
                done = f"{len(points) - len(missing) + number:,} of {len(points):,} points, {rate:,.2g} a second, {num_failed:,} failed"
                progress(number / len(missing), done)
        words = words_of_verb(wanted.verb)
        rows: list[dict[str, Any]] = []
        for number, (key, point) in enumerate(zip(keys, points, strict=True)):
            given = {column_of(wanted.verb, name): cell(name, point[name], words[name]) for name in (*wanted.varied, *wanted.fixed)}
            rows += ({"point": number, **given, **row, "seconds": known[key]["seconds"]} for row in known[key]["rows"])
        work = sum(known[key]["seconds"] for key in dict.fromkeys(keys))
        failures = tuple(filter(None, (failure_of(known[key]["rows"]) for key in keys)))
        result = SweepResult(study=wanted, rows=tuple(rows), num_computed=len(missing), failures=failures, work_time=work)
        if out is not None:
            write_atomically(out, parquet_of(rows) if Path(out).suffix.lower() == ".parquet" else csv_text(rows))
    return result


def _check_engine(engine: str, jobs: int | None) -> int:
    """Return the number of processes. Raises InputError for an engine that is unknown or not installed."""
    name, colon, address = str(engine).partition(":")
    if name not in (LOCAL, DASK) or (colon and (name == LOCAL or not address)):
        raise bad_field("engine", engine, f"must be {LOCAL}, {DASK} or {DASK}:ADDRESS", f"write {DASK}:tcp://host:8786")
    if name == DASK and not (find_spec("distributed") and find_spec("joblib")):
        raise bad_field("engine", engine, "dask is not installed", "install perfmodel[dask], or leave the engine out")
    if name == LOCAL and jobs != 1 and not find_spec("joblib"):
        raise InputError("jobs: several processes need joblib; install perfmodel[sweep], or give jobs 1")
    return number_of_cores() if jobs is None else jobs


# --- Parts: a line for each computed point ---------------------------------------------------------------------------


def data_version() -> str:
    """Return a digest of the inputs of a result other than the point: code, shipped data, and calibrations of this user, read again."""
    return _digest_of(user_calibrations_dir(), start=_shipped_digest())


@cache
def _shipped_digest() -> str:
    return _digest_of(Path(__file__).resolve().parents[1], resource_dir("hardware_specs"), resource_dir("strategies"))


def _digest_of(*folders: Path, start: str = "") -> str:
    digest = hashlib.sha256(start.encode())
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".yaml", ".json", ".tsv", ".csv") and path.is_file():
                digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _key(verb: SweptVerb, point: Mapping[str, Any], version: str, files: dict[str, str]) -> str:
    """Return a hash of a point, of the files that it names and of the data. files: cache of file hashes."""
    for value in point.values():
        if isinstance(value, str) and value not in files:
            files[value] = hashlib.sha256(Path(value).read_bytes()).hexdigest() if is_path(value) and Path(value).is_file() else ""
    named = [files[value] for value in point.values() if isinstance(value, str)]
    return hashlib.sha256(json.dumps([verb, sorted(point.items()), named, version]).encode()).hexdigest()


@contextmanager
def _stored(folder: Path | None, wanted: set[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """Create and lock the folder of parts, for one sweep at a time; yield its records of these keys, without internal errors."""
    if folder is None:
        yield {}
        return
    import fcntl

    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        raise bad_field("out", folder, f"cannot be made ({error.strerror})", "choose another path") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone, unlike flock: not of its workers
        records: dict[str, dict[str, Any]] = {}
        for line in (line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()):
            with suppress(ValueError):  # an unfinished line of a killed process
                record = json.loads(line)
                if isinstance(record, dict) and record.get("key") in wanted and not failure_of(record["rows"]).startswith(INTERNAL):
                    records[record["key"]] = record
        yield records
    except BlockingIOError:
        raise bad_field("out", folder.stem, "another sweep is writing it", "wait for it or choose another path") from None
    finally:
        os.close(lock)


def _append(folder: Path, lines: Iterable[str]) -> None:
    """Append to this process's part. Each line starts with a newline, because the previous one may be unfinished."""
    try:
        with open(folder / f"{socket.gethostname()}-{os.getpid()}.jsonl", "ab", buffering=0) as part:
            for line in lines:
                part.write(f"\n{line}\n".encode())
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); free some space and run the sweep again") from error


# --- Processes -------------------------------------------------------------------------------------------------------

_Batch = list[tuple[str, dict[str, Any]]]


def _computed(
    missing: Mapping[str, dict[str, Any]], verb: SweptVerb, version: str, folder: Path | None, *, jobs: int, engine: str
) -> Iterator[dict[str, Any]]:
    """Yield the record of each point, in the order of completion. On one machine the process that computes a point stores it."""
    # a batch has neighbouring points, which share the compiled programs of a job
    groups = grouped(missing.items(), lambda entry: json.dumps({name: entry[1][name] for name in sorted(entry[1].keys() - {*_ALIKE})}))
    size = 1 if engine == LOCAL and jobs == 1 else min(max(len(missing) // (_BATCHES_PER_JOB * jobs), 1), _MOST_TOGETHER)
    batches = [group[first : first + size] for group in groups.values() for first in range(0, len(group), size)]
    kept_in = folder if engine == LOCAL else None
    compute = partial(_compute, verb=verb, version=version, folder=kept_in)
    when_killed = "computed points are kept; run the sweep again with fewer"
    for records in run_batches(compute, batches, jobs=jobs, engine=engine, when_killed=when_killed):
        if folder is not None and kept_in is None:
            _append(folder, map(json.dumps, records))
        yield from records


def _compute(batch: _Batch, verb: SweptVerb, version: str, folder: Path | None, *, parent: int = 0) -> list[dict[str, Any]]:
    """Return the records of points. parent: the process that started this one, which may be killed; 0: none."""
    if data_version() != version:
        rule = "has another version of perfmodel, its data or calibrations"
        raise RunError(f"{socket.gethostname()}: {rule}; install the same on all machines")
    lines = []
    for key, point in batch:
        follow(parent)
        start = time.perf_counter()
        rows = rows_of(verb, point)
        record = {"key": key, "seconds": time.perf_counter() - start, "rows": rows}
        lines.append(json.dumps(record, default=lambda value: value.item()))
        if folder is not None:
            _append(folder, lines[-1:])
    return [json.loads(line) for line in lines]
