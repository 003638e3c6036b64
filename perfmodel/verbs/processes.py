"""Batches of independent work on several processes of one machine, or of a dask cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

from perfmodel.foundation.errors import RunError, bad_field, one_line

_Result = TypeVar("_Result")

LOCAL, DASK = "local", "dask"


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
    from joblib import Parallel, delayed, parallel_config
    from joblib.externals.loky.process_executor import TerminatedWorkerError

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
        try:
            yield from run(delayed(compute)(batch, parent=parent) for batch in batches)
        except TerminatedWorkerError as error:
            raise RunError(f"jobs={jobs}: a process was killed, perhaps for want of memory; {when_killed}") from error


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
