"""Batches of independent work on several processes of one machine, or of a dask cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from ctypes import CDLL
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from perfmodel.foundation.errors import RunError, bad_field, one_line
from perfmodel.foundation.session import Session

_Result = TypeVar("_Result")

LOCAL, DASK = "local", "dask"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_batches(
    compute: Callable[..., _Result], batches: Iterable[Any], *, jobs: int, engine: str = LOCAL, when_killed: str
) -> Iterator[_Result]:
    """Yield `compute(batch, parent=...)` for each batch, in the order of completion; it calls `follow`. One local job is this process.

    jobs          processes
    engine        local; dask: a dask cluster of this machine; dask:ADDRESS: the cluster of the scheduler at this address
    when_killed   rest of the message for a process that was killed, with the remedy
    """
    if engine == LOCAL and jobs == 1:
        yield from (compute(batch, parent=0) for batch in batches)
        return
    # copying is safe in a process without other threads
    is_copied = engine == LOCAL and sys.platform == "linux" and threading.active_count() == 1
    try:
        yield from (_forked(compute, batches, jobs) if is_copied else _by_joblib(compute, batches, jobs, engine))
    except BrokenProcessPool as error:
        raise RunError(f"jobs={jobs}: a process was killed, perhaps for want of memory; {when_killed}") from error


def _by_joblib(compute: Callable[..., _Result], batches: Iterable[Any], jobs: int, engine: str) -> Iterator[_Result]:
    """Yield the results of batches from new processes of this machine, or from dask."""
    from joblib import Parallel, delayed, parallel_config

    client: Any = nullcontext()
    if engine != LOCAL:
        from distributed import Client

        address = engine.partition(":")[2]
        try:
            client = Client(address, timeout=10) if address else Client(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
        except (OSError, ValueError) as error:
            rule = f"no dask scheduler answers ({one_line(error)})"
            raise bad_field("engine", engine, rule, "start it with `dask scheduler`, or correct the address") from error
    backend, num_processes, parent = ("loky", jobs, os.getpid()) if engine == LOCAL else ("dask", -1, 0)
    with client, parallel_config(backend=backend):
        run = Parallel(n_jobs=num_processes, return_as="generator_unordered", batch_size=1)
        yield from run(delayed(compute)(batch, parent=parent) for batch in batches)


def _forked(compute: Callable[..., _Result], batches: Iterable[Any], jobs: int) -> Iterator[_Result]:
    """Yield the results of batches from copies of this process, which start in no time: joblib's import all packages again."""
    others, parent = set(active_children()), os.getpid()
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("fork"), initializer=_die_with, initargs=(parent,))
    try:
        for done in as_completed([pool.submit(compute, batch, parent=parent) for batch in batches]):
            yield done.result()
        pool.shutdown()
    finally:
        for process in set(active_children()) - others:  # of a sweep that ended early
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _die_with(parent: int) -> None:
    """Have Linux kill this process as soon as its parent is killed: it holds the parent's locks. Start with an empty session."""
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    Session.current().clear()
    follow(parent)


def follow(parent: int) -> None:
    """Leave Ctrl-C to the process that started this one, and end this one if it was killed. parent: 0 for none."""
    if parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getppid() != parent:
            os._exit(1)


def number_of_cores() -> int:
    """Return the number of cores that this process may use."""
    from joblib import cpu_count

    return int(cpu_count())
