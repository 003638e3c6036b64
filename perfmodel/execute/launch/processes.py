"""Child Python processes: start them, detect that they are stopped, and clean up however this process ends.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

#: Time after which a process stopped by SIGSTOP counts as failed. It is not slow: it makes no progress. [s]
STOPPED_TIMEOUT = 10.0

#: prctl option: the signal that a process gets when its parent dies (linux/prctl.h).
PR_SET_PDEATHSIG = 1

#: Remove the folder when standard input closes, which happens however the parent dies: SIGKILL runs no handler there.
#: Retries cover files that processes in the folder still write while they are killed.
_CLEANUP = 'trap "" HUP INT TERM; read -r _; for i in 1 2 3 4 5; do rm -rf -- "$0"; [ -e "$0" ] || exit 0; sleep 1; done'

#: Signals from outside: the last output of the process is unrelated to its death.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
#: Warnings and notes in a log: of torch's C++ ("[W1122 ... file.cpp:71]", "[rank0]:[W...") and of Python's `warnings`.
_WARNING = re.compile(r"^(\[rank\d+\]:)?\s*\[[WI]\d|\w*Warning: ")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends (Linux; elsewhere a closed pipe ends it)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether this child process is stopped and has not continued; False where the system does not report it."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except OSError:
        return False


class RunningClock:
    """Elapsed time of this process without suspensions: neither Ctrl-Z nor a sleeping machine counts towards a time limit."""

    _LONGEST = 1.0  # s; between two polls, which are a fraction of a second apart

    def __init__(self) -> None:
        self._last = time.monotonic()

    def passed(self) -> float:
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._LONGEST), now
        return passed


@contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a new folder that only this user can access. It is removed at the end, even if this process is killed."""
    folder = Path(tempfile.gettempdir(), f"perfmodel-run-{secrets.token_hex(8)}")
    try:
        cleanup = subprocess.Popen(
            ["/bin/sh", "-c", _CLEANUP, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except FileNotFoundError:  # a container without a shell: if this process is killed, the folder stays
        cleanup = None
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if cleanup is not None:
            assert cleanup.stdin is not None
            cleanup.stdin.close()
            cleanup.wait()


def start_python(
    function: tuple[str, str], *arguments: object, folder: Path, log: Path, settings: Mapping[str, str], without: Iterable[str] = ()
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a Python process that calls a function (module, name) with this process's modules, but not those of the working folder.

    Return the process and a connection to it. The function receives the descriptor of the other end, then the arguments.

    `python -c` puts the working folder first on its path, so a `queue.py` next to a plan file would replace Python's own module.
    The entries of this process's path are passed on in order, and the package itself is always importable.

    folder       for temporary files of the process and of the libraries that it imports
    log          file for its output
    settings     environment variables added for the child
    without      environment variables removed for the child
    """
    environment = {**os.environ, **settings}
    for name in without:
        environment.pop(name, None)
    package = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*(entry for entry in sys.path if entry), package]))
    environment["PYTHONSAFEPATH"] = "1"
    environment["TMPDIR"] = str(folder)
    ours, theirs = Pipe()
    module, name = function
    call = f"from {module} import {name}; {name}(*{(theirs.fileno(), *arguments)!r})"
    # This process handles Ctrl-C, which the terminal sends to the whole process group.
    with theirs, log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {call}"],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    return process, ours


def exit_reason(code: int) -> str:
    """Return how a process ended, from its return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_log_line(log: Path, code: int) -> str:
    """Return the last line of the log if it may explain the death: no warnings, and nothing after a signal from outside."""
    if -code in _FROM_OUTSIDE:
        return ""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not _WARNING.search(line)]
        if lines:
            return f", last words: {lines[-1][:200]}"
    return ""
