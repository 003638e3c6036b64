"""The process that audits: it imports torch once and counts each rank in a fork of its own, since torch keeps what it learns of a mesh."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
import traceback
from typing import IO, Any

from perfmodel.execute.launch import die_with_parent

_LENGTH = struct.Struct("<q")


def send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; raises EOFError where there is none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


def main() -> None:
    """Reads a plan and a rank from standard input, until its end; answers with ("ok", counts, elapsed, memory) or ("error", text)."""
    die_with_parent()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not stand between the results
    import torch

    import perfmodel.execute.audit_count  # noqa: F401 - before the forks

    send(results, ("ready", torch.__version__))
    while True:
        try:
            plan, rank, dropout = receive(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            code = 1
            try:
                send(results, _audit(plan, rank, dropout))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            send(results, ("error", f"the auditing process ended with status {status}"))


def _audit(plan: Any, rank: int, dropout: bool) -> tuple[Any, ...]:
    import resource
    import warnings

    from perfmodel.execute.audit_count import torch_counts

    die_with_parent()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    try:
        counts = torch_counts(plan, rank, dropout=dropout)
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        return "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return "ok", counts, time.perf_counter() - start, float(memory)
