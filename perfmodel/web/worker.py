"""Worker process for slow requests, one at a time.

Fast requests do not wait for it, and cancelling a request ends the process. It reads one request per line, `["search", {...}]`, and writes
one object per line: `progress` (a share), then `answer` or `error`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from socket import socket
from threading import Lock
from typing import IO, Any, cast

from perfmodel.foundation.errors import RunError


class Cancelled(Exception):
    """Cancellation of a request by the page."""


class AnswerProcess:
    """The worker process, restarted after it ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process in a new session, so that Ctrl-C in the terminal reaches only the server."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-c", "from perfmodel.web.worker import main; main()"]
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        return self._process

    def answer_lines(self, verb: str, data: object, client: socket) -> Iterator[dict[str, Any]]:
        """Yield the lines of an answer. End the process and raise Cancelled if the client closes its connection."""
        while not self._lock.acquire(timeout=0.1):
            if has_closed(client):
                raise Cancelled
        is_done, text, watched = False, b"", [client.fileno()]
        try:
            process = self.start() if self._process is None or self._process.poll() is not None else self._process
            to, out = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout).fileno()
            to.write(f"{json.dumps([verb, data])}\n".encode())
            while not is_done:
                ready = select.select([out, *watched], [], [])[0]
                if client.fileno() in ready:
                    if has_closed(client):
                        raise Cancelled
                    watched = []  # more bytes than the announced length
                if out in ready:
                    chunk = os.read(out, 1 << 16)
                    if not chunk:
                        raise RunError("search: the process that answers has ended; ask again")
                    *lines, text = (text + chunk).split(b"\n")
                    for line in map(json.loads, lines):
                        is_done = "progress" not in line
                        yield line
        finally:
            if not is_done:
                self.end()
                self.start()
            self._lock.release()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def has_closed(client: socket) -> bool:
    """Return whether the client closed its connection, as browsers do for a replaced request."""
    try:
        ready = select.select([client], [], [], 0)[0]
        return bool(ready) and not client.recv(1, 2)  # 2: MSG_PEEK
    except (OSError, ValueError):
        return True


def main() -> None:
    """Answer until standard input ends."""
    from perfmodel.web.answers import answer_line

    def write(**line: object) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    os.nice(5)  # lower priority than slider requests
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        for text in sys.stdin:
            verb, data = json.loads(text)
            write(**answer_line(verb, data, lambda share: write(progress=share)))
    except BrokenPipeError:
        os._exit(1)
