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
    """Yield the result of `compute` for each batch, in the order of completion. One local job is this process.

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
            yield from run(delayed(_in_process)(compute, batch, parent) for batch in batches)
        except TerminatedWorkerError as error:
            raise RunError(f"jobs={jobs}: a process was killed, perhaps for want of memory; {when_killed}") from error


def _in_process(compute: Callable[..., _Result], batch: Any, parent: int) -> _Result:
    """Compute a batch. parent: the process that started this one, which handles Ctrl-C; 0: none."""
    if parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return compute(batch, parent=parent)


def stop_without(parent: int) -> None:
    """End this process if the one that started it was killed. parent: 0 for none."""
    if parent and os.getppid() != parent:
        os._exit(1)
