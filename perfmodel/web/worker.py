"""A process that answers what takes long, one request after the other: slider answers do not wait for it, and it ends when it is cancelled.

It reads a request a line, `["search", {...}]`, and writes lines of one object: `progress` (a share), then `answer` or `error`.
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
    """The page no longer waits for the answer."""


class AnswerProcess:
    """The process, which is started again after it was ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process in a session of its own: Ctrl-C in the terminal is for the server alone."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-c", "from perfmodel.web.worker import main; main()"]
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        return self._process

    def answer_lines(self, verb: str, data: object, client: socket) -> Iterator[dict[str, Any]]:
        """Yield the lines of an answer. Raises Cancelled where the client has closed its connection; the process ends then."""
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
                    watched = []  # more bytes than it announced
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
    """Whether nobody reads the answer any more: a browser closes the connection of a request that it has replaced."""
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

    os.nice(5)  # a search does not slow the answers to sliders
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        for text in sys.stdin:
            verb, data = json.loads(text)
            write(**answer_line(verb, data, lambda share: write(progress=share)))
    except BrokenPipeError:
        os._exit(1)
