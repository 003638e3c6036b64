"""Process that audits: imports torch once and counts each rank in its own fork, since torch caches state per device mesh."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from perfmodel.execute.launch.processes import STOPPED_TIMEOUT, RunningClock, die_with_parent, exit_reason


def main(descriptor: int, parent: int) -> None:
    """Serve requests (number, (module, function), arguments) until the other end closes the connection.

    The reply is the number and ("ok", result, elapsed, memory), ("error", message of torch) or ("lost", how the fork ended).
    """
    die_with_parent(parent)
    warnings.simplefilter("ignore")
    connection = Connection(descriptor)
    import torch

    import perfmodel.execute.audit.count  # noqa: F401 - before the forks

    # Freeze the imported objects: garbage collection in a fork would scan them and copy their pages.
    gc.collect()
    gc.freeze()
    connection.send((0, "ready", str(torch.__version__)))
    while True:
        try:
            number, *question = connection.recv()
        except (EOFError, OSError):
            return
        server, child = os.getpid(), os.fork()
        if child == 0:
            code = 1
            try:
                die_with_parent(server)
                connection.send((number, *_audit(*question)))
                code = 0
            finally:
                os._exit(code)
        how = _wait_for(child)
        if how:
            remedy = (
                "free some memory, or count fewer microbatches by leaving out --every-microbatch" if "SIGKILL" in how else "audit again"
            )
            connection.send((number, "lost", f"the process that counts it {how}; {remedy}"))


def _wait_for(child: int) -> str:
    """Return how the fork ended, or "" after a normal exit. Kill a fork that stays stopped by a signal."""
    clock, stopped = RunningClock(), 0.0
    pause = 0.005
    is_still = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            code = os.waitstatus_to_exitcode(status)
            return f"died ({exit_reason(code)})" if code else ""
        if pid:
            is_still = os.WIFSTOPPED(status)
        stopped = stopped + clock.passed() if is_still else 0.0
        if stopped > STOPPED_TIMEOUT:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "was stopped from outside (SIGSTOP)"
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _audit(function: tuple[str, str], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    import resource

    start = time.perf_counter()
    try:
        module, name = function
        result = getattr(importlib.import_module(module), name)(*arguments)
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        return "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return "ok", result, time.perf_counter() - start, float(memory)
