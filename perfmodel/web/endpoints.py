"""The local server of `perfmodel web`: one page, and answers as JSON.

It listens on 127.0.0.1 and reads no file named in a request. A worker process answers slow requests, one at a time: fast ones do not wait
for it, and cancelling a request ends the process.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from socket import MSG_PEEK, socket
from threading import Lock, Thread
from typing import Any, Final

from perfmodel.foundation.error_objects import ErrorCode, error_object
from perfmodel.foundation.errors import InputError, RunError, one_line
from perfmodel.web.site import page

HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8517
MOST_BYTES: Final = 1 << 20
"""Largest request [byte]; a pasted configuration has a few thousand."""

_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.ASCII | re.IGNORECASE)
_JSON = "application/json"
_LINES = "application/x-ndjson"
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """The server with its worker process.

    The lock serializes predictions, because they share compiled programs.
    """

    daemon_threads = True

    def __init__(self, port: int = DEFAULT_PORT) -> None:
        self.lock = Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            raise InputError(f"port={port}: {reason}; give another --port, or --port 0 for a free one") from None
        self.worker = AnswerProcess()
        Thread(target=self._warm_up, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def _warm_up(self) -> None:
        """Predict once, so that the first answer does not wait for loading."""
        from perfmodel.web.answers import answer

        with self.lock:
            answer("predict", {"model": "gpt2", "cluster": "dgx-h100", "chips": 8, "global_batch": 8, "seq_len": 1024})

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that the browser closes early."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.worker.end()


class _Refused(Exception):
    """Refused request, answered with an error of this status."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "perfmodel", ""
    timeout = 30  # s, to receive a request

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"/": self._page, "/api/known": self._known})

    def do_POST(self) -> None:
        self._answer({f"/api/{verb}": self._verb for verb in ("predict", "search", "explain")})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors of http.server as JSON, such as an unsupported method."""
        code = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else code
        self._send_object(error_object(f"request: {message or HTTPStatus(code).phrase}", ErrorCode.BAD_INPUT), code)

    def _answer(self, routes: Mapping[str, Callable[[], None]]) -> None:
        """Dispatch on the path. Refuse requests of other sites, by host name and by origin."""
        from perfmodel.web.answers import failure

        try:
            host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
            if not _OWN_HOST.fullmatch(host):
                raise _Refused(HTTPStatus.FORBIDDEN, "Host: must be 127.0.0.1 or localhost; open the address that `perfmodel web` prints")
            if origin is not None and origin != f"http://{host}":
                raise _Refused(HTTPStatus.FORBIDDEN, "Origin: must be this page itself; open the address that `perfmodel web` prints")
            path = self.path.partition("?")[0]
            if path not in routes:
                raise _Refused(HTTPStatus.NOT_FOUND, f"{self.command} {one_line(path)}: is not here; use {', '.join(routes)}")
            routes[path]()
        except _Refused as refused:
            self._send_object(error_object(str(refused), ErrorCode.BAD_INPUT), refused.status)
        except (Cancelled, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self._send_object(failure(error))

    def _page(self) -> None:
        html, policy = page()
        self._send(html.encode(), "text/html; charset=utf-8", more={"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"})

    def _known(self) -> None:
        from perfmodel.web.answers import known

        self._send_object(known())

    def _verb(self) -> None:
        """Answer quick requests at once, others line by line with progress if the page accepts it."""
        from perfmodel.web.answers import answer

        verb, data = self.path.partition("?")[0].rpartition("/")[2], self._request()
        if verb == "predict" and not data.get("remedies"):
            with self.server.lock:
                content = answer(verb, data)
            self._send_object(content)
            return
        by_line, is_open = _LINES in self.headers.get("Accept", ""), False
        for line in self.server.worker.answer_lines(verb, data, self.connection):
            if by_line and "progress" in line and not is_open:
                self._start(_LINES)
                is_open = True
            if is_open:
                self.wfile.write(_encoded(line))
            elif "progress" not in line:
                self._send_object(line.get("answer") or line["error"])

    def _request(self) -> dict[str, Any]:
        """Return the request without empty fields. Raises InputError that names every fault."""
        from perfmodel.foundation.schema import check
        from perfmodel.verbs.schemas import request_model

        if self.headers.get("Content-Type", "").partition(";")[0].strip() != _JSON:
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: must be {_JSON}; send a JSON object")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length: is missing; send the number of bytes")
        if len(length) > 9 or int(length) > MOST_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"request: is larger than {MOST_BYTES >> 10} KiB; paste a smaller text")
        try:
            data = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _Refused(HTTPStatus.BAD_REQUEST, "request: is not JSON; send an object of fields") from None
        if not isinstance(data, dict):
            raise InputError('request: must be a JSON object of fields; write {"model": "llama-3-8b", ...}')
        return check(request_model(), {name: value for name, value in data.items() if value not in (None, "")})

    def _send_object(self, content: Mapping[str, Any], status: int | None = None) -> None:
        """Send an object; by default, the status of an error follows from its code."""
        usual = {None: HTTPStatus.OK, "failed": HTTPStatus.INTERNAL_SERVER_ERROR}
        self._send(_encoded(content), _JSON, status or usual.get(content.get("code"), HTTPStatus.BAD_REQUEST))

    def _send(self, content: bytes, kind: str, status: int = HTTPStatus.OK, more: Mapping[str, str] = {}) -> None:  # never mutated
        self._start(kind, status, {"Content-Length": str(len(content)), **more})
        self.wfile.write(content)

    def _start(self, kind: str, status: int = HTTPStatus.OK, more: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()


def _encoded(content: object) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


# --- worker process ----------------------------------------------------------------------------------------------------


class Cancelled(Exception):
    """Cancellation of a request by the page."""


class AnswerProcess:
    """The worker process, restarted after it ended.

    It receives requests, `("search", {...})`, and sends objects: `progress` (a share), then `answer` or `error`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.start()

    def start(self) -> None:
        """Start the process in a new session, so that Ctrl-C in the terminal reaches only the server."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._pipe, far_end = Pipe()
        program = f"from perfmodel.web.endpoints import answer_requests; answer_requests({far_end.fileno()})"
        command = [sys.executable, "-P", "-c", program]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[far_end.fileno()], start_new_session=True)
        far_end.close()

    def answer_lines(self, verb: str, data: Mapping[str, Any], client: socket) -> Iterator[dict[str, Any]]:
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
