"""Worker process for slow requests, one at a time.

Fast requests do not wait for it, and cancelling a request ends the process. It receives requests, `("search", {...})`, and sends objects:
`progress` (a share), then `answer` or `error`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from socket import MSG_PEEK, socket
from threading import Lock
from typing import Any

from perfmodel.foundation.errors import RunError


class Cancelled(Exception):
    """Cancellation of a request by the page."""


class AnswerProcess:
    """The worker process, restarted after it ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.start()

    def start(self) -> None:
        """Start the process in a new session, so that Ctrl-C in the terminal reaches only the server."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._pipe, far_end = Pipe()
        program = f"from perfmodel.web.worker import answer_requests; answer_requests({far_end.fileno()})"
        command = [sys.executable, "-P", "-c", program]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[far_end.fileno()], start_new_session=True)
        far_end.close()

    def answer_lines(self, verb: str, data: object, client: socket) -> Iterator[dict[str, Any]]:
        """Yield the objects of an answer. End the process and raise Cancelled if the client closes its connection."""
        while not self._lock.acquire(timeout=0.1):
            if has_closed(client):
                raise Cancelled
        is_done = False
        try:
            if self._process.poll() is not None:
                self.start()
            watched: list[Connection | socket] = [self._pipe, client]
            self._pipe.send((verb, data))
            while not is_done:
                ready = wait(watched)
                if client in ready:
                    if has_closed(client):
                        raise Cancelled
                    watched.remove(client)  # more bytes than the announced length
                if self._pipe in ready:
                    line = self._pipe.recv()
                    is_done = "progress" not in line
                    yield line
        except (EOFError, OSError):
            raise RunError("search: the process that answers has ended; ask again") from None
        finally:
            if not is_done:
                self.end()
                self.start()
            self._lock.release()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def has_closed(client: socket) -> bool:
    """Return whether the client closed its connection, as browsers do for a replaced request."""
    try:
        return bool(wait([client], timeout=0)) and not client.recv(1, MSG_PEEK)
    except (OSError, ValueError):
        return True


def answer_requests(descriptor: int) -> None:
    """Answer the requests of a pipe until the server ends."""
    from perfmodel.web.answers import answer_line

    pipe = Connection(descriptor)
    os.nice(5)  # lower priority than slider requests
    try:
        while True:
            verb, data = pipe.recv()
            pipe.send(answer_line(verb, data, lambda share: pipe.send({"progress": share})))
    except (EOFError, OSError):
        return
