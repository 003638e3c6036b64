"""Python processes of our own: how they start, how one is seen to be stopped, and that nothing stays of them however this process ends.

Nothing here imports torch.
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
from pathlib import Path

#: A process that somebody stopped (SIGSTOP) for so long is given up. It is not slow: it does nothing at all. [s]
STOPPED_TIMEOUT = 10.0

#: prctl option: the signal that a process gets when its parent dies (linux/prctl.h).
PR_SET_PDEATHSIG = 1

#: Removes the folder when its standard input ends, which it does however the process at the other end does: SIGKILL runs no handler there.
#: What the folder's processes still write while they are killed takes another try.
_JANITOR = 'trap "" HUP INT TERM; read -r _; for i in 1 2 3 4 5; do rm -rf -- "$0"; [ -e "$0" ] || exit 0; sleep 1; done'

#: Signals that come from outside: what the process wrote last has nothing to do with its death.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
#: Lines of warnings and notes, of torch's C++ ("[W1122 ... file.cpp:71]", "[rank0]:[W..."), and of Python's `warnings`.
_WARNING = re.compile(r"^(\[rank\d+\]:)?\s*\[[WI]\d|\w*Warning: ")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends (Linux; elsewhere a closed pipe ends it)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether this child of ours was stopped and has not gone on; False where the system does not say."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except OSError:
        return False


class Patience:
    """Seconds of this process's own waking time: neither Ctrl-Z nor a sleeping machine uses up anybody's limit."""

    _LONGEST = 1.0  # s; between two looks, which are a fraction of a second apart

    def __init__(self) -> None:
        self._last = time.monotonic()

    def passed(self) -> float:
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._LONGEST), now
        return passed


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user may enter, gone in the end: also if this process is killed."""
    folder = Path(tempfile.gettempdir(), f"perfmodel-run-{secrets.token_hex(8)}")
    try:
        janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except FileNotFoundError:  # a container without a shell: whoever kills this process leaves the folder
        janitor = None
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if janitor is not None:
            assert janitor.stdin is not None
            janitor.stdin.close()
            janitor.wait()


def start_python(
    code: str, *, folder: Path, log: Path, descriptor: int, settings: Mapping[str, str], without: Iterable[str] = ()
) -> subprocess.Popen[bytes]:
    """A Python process that runs `code`, with this one's modules but not the working folder's.

    Python puts the working folder first on the path of `python -c`: a `queue.py` beside a plan file would then be run in place of
    Python's own. Entries of this process's path are handed on in their order; the package itself is found in any case.

    folder       for temporary files, its own and those of the libraries that it imports
    log          file that takes what it prints
    descriptor   of this process, which the new one keeps open
    settings     variables of its environment beside ours; without: those of ours that it does not get
    """
    environment = {**os.environ, **settings}
    for name in without:
        environment.pop(name, None)
    package = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*(entry for entry in sys.path if entry), package]))
    environment["PYTHONSAFEPATH"] = "1"
    environment["TMPDIR"] = str(folder)
    # Ctrl-C is this process's to handle: the terminal sends it to the whole group.
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {code}"
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(descriptor,),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


def cause_of_death(code: int) -> str:
    """How a process ended, from its return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_words(log: Path, code: int) -> str:
    """The last line of its log, where that may tell why a process ended; warnings do not, nor what stands before a SIGKILL."""
    if -code in _FROM_OUTSIDE:
        return ""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not _WARNING.search(line)]
        if lines:
            return f", last words: {lines[-1][:200]}"
    return ""
